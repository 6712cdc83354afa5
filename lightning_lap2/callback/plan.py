"""From the Trainer's limits and the budget to a noise multiplier and a last step. No Lightning, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant, NoFiniteNoiseError, Release
from lightning_lap2.accounting.budget import least_multiplier, most_steps
from lightning_lap2.callback.settings import Settings
from lightning_lap2.mechanism import COUNT_SENSITIVITY

# A calibrated run ends a hair below eps. Noise calibrated for that hair would wreck the model: no step is better.
_AS_GOOD_AS_SPENT = 1 - 1e-3


@dataclass(frozen=True)
class Horizon:
    """How far the Trainer's own limits reach from here.

    Attributes:
        steps: optimizer steps left, ``inf`` when neither ``max_steps`` nor ``max_epochs`` ends the run.
        passes: passes over the data that those steps touch (for ``sampling="none"``, charged once a pass).
        global_end: the Trainer's global step at the end, by which a resumed run recognises its plan.
    """

    steps: float
    passes: float
    global_end: float


def horizon(
    *,
    global_step: int,
    max_steps: int,
    max_epochs: int,
    epochs_done: int,
    batches_done: int,
    batches_per_epoch: float,
    accumulate: int,
) -> Horizon:
    """Optimizer steps and passes left.

    Args:
        global_step: optimizer steps the Trainer has counted.
        max_steps, max_epochs: the Trainer's limits, -1 for none.
        epochs_done: epochs fully trained.
        batches_done: loader batches trained in the epoch after those (mid-epoch resume).
        batches_per_epoch: loader batches per epoch, ``inf`` if unknown.
        accumulate: loader batches per optimizer step; a short last window steps too.
    """
    per_epoch = math.ceil(batches_per_epoch / accumulate) if math.isfinite(batches_per_epoch) else math.inf
    # A window cut by the checkpoint steps with the batches that are left of it.
    done_here = per_epoch if batches_done >= batches_per_epoch else batches_done // accumulate if batches_done else 0
    by_epochs = math.inf if max_epochs == -1 else max(0, max_epochs - epochs_done)
    if by_epochs == 0:
        left: float = 0
    elif math.isinf(by_epochs) or math.isinf(per_epoch):
        left = math.inf
    else:
        left = max(0.0, by_epochs * per_epoch - done_here)
    if max_steps != -1:
        left = min(left, max(0, max_steps - global_step))
    if math.isinf(left) or math.isinf(per_epoch):
        passes = by_epochs if math.isinf(per_epoch) else math.inf
    else:
        passes = math.ceil((left + done_here) / per_epoch) if left else 0
    return Horizon(steps=left, passes=passes, global_end=global_step + left)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one fit will release, decided before its first step.

    Attributes:
        release: each of this fit's, as it was planned.
        charges: charges affordable within the budget and the Trainer's limits; ``inf`` without either.
        exhausted: the budget was already spent when this fit began.
    """

    release: Release
    charges: float
    exhausted: bool

    @property
    def noise_multiplier(self) -> float:
        """m = scale / C of every release."""
        return self.release.noise_multiplier


@dataclass(frozen=True)
class KeptPlan:
    """A plan as a checkpoint keeps it: equal on resume means that the multiplier is kept.

    Attributes:
        eps: the budget.
        release: see :attr:`Plan.release`.
        end: see :attr:`Horizon.global_end`.
    """

    eps: float
    release: Release
    end: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"eps": self.eps, **self.release.to_dict(), "end": self.end}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> KeptPlan | None:
        """What :meth:`to_dict` gave; ``None`` of an empty entry, that of a ledger without a plan.

        Raises:
            KeyError, TypeError, ValueError: an entry is missing or is nothing that a plan holds.
        """
        if not found:
            return None
        _validate.positive("plan eps", found["eps"])
        _validate.non_negative("plan end", found["end"])
        release = {name: value for name, value in found.items() if name not in ("eps", "end")}
        return cls(found["eps"], Release.from_dict(release), found["end"])


def make_plan(
    settings: Settings,
    accountant: MajorizedAccountant,
    *,
    release: Release,
    charges: float,
    end: float,
    previous: KeptPlan | None,
) -> Plan:
    """Calibrates the noise, or finds how far a given one reaches.

    Args:
        accountant: the ledger so far.
        release: of each step; with the given noise multiplier, or without noise to speak of (``inf``) where it is to
            be calibrated.
        charges: charges the Trainer's limits would make, ``inf`` for a run without a last step.
        end: :attr:`Horizon.global_end`.
        previous: the plan the ledger was loaded with, if any: its multiplier is kept when nothing changed.

    Raises:
        ValueError: a run without a last step and no noise multiplier; no finite noise serves.
    """
    if settings.noise_multiplier is not None:
        return _as_far_as_it_reaches(settings, accountant, release, charges)
    if math.isinf(charges):
        raise ValueError(
            "noise_multiplier=None calibrates the noise for the planned number of steps, but this run has no "
            "last step (max_epochs=-1 or an epoch of unknown length, and no max_steps); set max_steps or "
            "max_epochs, or give a noise_multiplier (the run then ends at the budget)"
        )
    kept = release if previous is None else release.with_multiplier(previous.release.noise_multiplier)
    if previous == KeptPlan(settings.eps, kept, end):
        if charges:
            return _as_far_as_it_reaches(settings, accountant, kept, charges)
    elif accountant.steps and accountant.epsilon(delta=settings.delta) >= settings.eps * _AS_GOOD_AS_SPENT:
        return Plan(release=kept, charges=0, exhausted=True)
    elif charges:
        multiplier = _calibrate(settings, accountant, release, int(charges))
        return Plan(release=release.with_multiplier(multiplier), charges=charges, exhausted=False)
    return Plan(release=kept, charges=0, exhausted=False)


def _as_far_as_it_reaches(
    settings: Settings, accountant: MajorizedAccountant, release: Release, charges: float
) -> Plan:
    affordable = affordable_charges(settings, accountant, release)
    return Plan(release=release, charges=min(charges, affordable), exhausted=affordable == 0)


def _calibrate(settings: Settings, accountant: MajorizedAccountant, release: Release, charges: int) -> float:
    try:
        if settings.run_limit is not None:
            return settings.run_limit.least_multiplier(accountant, release, charges)
        spent = accountant.composition
        return least_multiplier(spent, release, charges, eps=settings.eps, delta=settings.delta)
    except NoFiniteNoiseError as error:
        count = count_epsilon(settings, accountant, release, charges)
        if count is None or count <= settings.eps:
            raise
        ((_, multiplier),) = release.extra_blocks
        raise ValueError(
            f"clipping='adaptive': the noisy count alone (count_noise_scale={multiplier * COUNT_SENSITIVITY:g} "
            f"examples) brings {charges} releases to epsilon = {count:.4g}, more than eps={settings.eps:g}; give a "
            "larger count_noise_scale, or a larger batch (count_noise_scale=None is a twentieth of the expected batch "
            "size)"
        ) from error


def count_epsilon(settings: Settings, accountant: MajorizedAccountant, release: Release, charges: int) -> float | None:
    """Epsilon after ``charges`` further releases of the count alone; ``None`` where no count is released."""
    if not release.extra_blocks:
        return None
    spent = accountant.copy()
    spent.charge(release.with_multiplier(math.inf), charges)
    return spent.epsilon(delta=settings.delta)


def affordable_charges(settings: Settings, accountant: MajorizedAccountant, release: Release) -> float:
    """Further charges of this release within the budget, ``inf`` without one."""
    if math.isinf(settings.eps):
        return math.inf
    if settings.run_limit is not None:
        return settings.run_limit.most_steps(accountant, release)
    return most_steps(accountant.composition, release, eps=settings.eps, delta=settings.delta)


def changes(previous: KeptPlan, now: KeptPlan, *, resumed: bool) -> str:
    """What differs between two plans of one ledger, in words; empty where the first is carried on.

    Args:
        resumed: the Trainer goes on counting where the first one stood, so an equal end is the same end.
    """
    before, after = previous.to_dict(), now.to_dict()
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    words = [f"{_WORDS.get(name, name)} {before.get(name)} became {after.get(name)}" for name in names]
    if not resumed and "end" not in names:
        words.append("training began once more")
    return ", ".join(words)


_WORDS = {"end": "the last step"}
