"""Neighbour replay: one training run again without one of its records, everything random held fixed.

The proof speaks of one step: a released vector whose noise does not depend on the data, and a sum that one example
moves by at most C. Whatever lies between the loader and the optimizer, a step that satisfies it can be checked from
outside. Two runs of the same seed (coins, noise, initial weights) differ in one record; at every release the second is
given the first one's result, so both stand at the same weights. Then

* the two noised sums differ by at most C in the clipping norm where the record was drawn, and not at all elsewhere
  (the noise is the same, so it cancels but for rounding);
* everything else is equal: which other records were drawn for which part of which step, the number of releases, q, the
  normaliser, n, the scale, the ledger, and the epsilon that is logged.

A run that passes has shown no fault; it is no proof of the guarantee, which rests on docs/guarantee.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_lap2 import _validate
from lightning_lap2.audit.bench import QUIET, Training, quiet
from lightning_lap2.audit.replay_result import Neighbour, ReplayResult
from lightning_lap2.batches.generators import seeded_generators
from lightning_lap2.callback.probe import Claim, Probe
from lightning_lap2.choices import Norm, order
from lightning_lap2.gradients import StepCall
from lightning_lap2.noise.grid import spacing
from lightning_lap2.sampling import Part, rebuild_loader
from lightning_lap2.sampling.units import bound_to

Null = Literal["absent", "zero"]
Progress = Callable[[float], None]

# How far C may be exceeded by rounding: a batch of another size takes other kernels, which round differently.
SLACK = {"32-true": 1e-5, "64-true": 1e-9}
LOW_PRECISION_SLACK = 2e-2


def replay(
    training: Training,
    *,
    records: int = 8,
    steps: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReplayResult:
    """Compares a training with itself without one record, for several records in turn.

    The record is left out of the batches in which it was drawn. Where the training draws random numbers of its own
    (dropout, random transforms), that would shift the numbers of all other records; there it stays in the batch and
    its gradient is zeroed instead. With ``unit`` a record is a user here, known by number, and left out with all
    records.

    Args:
        training: model, data, privacy and Trainer.
        records: how many records are replaced, one run each: those drawn most often, and one that was never drawn.
        steps: releases that are compared; a whole plan is made, and its beginning is run. Each is kept in memory
            (4 bytes times n).
        seed: of coins, noise and initial weights.
        progress: called with the fraction done after each run.

    Raises:
        TypeError, ValueError: an argument, by name; ``engine="ghost"`` with a training that draws random numbers.
        RuntimeError: the training made no release.
    """
    _validate.integer("records", records, minimum=1)
    _validate.integer("steps", steps, minimum=1)
    _validate.integer("seed", seed, minimum=0)
    watched = _watched(training)
    reference = _Run()
    report = _fit(watched, reference, seed, steps)
    if not reference.values:
        raise RuntimeError("the training made no release, so there is nothing to replay: raise max_steps or eps")
    null: Null = "zero" if reference.random or _dataset(watched).random else "absent"
    if null == "zero" and report.engine == "ghost":
        raise ValueError(
            "the training draws random numbers (dropout, random transforms), and engine='ghost' cannot zero one "
            "example's gradient with all else held fixed: replay with engine='vmap' (the same clipped sums), or "
            "without dropout"
        )
    chosen = _choose(reference, report.num_examples or 0, records)
    neighbours = []
    for number, record in enumerate(chosen, start=1):
        run = _Run(record, null, reference)
        other = _fit(watched, run, seed, steps)
        neighbours.append(_compare(record, reference, run, report.to_dict(), other.to_dict()))
        if progress is not None:
            progress(number / len(chosen))
    return ReplayResult(
        claim=report,
        null=null,
        norm=reference.claim.mechanism.norm,
        steps=len(reference.values),
        slack=SLACK.get(str(report.precision), LOW_PRECISION_SLACK),
        neighbours=tuple(neighbours),
        seed=seed,
    )


class _Run(Probe):
    """What one run did, step by step; with a record and a reference, the run without it.

    Attributes:
        values: each release, flat ``[n]``.
        coins: of each loader batch the release, its part, and the records drawn, the replaced one too.
        drawn_at: releases in which each record was drawn.
        random: the step used one of the global random generators.
    """

    cells = 2**30  # two releases with one noise are compared: finer than what is compared

    def __init__(self, record: int | None = None, null: Null = "absent", reference: _Run | None = None) -> None:
        self.record, self.null, self.reference = record, null, reference
        if record is not None and null == "absent":
            self.absent = frozenset((record,))
        if reference is not None:
            self.trial = reference.trial
        self.values: list[Tensor] = []
        self.coins: list[tuple[int, int, int, tuple[int, ...]]] = []
        self.drawn_at: dict[int, set[int]] = {}
        self.logged: list[float] = []
        self.random = False

    def begin(self, claim: Claim) -> None:
        self.claim = claim

    def drawn(self, part: Part, call: StepCall) -> StepCall:
        present = (*part.records, *part.left_out)
        for index in present:
            self.drawn_at.setdefault(index, set()).add(part.release)
        self.coins.append((part.release, part.index, part.of, tuple(sorted(present))))
        context = call.context
        call = replace(call, context=lambda: self._noting(context()))
        if self.record not in part.records or self.null == "absent":
            return call
        place = part.records.index(self.record)
        return replace(call, revise=lambda places, gradients: _without(list(places), place, gradients))

    @contextmanager
    def _noting(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Around the user's step: whether it draws random numbers."""
        before = _states()
        with context:
            yield
        self.random |= not _equal_states(before, _states())

    def released(self, values: Tensor) -> None:
        self.values.append(values.detach().clone())

    def callback(self, steps: int) -> Any:
        """A Lightning callback that puts the reference's releases in place of this run's, and ends after ``steps``."""
        import lightning.pytorch as pl

        run = self

        class Replaying(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                at = len(run.values) - 1
                if run.reference is not None and 0 <= at < len(run.reference.values):
                    run.claim.layout.write_grads(run.reference.values[at].clone())

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                run.logged.append(float(trainer.callback_metrics.get("privacy/epsilon", float("nan"))))
                if len(run.values) >= steps:
                    raise _EnoughError

        return Replaying()


class _EnoughError(Exception):
    """Ends a fit whose first steps were asked for."""


def _without(places: list[int], place: int, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """``gradients`` ``[b, *shape]`` of the examples at ``places`` with zeros for that at ``place``, if it is there."""
    if place not in places:
        return gradients
    row = places.index(place)
    found = [g.clone() for g in gradients]
    for g in found:
        g[row] = 0.0
    return found


def _fit(training: Training, run: _Run, seed: int, steps: int) -> Any:
    """One fit; its privacy report."""
    import lightning.pytorch as pl

    from lightning_lap2.lightning import Lap2Privacy

    privacy = Lap2Privacy(**{**training.privacy, "noise_seed": seed})
    privacy.attach(run)
    with seeded_generators(seed), quiet():
        trainer = pl.Trainer(**{**training.trainer, **QUIET}, callbacks=[privacy, run.callback(steps)])
        with suppress(_EnoughError):
            trainer.fit(training.model(), training.loader)
    return privacy.report()


def _choose(reference: _Run, num_examples: int, records: int) -> list[int]:
    """Records drawn most often, and, if more than one is asked for, one that was not drawn."""
    by_draws = sorted(reference.drawn_at, key=lambda index: (-len(reference.drawn_at[index]), index))
    never = [index for index in range(num_examples) if index not in reference.drawn_at][:1] if records > 1 else []
    return by_draws[: records - len(never)] + never


def _compare(record: int, one: _Run, other: _Run, report: dict[str, Any], without: dict[str, Any]) -> Neighbour:
    """What the run without ``record`` shows beside the whole one."""
    changed = [key for key in report if key != "caveats" and report[key] != without.get(key)]
    public = {
        "coins": one.coins == other.coins,
        "releases": len(one.values) == len(other.values),
        "logged epsilon": one.logged == other.logged,
    }
    changed += [name for name, equal in public.items() if not equal]
    # C less its margin, which is for rounding and not for a gradient to use up
    norm, unit = one.claim.mechanism.norm, one.claim.mechanism.clip_norm / one.claim.normaliser
    drawn_at = one.drawn_at.get(record, set())
    cell = spacing(one.claim.mechanism.scale, one.cells) / one.claim.normaliser
    cells = cell * _length(torch.ones(one.claim.layout.numel, dtype=torch.float64), norm) / unit
    moved, elsewhere, rounding = 0.0, 0.0, 0.0
    for number, (mine, theirs) in enumerate(zip(one.values, other.values, strict=False)):
        difference = _length(mine.double() - theirs.double(), norm) / unit
        rounding = max(rounding, 4 * torch.finfo(mine.dtype).eps * _length(mine.double(), norm) / unit + cells)
        if number + _first_release(one) in drawn_at:
            moved = max(moved, difference)
        else:
            elsewhere = max(elsewhere, difference)
    return Neighbour(
        record=record,
        draws=len(drawn_at),
        moved=moved,
        moved_elsewhere=elsewhere,
        rounding=rounding,
        changed=tuple(changed),
    )


def _first_release(run: _Run) -> int:
    return run.coins[0][0]


def _length(values: Tensor, norm: Norm) -> float:
    return float(torch.linalg.vector_norm(values, order(norm)))


# -- random numbers of the training's own -----------------------------------------------------------------------------


@dataclass
class _Watched(Dataset[Any]):
    """The data set, noting whether reading a record uses a global random generator."""

    dataset: Any
    random: bool = field(default=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        before = _states()
        record = self.dataset[index]
        self.random |= not _equal_states(before, _states())
        return record


def _watched(training: Training) -> Training:
    """In this process, where a random transform can be seen, and repeated."""
    given = training.loader
    loader: DataLoader[Any] = rebuild_loader(given, given.batch_sampler, _Watched(given.dataset))  # type: ignore[arg-type]
    for name, value in (("num_workers", 0), ("prefetch_factor", None), ("persistent_workers", False)):
        loader.__dict__[name] = value
    loader.__dict__["_DataLoader__multiprocessing_context"] = None
    privacy, unit = training.privacy, training.privacy.get("unit")
    if unit is not None:
        privacy = {**privacy, "unit": bound_to(given.dataset, unit)}
    return replace(training, loader=loader, privacy=privacy)


def _dataset(training: Training) -> _Watched:
    found = training.loader.dataset
    assert isinstance(found, _Watched)
    return found


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's generator)


def _equal_states(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    numbers = all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    return torch.equal(one[0], other[0]) and one[1] == other[1] and numbers
