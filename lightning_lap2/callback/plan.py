"""From the Trainer's limits and the budget to a noise multiplier and a last step. No Lightning, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant, NoFiniteNoiseError, calibrate_noise_multiplier
from lightning_lap2.callback.settings import Settings
from lightning_lap2.mechanism import COUNT_SENSITIVITY

Terms = Mapping[str, Any]
"""What a charge says besides the noise multiplier: ``sample_rate``, ``dimension``, and ``layers`` or ``extra_blocks``
where the release has such; see :meth:`Mechanism.charge`."""

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
        noise_multiplier: scale / C of every release of this fit.
        charges: charges affordable within the budget and the Trainer's limits; ``inf`` without either.
        exhausted: the budget was already spent when this fit began.
        end: see :attr:`Horizon.global_end`.
    """

    noise_multiplier: float
    charges: float
    exhausted: bool
    end: float


def make_plan(
    settings: Settings,
    accountant: MajorizedAccountant,
    *,
    terms: Terms,
    charges: float,
    end: float,
    previous: dict[str, Any],
) -> Plan:
    """Calibrates the noise, or finds how far a given one reaches.

    Args:
        accountant: the ledger so far.
        terms: of each charge.
        charges: charges the Trainer's limits would make, ``inf`` for a run without a last step.
        end: :attr:`Horizon.global_end`.
        previous: the plan the ledger was loaded with, if any: its multiplier is kept when nothing changed.

    Raises:
        ValueError: a run without a last step and no noise multiplier; no finite noise serves.
    """
    if settings.noise_multiplier is not None:
        multiplier = settings.noise_multiplier
    else:
        if math.isinf(charges):
            raise ValueError(
                "noise_multiplier=None calibrates the noise for the planned number of steps, but this run has no "
                "last step (max_epochs=-1 or an epoch of unknown length, and no max_steps); set max_steps or "
                "max_epochs, or give a noise_multiplier (the run then ends at the budget)"
            )
        same = previous == summary(settings, terms, end, previous.get("noise_multiplier"))
        if (
            not same
            and accountant.steps
            and accountant.epsilon(delta=settings.delta) >= settings.eps * _AS_GOOD_AS_SPENT
        ):
            return Plan(noise_multiplier=previous.get("noise_multiplier", math.inf), charges=0, exhausted=True, end=end)
        if not same and charges:
            multiplier = _calibrate(settings, accountant, terms, int(charges))
            return Plan(noise_multiplier=multiplier, charges=charges, exhausted=False, end=end)
        multiplier = previous.get("noise_multiplier", math.inf)
        if not charges:
            return Plan(noise_multiplier=multiplier, charges=0, exhausted=False, end=end)
    affordable = affordable_charges(settings, accountant, {**terms, "noise_multiplier": multiplier})
    return Plan(
        noise_multiplier=multiplier,
        charges=min(charges, affordable),
        exhausted=affordable == 0,
        end=end,
    )


def _calibrate(settings: Settings, accountant: MajorizedAccountant, terms: Terms, charges: int) -> float:
    told: dict[str, Any] = {
        "steps": charges,
        "bound": settings.bound,
        "mechanism": settings.mechanism,
        "accountant": accountant if accountant.steps else None,
        **terms,
    }
    try:
        if settings.run_limit is not None:
            return settings.run_limit.noise_multiplier(**told)
        return calibrate_noise_multiplier(eps=settings.eps, delta=settings.delta, **told)
    except NoFiniteNoiseError as error:
        count = count_epsilon(settings, accountant, terms, charges)
        if count is None or count <= settings.eps:
            raise
        scale = terms["extra_blocks"][0][1] * COUNT_SENSITIVITY
        raise ValueError(
            f"clipping='adaptive': the noisy count alone (count_noise_scale={scale:g} examples) brings {charges} "
            f"releases to epsilon = {count:.4g}, more than eps={settings.eps:g}; give a larger count_noise_scale, or a "
            "larger batch (count_noise_scale=None is a twentieth of the expected batch size)"
        ) from error


def count_epsilon(settings: Settings, accountant: MajorizedAccountant, terms: Terms, charges: int) -> float | None:
    """Epsilon after ``charges`` further releases of the count alone; ``None`` where no count is released."""
    if not terms.get("extra_blocks"):
        return None
    spent = accountant.copy()
    spent.step(noise_multiplier=math.inf, steps=charges, **terms)
    return spent.epsilon(delta=settings.delta)


def affordable_charges(settings: Settings, accountant: MajorizedAccountant, charge: Terms) -> float:
    """Further charges within the budget, ``inf`` without one."""
    if math.isinf(settings.eps):
        return math.inf
    if settings.run_limit is not None:
        return settings.run_limit.steps_within(accountant, **charge)
    return accountant.steps_within(eps=settings.eps, delta=settings.delta, **charge)


def terms_of(charge: Terms) -> dict[str, Any]:
    """A charge without its noise multiplier."""
    return {name: value for name, value in charge.items() if name != "noise_multiplier"}


def summary(settings: Settings, terms: Terms, end: float, noise_multiplier: float | None) -> dict[str, Any]:
    """The plan as a checkpoint keeps it: equal on resume means that the multiplier is kept."""
    return {"eps": settings.eps, **terms, "end": end, "noise_multiplier": noise_multiplier}


def changes(previous: dict[str, Any], now: dict[str, Any], *, resumed: bool) -> str:
    """What differs between two plans of one ledger, in words; empty where the first is carried on.

    Args:
        resumed: the Trainer goes on counting where the first one stood, so an equal end is the same end.
    """
    if not previous:
        return ""
    names = [name for name in {**previous, **now} if previous.get(name) != now.get(name)]
    words = [f"{_WORDS.get(name, name)} {previous.get(name)} became {now.get(name)}" for name in names]
    if not resumed and "end" not in names:
        words.append("training began once more")
    return ", ".join(words)


_WORDS = {"end": "the last step"}


def check_summary(found: dict[str, Any]) -> dict[str, Any]:
    """A loaded :func:`summary`, or the empty one of a ledger without a plan.

    Raises:
        KeyError, TypeError, ValueError: an entry is missing or is nothing that a plan holds.
    """
    if found:
        _validate.positive("plan eps", found["eps"])
        _validate.probability("plan sample_rate", found["sample_rate"])
        _validate.integer("plan dimension", found["dimension"], minimum=0)
        _validate.non_negative("plan end", found["end"])
        _validate.non_negative("plan noise_multiplier", found["noise_multiplier"])
    return found
