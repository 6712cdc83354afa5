"""The check on a few real records at fit start: brings loader, transfer hooks and Trainer to ``preflight``."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_lap2.gradients import Engine, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.batches import take_apart
from lightning_lap2.gradients.preflight import preflight

# records the preflight is given, and records looked at to find unlike ones among them
_RECORDS, _CANDIDATES = 8, 64
_SEEDS = range(5)


@dataclass(frozen=True)
class Checked:
    """What the self-check learnt: sentences for the report, and the names that ``training_step`` logs."""

    notes: tuple[str, ...] = ()
    logged_names: frozenset[str] = frozenset()


def check_step(trainer: Any, module: Any, engine: Engine, layout: ParameterLayout, loader: DataLoader[Any]) -> Checked:
    """Runs the user's step on a few records of the train data, spending none of it (nothing is kept or logged).

    Args:
        loader: the user's own loader; its data set and ``collate_fn`` are used, not its sampler.

    Raises:
        UnsupportedModelError: one sentence saying what mixes examples, or cannot be run, and what to use instead.
    """
    if isinstance(loader.dataset, IterableDataset):
        return Checked(("whether examples mix was not checked: an IterableDataset has no records to look at twice",))
    container = trainer.fit_loop._combined_loader._spec

    def collate(chosen: list[Any]) -> Any:
        """As the step gets it: in the list or dict that the loader was given in."""
        return tree_unflatten([loader.collate_fn(chosen)], container)

    records = _unlike_records(loader.dataset, collate)

    def transfer(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def call(batch: Any, rows: int) -> StepCall:
        arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), transfer(batch), 0)
        return StepCall(tuple(arguments.values()), rows, trainer.precision_plugin.train_step_context)

    _refuse_mixed_rows(records, lambda chosen: transfer(collate(chosen)))
    result = preflight(engine, module, layout, records=records, collate=collate, call=call)
    return Checked(result.notes, result.logged_names)


def _unlike_records(dataset: Any, collate: Callable[[list[Any]], Any]) -> list[Any]:
    """A few records spread over the data set, the most unlike first: sequences padded to one length differ in how
    many tokens they have, which is what an unequally weighted loss (a mean over tokens) shows on."""
    size = len(dataset)
    count = min(_CANDIDATES, size)
    candidates = [dataset[index * size // count] for index in range(count)]
    ranked = sorted(candidates, key=lambda record: _content(collate([record])))
    spread = [ranked[index * (count - 1) // max(1, min(_RECORDS, count) - 1)] for index in range(min(_RECORDS, count))]
    return [spread[0], spread[-1], *spread[1:-1]] if len(spread) > 1 else spread


def _content(batch: Any) -> int:
    """How much a batch of one holds besides padding: non-zero and distinct entries of its integer tensors."""
    whole = [t for t in take_apart(batch).tensors if not t.is_floating_point() and not t.is_complex()]
    return sum(int(t.count_nonzero()) + t.unique().numel() for t in whole)


def _refuse_mixed_rows(records: list[Any], batch_of: Callable[[list[Any]], Any]) -> None:
    """A record's row must not change when its batch mates do: under one state of every random generator, the first
    row of two batches that share only their first record must be the same to the bit. Finds mixup, CutMix and
    batch normalisation in ``collate_fn`` and the batch transfer hooks, random or not.

    Batches of unlike shapes (padding) draw unlike random numbers and are left to the preflight.

    Raises:
        UnsupportedModelError: rows mix.
    """
    if len(records) < 5:
        return
    first, others, strangers = records[0], records[1:3], records[3:5]
    for seed in _SEEDS:
        with _generators(seed):
            mine = take_apart(batch_of([first, *others])).tensors
        with _generators(seed):
            theirs = take_apart(batch_of([first, *strangers])).tensors
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            return
        for a, b in zip(mine, theirs, strict=True):
            if not torch.equal(torch.nan_to_num(a[0].float()), torch.nan_to_num(b[0].float())):
                raise UnsupportedModelError(
                    "a record's row of the batch changes with the records it is batched with (mixup, CutMix or batch "
                    "statistics in collate_fn or on_before/after_batch_transfer), so clipping does not bound what one "
                    "record does; transform each record by itself"
                )


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global generators at ``seed``, and afterwards as they were."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state users' code draws from)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            # not torch.manual_seed, which queues a call (and a stack trace) for every kind of device there is
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002
