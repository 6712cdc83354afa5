"""Steps and passes left, calibration and resumed plans: numbers only."""

from __future__ import annotations

import math

import pytest

from lightning_lap2.accounting import MajorizedAccountant, Release
from lightning_lap2.callback.plan import Horizon, KeptPlan, horizon, make_plan
from lightning_lap2.callback.settings import Settings

DEFAULTS = {
    "delta": 1e-5,
    "max_grad_norm": 1.0,
    "noise_multiplier": None,
    "mechanism": "laplace",
    "bound": "tight",
    "sampling": "poisson",
    "clipping": "flat",
    "engine": "vmap",
    "chunk_size": None,
    "augmentations": 1,
    "noise_source": "auto",
    "noise_seed": None,
    "assume_nothing_spent": False,
    "allow_feedback": False,
    "target_quantile": None,
    "clip_learning_rate": None,
    "count_noise_scale": None,
    "on_record_error": "raise",
}


def settings(**changes: object) -> Settings:
    return Settings(**{"eps": 1.0, **DEFAULTS, **changes})  # type: ignore[arg-type]


def ahead(**changes: object) -> Horizon:
    at_start = {
        "global_step": 0,
        "max_steps": -1,
        "max_epochs": 3,
        "epochs_done": 0,
        "batches_done": 0,
        "batches_per_epoch": 16,
        "accumulate": 5,
    }
    return horizon(**{**at_start, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "steps", "passes", "end"),
    [
        ({}, 12, 3, 12),  # 5 + 5 + 5 + 1 batches: four windows an epoch
        ({"max_steps": 6}, 6, 2, 6),
        ({"max_steps": 6, "global_step": 4, "epochs_done": 1}, 2, 1, 6),
        ({"max_steps": 6, "global_step": 9}, 0, 0, 9),
        ({"global_step": 6, "epochs_done": 1, "batches_done": 10}, 6, 2, 12),
        # saved in the middle of a window: its last three batches make a step of their own
        ({"global_step": 1, "batches_done": 7}, 11, 3, 12),
        # saved by validation at the end of an epoch that is not yet counted as done
        ({"global_step": 4, "batches_done": 16}, 8, 3, 12),
        ({"max_epochs": -1}, math.inf, math.inf, math.inf),
        ({"max_epochs": -1, "max_steps": 9}, 9, 3, 9),
        ({"max_epochs": 0}, 0, 0, 0),
        ({"batches_per_epoch": math.inf, "max_steps": 9}, 9, 3, 9),
        ({"batches_per_epoch": math.inf}, math.inf, 3, math.inf),
    ],
)
def test_horizon(changes: dict, steps: float, passes: float, end: float) -> None:
    assert ahead(**changes) == Horizon(steps=steps, passes=passes, global_end=end)


RELEASE = Release(math.inf, 0.05, 100)
FACTS = {"release": RELEASE, "charges": 40, "end": 40}
GIVEN = {**FACTS, "release": RELEASE.with_multiplier(1.0)}


def test_calibrated_plan_spends_the_budget_and_no_more() -> None:
    plan = make_plan(settings(), MajorizedAccountant(), previous=None, **FACTS)
    spent = MajorizedAccountant()
    spent.step(noise_multiplier=plan.noise_multiplier, sample_rate=0.05, dimension=100, steps=40)
    assert 0.999 < spent.epsilon(delta=1e-5) <= 1.0
    assert plan.charges == 40 and not plan.exhausted


def test_given_noise_reaches_as_far_as_the_budget() -> None:
    given = settings(noise_multiplier=1.0)
    plan = make_plan(given, MajorizedAccountant(), previous=None, **{**GIVEN, "charges": math.inf})
    spent = MajorizedAccountant()
    spent.step(noise_multiplier=1.0, sample_rate=0.05, dimension=100, steps=int(plan.charges))
    assert spent.epsilon(delta=1e-5) <= 1.0
    spent.step(noise_multiplier=1.0, sample_rate=0.05, dimension=100)
    assert spent.epsilon(delta=1e-5) > 1.0


def test_run_without_a_last_step_cannot_be_calibrated() -> None:
    with pytest.raises(ValueError, match="noise_multiplier=None .* no last step .*max_steps"):
        make_plan(settings(), MajorizedAccountant(), previous=None, **{**FACTS, "charges": math.inf})


def test_resumed_plan_keeps_its_noise_unless_something_changed() -> None:
    first = make_plan(settings(), MajorizedAccountant(), previous=None, **FACTS)
    kept = KeptPlan(1.0, first.release, 40)
    spent = MajorizedAccountant()
    spent.step(noise_multiplier=first.noise_multiplier, sample_rate=0.05, dimension=100, steps=15)
    again = make_plan(settings(), spent, previous=kept, **{**FACTS, "charges": 25})
    assert again.noise_multiplier == first.noise_multiplier
    assert again.charges == 25
    wider = make_plan(settings(eps=2.0), spent, previous=kept, **{**FACTS, "charges": 25})
    assert wider.noise_multiplier < first.noise_multiplier
    longer = make_plan(settings(), spent, previous=kept, **{**FACTS, "charges": 60, "end": 75})
    assert longer.noise_multiplier > first.noise_multiplier


def test_spent_budget_is_exhausted() -> None:
    spent = MajorizedAccountant()
    spent.step(noise_multiplier=1.0, sample_rate=0.5, dimension=100, steps=1000)
    for given, facts in ((None, FACTS), (1.0, GIVEN)):
        plan = make_plan(settings(noise_multiplier=given), spent, previous=None, **facts)
        assert plan.exhausted and plan.charges == 0


def test_no_budget_no_limit() -> None:
    free = settings(eps=math.inf, noise_multiplier=1.0)
    assert make_plan(free, MajorizedAccountant(), previous=None, **GIVEN).charges == 40
