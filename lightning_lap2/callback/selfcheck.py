"""The check on a few real records at fit start: brings loader, transfer hooks and Trainer to ``preflight``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_lap2.callback.rowcheck import identical_views, refuse_mixed_rows, refuse_moved_rows
from lightning_lap2.gradients import Engine, ParameterLayout, StepCall
from lightning_lap2.gradients.batches import take_apart
from lightning_lap2.gradients.preflight import preflight, unchecked_ghost

# records the preflight is given, and records looked at to find unlike ones among them
_RECORDS, _CANDIDATES = 8, 64


@dataclass(frozen=True)
class Checked:
    """What the self-check learnt.

    Attributes:
        notes: sentences for the report.
        logged_names: what ``training_step`` logs.
        identical_views: the views of each record looked at are the same to the bit, and ``training_step`` draws
            nothing at random that could make them differ.
        engine: the engine that was looked at; empty where there was nothing to look at.
        compared: its sums were compared with plain autograd's.
    """

    notes: tuple[str, ...] = ()
    logged_names: frozenset[str] = frozenset()
    identical_views: bool = False
    engine: str = ""
    compared: bool = False


def check_step(
    trainer: Any, module: Any, engine: Engine, layout: ParameterLayout, loader: DataLoader[Any], *, views: int = 1
) -> Checked:
    """Runs the user's step on a few records of the train data, spending none of it (nothing is kept or logged).

    Args:
        loader: the user's own loader; its data set and ``collate_fn`` are used, not its sampler.
        views: rows per record.

    Raises:
        UnsupportedModelError: one sentence saying what mixes examples, or cannot be run, and what to use instead.
    """
    if isinstance(loader.dataset, IterableDataset):
        if engine.name == "ghost":
            raise unchecked_ghost("an IterableDataset has no records to look at twice")
        return Checked(("whether examples mix was not checked: an IterableDataset has no records to look at twice",))
    container = trainer.fit_loop._combined_loader._spec

    def collate(chosen: Any) -> Any:
        """As the step gets it: in the list or dict that the loader was given in."""
        return tree_unflatten([loader.collate_fn(chosen)], container)

    indices, records = _unlike_records(loader.dataset, collate)

    def transfer(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def call(batch: Any, examples: int) -> StepCall:
        arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), transfer(batch), 0)
        return StepCall(tuple(arguments.values()), examples, trainer.precision_plugin.train_step_context, views)

    def batch_of(chosen: Any) -> Any:
        return transfer(collate(chosen))

    refuse_mixed_rows(records, batch_of)
    identical = False
    if views > 1:
        refuse_moved_rows(records, batch_of)
        identical = identical_views(loader.dataset, indices, views, batch_of)
        records = [[loader.dataset[index] for _ in range(views)] for index in indices]
    result = preflight(engine, module, layout, records=records, collate=collate, call=call, views=views)
    return Checked(
        result.notes,
        result.logged_names,
        identical and not result.random,
        engine=engine.name,
        compared="agreement" in result.checked,
    )


def _unlike_records(dataset: Any, collate: Callable[[list[Any]], Any]) -> tuple[list[int], list[Any]]:
    """Indices and records of a few spread over the data set, the most unlike first: sequences padded to one length
    differ in how many tokens they have, which is what an unequally weighted loss (a mean over tokens) shows on."""
    size = len(dataset)
    count = min(_CANDIDATES, size)
    candidates = [(index * size // count, dataset[index * size // count]) for index in range(count)]
    ranked = sorted(candidates, key=lambda candidate: _content(collate([candidate[1]])))
    spread = [ranked[index * (count - 1) // max(1, min(_RECORDS, count) - 1)] for index in range(min(_RECORDS, count))]
    if len(spread) > 1:
        spread = [spread[0], spread[-1], *spread[1:-1]]
    return [index for index, _ in spread], [record for _, record in spread]


def _content(batch: Any) -> int:
    """How much a batch of one holds besides padding: non-zero and distinct entries of its integer tensors."""
    whole = [t for t in take_apart(batch).tensors if not t.is_floating_point() and not t.is_complex()]
    return sum(int(t.count_nonzero()) + t.unique().numel() for t in whole)
