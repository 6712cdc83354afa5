"""From a budget to the noise."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from lightning_lap2.accounting import (
    ClipAndScale,
    MajorizedAccountant,
    calibrate_noise_multiplier,
    optimize_clip_and_scale,
)

PLAN: dict[str, Any] = {"delta": 1e-5, "sample_rate": 0.0043, "steps": 5860, "dimension": 26_010}

ignore_unsound = pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")


def spent(m: float, bound: str = "tight", mechanism: str = "laplace", before: Any = None, **plan: Any) -> float:
    accountant = MajorizedAccountant(bound, mechanism) if before is None else before.copy()
    delta = plan.pop("delta")
    accountant.step(noise_multiplier=m, **plan)
    return accountant.epsilon(delta=delta)


@ignore_unsound
@pytest.mark.parametrize("eps", [0.13, 3.42])
@pytest.mark.parametrize(
    ("mechanism", "bound"),
    [
        ("laplace", "tight"),
        ("laplace", "joint"),
        ("laplace", "published"),
        ("gaussian", "tight"),
        ("laplace_l1", "tight"),
    ],
)
def test_safe_and_close_to_the_smallest(mechanism: str, bound: str, eps: float) -> None:
    m = calibrate_noise_multiplier(eps=eps, bound=bound, mechanism=mechanism, **PLAN)
    assert spent(m, bound, mechanism, **PLAN) <= eps
    assert spent(m * (1.0 - 1e-4), bound, mechanism, **PLAN) > eps


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 100},  # the second route wins
        {"steps": 1, "sample_rate": 1.0},
        {"steps": 20, "sample_rate": 1.0, "dimension": 10**9},
        {"delta": 0.0, "steps": 10},
        {"delta": 1e-12},
        {"dimension": 1},
        {"dimension": math.inf, "sample_rate": 0.2, "steps": 100},
    ],
)
def test_other_plans(change: dict[str, Any]) -> None:
    plan = {**PLAN, **change}
    m = calibrate_noise_multiplier(eps=0.8, **plan)
    assert spent(m, **plan) <= 0.8
    assert spent(m * (1.0 - 1e-4), **plan) > 0.8


@pytest.mark.parametrize("eps", [1e-3, 0.1, 40.0])
@pytest.mark.parametrize("n", [1, 26_010, 10**9])
def test_quick_by_orders_whatever_the_dimension(n: int, eps: float) -> None:
    plan = {**PLAN, "dimension": n}
    start = time.process_time()
    m = calibrate_noise_multiplier(eps=eps, bound="joint", **plan)
    assert time.process_time() - start < 1.5  # 0.05 to 0.3 s on a quiet machine
    assert spent(m, "joint", **plan) <= eps


def test_no_noise_needed() -> None:
    for change in [{"steps": 0}, {"sample_rate": 0.0}, {"dimension": 0}, {"delta": 1.0}]:
        assert calibrate_noise_multiplier(eps=0.0, **{**PLAN, **change}) == 0.0
    assert calibrate_noise_multiplier(eps=math.inf, **PLAN) == 0.0
    assert calibrate_noise_multiplier(eps=1.0, **{**PLAN, "delta": 0.3, "sample_rate": 1e-5}) == 0.0


def test_epsilon_zero_is_reached_through_delta() -> None:
    plan = {**PLAN, "steps": 10}
    m = calibrate_noise_multiplier(eps=0.0, **plan)
    assert 1.0 < m < math.inf
    assert spent(m, **plan) == 0.0


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"eps": 0.0, "delta": 0.0}, "eps must be one that a finite noise multiplier can meet"),
        ({"eps": 1.0, "delta": 0.0, "mechanism": "gaussian"}, "finite noise"),
        ({"eps": 1.0, "bound": "joint", "dimension": math.inf}, "finite noise"),
        ({"eps": -1.0}, r"eps must not be negative"),
        ({"eps": 1.0, "steps": -1}, "steps must be"),
        ({"eps": 1.0, "bound": "joint", "mechanism": "gaussian"}, "bound must be 'tight'"),
        ({"eps": 1.0, "accountant": MajorizedAccountant("joint")}, "accountant must have bound='tight'"),
    ],
)
def test_errors(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate_noise_multiplier(**{**PLAN, **plan})


def test_resume_counts_what_was_spent() -> None:
    before = MajorizedAccountant()
    before.step(noise_multiplier=1.5, sample_rate=0.0043, dimension=26_010, steps=2000)
    rest = {**PLAN, "steps": 3860}
    m = calibrate_noise_multiplier(eps=1.5, accountant=before, **rest)
    assert before.steps == 2000
    assert spent(m, before=before, **rest) <= 1.5
    assert spent(m * (1.0 - 1e-4), before=before, **rest) > 1.5
    with pytest.raises(ValueError, match="released before costs more"):
        calibrate_noise_multiplier(eps=0.1, accountant=before, **rest)


def test_calibration_and_affordable_steps_meet() -> None:
    m = calibrate_noise_multiplier(eps=2.0, **PLAN)
    further = MajorizedAccountant().steps_within(
        eps=2.0, delta=1e-5, noise_multiplier=m, sample_rate=0.0043, dimension=26_010
    )
    assert 5860 <= further <= 5870


def test_algorithm_one_sees_only_the_ratio() -> None:
    rows = optimize_clip_and_scale(eps=1.0, max_grad_norms=[0.1, 1.0, 7.0], **PLAN)
    assert all(isinstance(row, ClipAndScale) for row in rows)
    m = calibrate_noise_multiplier(eps=1.0, **PLAN)
    for row, c in zip(rows, [0.1, 1.0, 7.0], strict=True):
        assert (row.max_grad_norm, row.noise_multiplier, row.snr) == (c, m, 1.0 / m)
        assert row.scale == pytest.approx(c * m, rel=1e-15)
        assert row.total_snr == pytest.approx(0.0043 * math.sqrt(5860) / m, rel=1e-12)
        assert row.epsilon == spent(m, **PLAN) <= 1.0
        assert row.to_dict()["scale"] == row.scale
    for wrong in ([], [0.0], [math.inf], [-1.0]):
        with pytest.raises(ValueError, match="max_grad_norms must"):
            optimize_clip_and_scale(eps=1.0, max_grad_norms=wrong, **PLAN)
    with pytest.raises(TypeError, match="max_grad_norms must"):
        optimize_clip_and_scale(eps=1.0, max_grad_norms=["1"], **PLAN)  # type: ignore[list-item]
