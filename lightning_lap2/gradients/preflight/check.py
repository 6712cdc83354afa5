"""Does this model's step, on this data, have per-example gradients? Found out before any data is spent.

The clipped sum has sensitivity C only if each example's gradient depends on its own record alone. Some ways
to break that are visible in the layers and refused by name elsewhere; the rest is looked for here, by running
the user's code on a handful of real records. A check of a few records can find a fault, never prove its
absence.

Nothing that depends on the values of the records reaches a message, a log or an attribute: messages hold
names, counts and shapes. That a run is refused, or gets a note, is itself a fact about the records looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.batches import BatchParts
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.preflight.algebra import (
    Evaluation,
    combine,
    distance,
    norm,
    reduction,
)
from lightning_lap2.gradients.preflight.draws import still
from lightning_lap2.gradients.preflight.probe import Collate, MakeCall, Probe, select
from lightning_lap2.gradients.preflight.state import untouched

_SEEDS = (0, 1, 2)
# an example's gradient with and without batch mates; a batch's gradient against its examples'
_TOLERANCE = 1e-3
# an engine's sum against the same sum by plain autograd
_AGREEMENT = 1e-4
# both, where parameters or autocast have as few as 8 significant bits
_LOW_PRECISION = 5e-2
# numbers of trainable scalars from which 3 and 2 examples are looked at instead of 4
_THREE_FROM, _TWO_FROM = 10**7, 10**8

_SUMMED = (
    "training_step returns the sum of its examples' losses, not their mean; the private gradient is divided "
    "by the expected batch size all the same, so the learning rate acts as it does for a mean"
)
_VIEWS_SUMMED = "; likewise the gradients of an example's views are added up before clipping, not averaged"
_WEIGHTED = (
    "training_step weights the examples of a batch unequally (a mean over tokens, class weights?); "
    "privately each example's loss is its own mean, so every example counts the same"
)


@dataclass(frozen=True)
class PreflightResult:
    """What the pre-flight learnt.

    Attributes:
        notes: sentences for the user and the report: changes of meaning, and what could not be checked.
        logged_names: the names that ``training_step`` passes to ``self.log`` and ``self.log_dict``.
        checked: which of ``"rows"``, ``"engine"``, ``"collate"``, ``"mixing"``, ``"agreement"`` were carried
        out.
        random: ``training_step`` draws random numbers, so that equal rows may differ in it.
    """

    notes: tuple[str, ...]
    logged_names: frozenset[str]
    checked: tuple[str, ...]
    random: bool = False


def preflight(
    engine: Engine,
    module: nn.Module,
    layout: ParameterLayout,
    *,
    records: Sequence[Any],
    collate: Collate,
    call: MakeCall,
    views: int = 1,
) -> PreflightResult:
    """Runs ``module.training_step`` on a few records and refuses what per-example gradients cannot express.

    Checked, in this order: ``collate`` gives one row per record; ``engine`` runs the step; a record's loss
    and gradient do not change with the records it is collated with; a batch's loss is an average (or the sum)
    of losses of one example each; the engine's sum, clipped and not, is that of plain autograd.

    Relative tolerances: 1e-3, and 1e-4 between engine and autograd; 5e-2 for both under bf16. What ``module``
    computes is left as it was, see :func:`~lightning_lap2.gradients.preflight.state.untouched`. Costs some 20
    passes over at most k examples, and k + 2 flat gradients of memory beside a copy of the module's tensors;
    k = 4, from 10^7 trainable scalars on 3, from 10^8 on 2.

    Args:
        engine: the engine that training will use, on ``module``.
        module: in the mode it trains in.
        layout: its trainable parameters.
        records: a few records of the training set, in the form ``collate`` takes them. 8 give some choice:
            those of unlike shapes are preferred, those without a finite gradient passed over.
        collate: the loader's ``collate_fn``.
        call: ``call(batch, count)`` is the step call for a batch of ``count`` examples, moved to the device.
        views: rows per example. Where it is above 1 each of ``records`` is a list of so many views of one record,
            and an example of everything above is its views together.

    Raises:
        UnsupportedModelError: from the engine or the checks above; one sentence with what to use instead.
        Exception: whatever the user's own code raises for a whole batch.
    """
    with untouched(module) as names:
        flight = _Flight(engine, Probe(module, layout, collate, call, views))
        flight.run([list(record) for record in records] if views > 1 else [[record] for record in records])
    return PreflightResult(tuple(flight.notes), frozenset(names), tuple(flight.checked), flight.random)


def unchecked_ghost(why: str) -> UnsupportedModelError:
    """Ghost tells examples apart by the sizes of what it sees. Where a sequence is as long as the batch it may take
    one for the other, and only the comparison with plain autograd shows that."""
    return UnsupportedModelError(
        f"engine='ghost' must be compared with plain autograd on a few records before it trains, but {why}; use "
        "engine='vmap'"
    )


class _Flight:
    """One pre-flight: the order of its checks and what they found."""

    def __init__(self, engine: Engine, probe: Probe) -> None:
        self.engine, self.probe = engine, probe
        self.notes: list[str] = []
        self.checked: list[str] = []
        self.tolerance, self.agreement = _TOLERANCE, _AGREEMENT
        self._unsteady = False

    @property
    def random(self) -> bool:
        return self.probe.drew or self._unsteady

    def run(self, records: list[list[Any]]) -> None:
        probe = self.probe
        alone = [probe.batch([record]) for record in records]
        order = _unlike_first([tuple(tuple(t.shape) for t in parts.tensors) for parts in alone])
        n = probe.layout.numel
        limit = 5 if n < _THREE_FROM else 3 if n < _TWO_FROM else 2
        if not order:
            self._not_checked("there are no records")
            return
        first = probe.batch([records[i] for i in order[:limit]])
        self.checked.append("rows")
        probe.sum_of(self.engine, first, float("inf"))  # the engine's own refusals
        self.checked.append("engine")
        if probe.low_precision(first):
            self.tolerance = self.agreement = _LOW_PRECISION
        chosen = self._with_finite_gradient(alone, order, limit, first)
        if not chosen:
            return
        some, some_alone = [records[i] for i in chosen], [alone[i] for i in chosen]
        batch = probe.batch(some)
        if not probe.evaluate(batch).finite:
            self._not_checked("that takes a batch with a finite loss and gradient")
            return
        crosses = self._hold_still(batch)
        if crosses is None:
            return
        parts = self._alone(batch)
        self._check_collate(some, some_alone, batch, parts)
        self._check_mixing(batch, parts, crosses)
        self._check_agreement(batch, parts)

    def _alone(self, batch: BatchParts) -> list[Evaluation]:
        """Loss and gradient of each example of ``batch`` by itself."""
        return [self.probe.evaluate_alone(self.probe.select(batch, [i])) for i in range(self.probe.count(batch))]

    def _not_checked(self, why: str) -> None:
        if self.engine.name == "ghost":
            raise unchecked_ghost(why)
        self.notes.append(f"whether the loss or collate_fn mixes examples was not checked: {why}")

    def _mixes(self, how: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.probe.step} mixes the examples of a batch (contrastive pairs, mixup, batch statistics?): "
            f"{how}; private training needs a loss that is an average over examples, each term computed from "
            "its own example alone"
        )

    def _with_finite_gradient(
        self, alone: list[BatchParts], order: list[int], limit: int, first: BatchParts
    ) -> list[int]:
        """Indices of at most ``limit`` records whose gradient is finite; none where there are fewer than two.

        A poisoned record is the engine's to drop, and would hide everything here.
        """
        chosen: list[int] = []
        for index in order:
            if len(chosen) < limit and self.probe.evaluate_alone(alone[index]).finite:
                chosen.append(index)
        if len(chosen) >= 2:
            return chosen
        if not chosen and len(order) >= 2 and self.probe.evaluate(first).finite:
            raise self._mixes("its loss is finite for a batch but for none of its examples alone")
        self._not_checked("that takes two records with a finite loss and gradient")
        return []

    def _hold_still(self, batch: BatchParts) -> bool | None:
        """Makes the step deterministic, in eval mode if need be.

        Returns:
            Whether, in train mode, the two halves of a batch were seen to interact (only looked at where
            train mode stays random); ``None`` where the step stays random in eval mode too.
        """
        if self._deterministic(batch):
            return False
        self._unsteady = True
        crosses = self._halves_interact(batch)
        for owner in self.probe.module.modules():
            owner.training = False
        if self._deterministic(batch):
            self.notes.append(
                f"{self.probe.step} draws random numbers in train mode, so the pre-flight checked it in eval mode"
            )
            return crosses
        if crosses:
            raise self._mixes("what one half of a batch contributes depends on the other half")
        if self.engine.name == "ghost":
            raise UnsupportedModelError(
                f"{self.probe.step} draws random numbers that are not torch's, so engine='ghost' cannot be "
                "checked against plain autograd: draw them with torch, or use engine='vmap'"
            )
        self._not_checked(f"{self.probe.step} draws random numbers that are not torch's")
        return None

    def _deterministic(self, batch: BatchParts) -> bool:
        first, second = (self.probe.evaluate(batch, seed) for seed in _SEEDS[:2])
        return self._same(first, second, 0.0, 0.0)

    def _same(self, a: Evaluation, b: Evaluation, gradient_floor: float, loss_floor: float) -> bool:
        """Whether two evaluations agree, relative to the larger of them and of the floors."""
        scale = max(norm(a.gradient), norm(b.gradient), gradient_floor)
        loss_scale = max(abs(a.loss), abs(b.loss), loss_floor)
        near = distance(a.gradient, b.gradient) <= self.tolerance * scale
        return near and abs(a.loss - b.loss) <= self.tolerance * loss_scale

    def _halves_interact(self, batch: BatchParts) -> bool:
        """For a step that stays random. With seed and shapes fixed, a loss that does not mix is a sum over
        rows: exchanging one half of them has the same effect whatever the other half holds.
        """
        half = self.probe.count(batch) // 2
        a, b = list(range(half)), list(range(half, 2 * half))
        for seed in _SEEDS:
            runs = [self.probe.evaluate(self.probe.select(batch, rows), seed) for rows in (a + b, b + b, a + a, b + a)]
            straight = combine([runs[0].gradient, runs[3].gradient], [1.0, 1.0])
            crossed = combine([runs[1].gradient, runs[2].gradient], [1.0, 1.0])
            scale = sum(norm(run.gradient) for run in runs)
            if distance(straight, crossed) > self.tolerance * scale:  # False where a run is not finite
                return True
        return False

    def _check_collate(
        self, records: list[list[Any]], alone: list[BatchParts], batch: BatchParts, parts: list[Evaluation]
    ) -> None:
        """Each record, collated alone, gives the loss and gradient of one row of ``batch``: in any order, but the views
        of a record together."""
        if not _equal(batch, self.probe.batch(records, _SEEDS[1])):
            self._check_random_collate(records)
            return
        gradient_floor = self.tolerance * max(norm(part.gradient) for part in parts)
        loss_floor = self.tolerance * max(abs(part.loss) for part in parts)
        rows = list(range(self.probe.count(batch)))
        for single in map(self.probe.evaluate_alone, alone):
            same = [row for row in rows if self._same(single, parts[row], gradient_floor, loss_floor)]
            if not same:
                raise self._leaks(alone, batch)
            rows.remove(same[0])
        self.checked.append("collate")

    def _check_random_collate(self, records: list[list[Any]]) -> None:
        """For a ``collate_fn`` with draws of its own: with the seed fixed, the first row keeps its loss and
        gradient when the others change places.
        """
        rotated = [records[0], *records[2:], records[1]]
        for seed in _SEEDS:
            rows = [self.probe.select(self.probe.batch(order, seed), [0]) for order in (records, rotated)]
            before, after = (self.probe.evaluate_alone(row) for row in rows)
            if not self._same(before, after, 0.0, 0.0):
                raise self._leaks(rows[:1], rows[1])
        self.notes.append(
            "whether padding lets a record's gradient depend on its batch mates was not checked: collate_fn "
            "draws random numbers that are not torch's"
        )

    def _leaks(self, alone: list[BatchParts], batch: BatchParts) -> UnsupportedModelError:
        for single in alone:
            for index, (one, many) in enumerate(zip(single.tensors, batch.tensors, strict=True)):
                if one.shape[1:] != many.shape[1:]:
                    return UnsupportedModelError(
                        "the gradient of a record changes with the records it is batched with: collate_fn "
                        f"gives tensor {index} of the batch the shape {list(one.shape[1:])} for a record "
                        f"alone and {list(many.shape[1:])} beside longer ones (padding to the longest "
                        "without a mask?); pad to a fixed length, or pass an attention mask and leave "
                        "padding out of the loss"
                    )
        return UnsupportedModelError(
            "the gradient of a record changes with the records it is batched with, at equal shapes: "
            "collate_fn computes a record's row from other records as well (mixup, normalisation over the "
            "batch, a count over the batch?); do it record by record"
        )

    def _check_mixing(self, batch: BatchParts, parts: list[Evaluation], crosses: bool) -> None:
        """The loss of a batch is an average or a sum of its examples' losses."""

        def batch_of(rows: list[int]) -> Evaluation:
            return self.probe.evaluate(self.probe.select(batch, rows))

        how = reduction(parts, batch_of, self.tolerance)
        if how == "mixed":
            raise self._mixes("the gradient of a batch is not an average of the gradients of its examples")
        if crosses and how != "weighted":  # a weighted mean's halves share their normaliser
            raise self._mixes("what one half of a batch contributes depends on the other half")
        if how != "mean":
            # ghost finds each example's own mean where the loss is a cross entropy over tokens, and only there
            if self.engine.name == "ghost" and not self._agrees(batch, parts):
                kind = "the sum of its examples' losses" if how == "sum" else "an unequally weighted mean"
                raise UnsupportedModelError(
                    f"{self.probe.step} returns {kind} (over tokens or classes?), but engine='ghost' needs "
                    "the plain mean over examples: return that, or use engine='vmap'"
                )
            summed = _SUMMED + (_VIEWS_SUMMED if self.probe.views > 1 else "")
            self.notes.append(summed if how == "sum" else _WEIGHTED)
        self.checked.append("mixing")

    def _check_agreement(self, batch: BatchParts, parts: list[Evaluation]) -> None:
        if not self._agrees(batch, parts):
            raise self._disagrees()
        views, count = self.probe.views, self.probe.count(batch)
        if views > 1:
            # rows of unlike records in one example: a step that sorts or shuffles its rows leaves equal ones together
            # and would pass with true views, while at training they end up in other examples
            across = select(batch, [example * views + view for view in range(views) for example in range(count)])
            if not self._agrees(across, self._alone(across)):
                raise self._disagrees()
        self.checked.append("agreement")

    def _agrees(self, batch: BatchParts, parts: list[Evaluation]) -> bool:
        """The engine's sum is that of plain autograd, without clipping and with about half of them clipped."""
        norms = [norm(part.gradient) for part in parts]
        for bound in (float("inf"), median(norms) or 1.0):
            weights = [min(1.0, bound / size) if size > 0 else 1.0 for size in norms]
            expected = combine([part.gradient for part in parts], weights)
            with still(_SEEDS[0]):
                found = self.probe.sum_of(self.engine, batch, bound)
            scale = sum(weight * size for weight, size in zip(weights, norms, strict=True))
            if not distance(found, expected) <= self.agreement * scale:
                return False
        return True

    def _disagrees(self) -> UnsupportedModelError:
        name = self.engine.name
        advice = {
            "ghost": "use engine='vmap', which takes them from autograd",
            "vmap": "use engine='loop', which runs one example at a time",
        }.get(name, "please report it")
        return UnsupportedModelError(
            f"engine={name!r} does not reproduce the per-example gradients of {self.probe.step} that plain "
            f"autograd gives on a few records: {advice}"
        )


def _unlike_first(shapes: list[tuple[tuple[int, ...], ...]]) -> list[int]:
    """Indices, those whose shapes were not seen before first."""
    new = [i for i, shape in enumerate(shapes) if shape not in shapes[:i]]
    return new + [i for i in range(len(shapes)) if i not in new]


def _equal(a: BatchParts, b: BatchParts) -> bool:
    return all(
        x.shape == y.shape and bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())
        for x, y in zip(a.tensors, b.tensors, strict=True)
    )
