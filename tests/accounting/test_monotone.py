"""Epsilon is monotone and quick, for every mechanism and mixed ledgers; each case that was once wrong is kept."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_lap2.accounting import MECHANISMS, MajorizedAccountant, calibrate_noise_multiplier

ROUNDING = 1e-6
"""Relative; in thousands of random ledgers the largest fall was 1.6e-7, with 10^5 steps and rare draws."""


def charged(mechanism: str, *steps: dict[str, Any]) -> MajorizedAccountant:
    accountant = MajorizedAccountant(mechanism=mechanism)
    for step in steps:
        accountant.step(**step)
    return accountant


def a_step(m: float, q: float, n: float, steps: int = 1) -> dict[str, Any]:
    return {"noise_multiplier": m, "sample_rate": q, "dimension": n, "steps": steps}


def random_step(rng: np.random.Generator) -> dict[str, Any]:
    rate = 1.0 if rng.random() < 0.15 else 10.0 ** rng.uniform(-6, 0)
    return a_step(10.0 ** rng.uniform(-1, 2.5), rate, int(10.0 ** rng.uniform(0, 9)), int(10.0 ** rng.uniform(0, 6)))


def larger_ledgers(steps: list[dict[str, Any]], rng: np.random.Generator) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Ledgers that cost at least as much: one number of one step moved, or a step more."""
    at, factor = int(rng.integers(len(steps))), 1.0 + 10.0 ** rng.uniform(-4, 0.5)
    old = steps[at]
    moves = {
        "less noise": {"noise_multiplier": old["noise_multiplier"] / factor},
        "larger rate": {"sample_rate": min(1.0, old["sample_rate"] * factor)},
        "more coordinates": {"dimension": int(old["dimension"] * factor) + 1},
        "one step more": {"steps": old["steps"] + 1},
        "more steps": {"steps": int(old["steps"] * factor) + 1},
    }
    for name, move in moves.items():
        yield name, [*steps[:at], {**old, **move}, *steps[at + 1 :]]
    yield "another kind of step", [*steps, random_step(rng)]
    yield "a step that costs next to nothing", [*steps, a_step(1e4, 1e-7, 5)]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("seed", range(5))
def test_epsilon_never_falls_when_the_ledger_grows(mechanism: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [random_step(rng) for _ in range(int(rng.choice([1, 1, 2, 3, 5])))]
    delta = 10.0 ** rng.uniform(-12, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = charged(mechanism, *steps).epsilon(delta=delta)
        for name, larger in larger_ledgers(steps, rng):
            after = charged(mechanism, *larger).epsilon(delta=delta)
            assert after >= before * (1.0 - ROUNDING), (name, steps, larger, delta)
        assert charged(mechanism, *steps).epsilon(delta=2.5 * delta) <= before * (1.0 + ROUNDING)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_forecast_is_never_below_what_is_reported_and_delta_falls(mechanism: str, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    accountant = charged(mechanism, *(random_step(rng) for _ in range(int(rng.integers(1, 4)))))
    further, delta = {**random_step(rng), "steps": int(10.0 ** rng.uniform(0, 4))}, 10.0 ** rng.uniform(-9, -2)
    forecast = accountant.forecast(delta=delta, **further)
    for k in sorted({0, 1, further["steps"] // 3, further["steps"] - 1, further["steps"]}):
        later = accountant.copy()
        later.step(**{**further, "steps": k})
        assert forecast.epsilon(k) >= later.epsilon(delta=delta)
    assert forecast.epsilon(further["steps"]) == later.epsilon(delta=delta)
    spent = [accountant.delta(eps=eps) for eps in (0.0, 0.1, 1.0, 4.0, 15.0)]
    assert all(b <= a * (1.0 + ROUNDING) for a, b in itertools.pairwise(spent))


def test_a_new_kind_of_step_made_the_grid_finer() -> None:
    first = a_step(0.4573291032504406, 0.00027959285689452604, 10**6, 13)
    second = a_step(3.0189406, 0.00060358435, 10**6, 5)
    delta = 0.0002522201616544764
    accountant = charged("laplace", first)
    spent = accountant.epsilon(delta=delta)
    forecast = accountant.forecast(delta=delta, **second)
    assert forecast.epsilon(0) >= spent
    assert spent <= charged("laplace", first, second).epsilon(delta=delta) == forecast.epsilon(5)


def test_a_usable_route_with_an_infinite_value_does_not_hide_the_others() -> None:
    multipliers = [0.2, 0.22, 0.23, 0.24, 0.27, 0.3, 0.33, 0.36, 0.5]
    spent = [charged("laplace", a_step(m, 0.02, 10**5, 1000)).epsilon(delta=1e-5) for m in multipliers]
    assert spent == sorted(spent, reverse=True)
    assert spent[3] < 419.0
    assert spent[5] < 150.0
    for eps in (60.0, 400.0):  # calibration and affordable steps follow
        m = calibrate_noise_multiplier(eps=eps, delta=1e-5, sample_rate=0.02, steps=1000, dimension=10**5)
        assert charged("laplace", a_step(m, 0.02, 10**5, 1000)).epsilon(delta=1e-5) <= eps
        plan = {"noise_multiplier": m, "sample_rate": 0.02, "dimension": 10**5}
        assert 1000 <= MajorizedAccountant().steps_within(eps=eps, delta=1e-5, **plan) <= 1010


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("m", "n", "steps", "delta"), [(0.6, 50, 3000, 1e-6), (3.0, 10**6, 10**6, 1e-5)])
def test_a_rate_that_reaches_one(mechanism: str, m: float, n: int, steps: int, delta: float) -> None:
    """Unsampled steps are known at real orders and merge into one: no reason for others to cost more."""
    rates = [0.9, 0.99, 0.9989, 0.9991, 1.0 - 1e-6, 1.0 - 1e-8, 1.0 - 1e-10, 1.0]
    spent = [charged(mechanism, a_step(m, q, n, steps)).epsilon(delta=delta) for q in rates]
    assert all(a <= b * (1.0 + ROUNDING) for a, b in itertools.pairwise(spent))


def test_bounded_losses_are_not_tilted_beyond_the_grid() -> None:
    """Two Laplace steps lose their double shift with probability 1/4: found too small by 8e-5 while this was built."""
    m = 0.6440781901043113
    for extra in ([], [a_step(1e4, 1e-7, 5)]):
        spent = charged("laplace_l1", a_step(m, 1.0, 34_297, 2), *extra).epsilon(delta=5.44e-11)
        assert spent == pytest.approx(2.0 / m, rel=1e-8)
        assert spent >= 2.0 / m - 1e-9


def seconds(query: Any) -> float:
    start = time.process_time()
    query()
    return time.process_time() - start


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_queries_are_quick(mechanism: str) -> None:
    """Below a second each on an idle core; three are allowed here, for busy machines."""
    mixed = charged(mechanism, *(a_step(2 + 0.1 * i, 2.5e-4 * (1 + i), 10**9, 300) for i in range(31)))
    many = charged(mechanism, a_step(48.803, 0.12545, 1000, 395_568))
    plan = {"noise_multiplier": 3.0, "sample_rate": 0.004, "dimension": 10**9}
    for accountant in (mixed, many):
        assert seconds(lambda a=accountant: a.epsilon(delta=0.0027187)) < 3.0
        assert seconds(lambda a=accountant: a.delta(eps=1.0)) < 3.0
        assert seconds(lambda a=accountant: a.forecast(delta=1e-5, steps=400, **plan)) < 3.0
        assert seconds(lambda a=accountant: a.steps_within(eps=12.0, delta=1e-5, **plan)) < 3.0


def test_no_overflow_where_next_to_nothing_happens() -> None:
    accountant = charged("laplace", a_step(1.0, 1e-12, math.inf, 10**6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.0 < accountant.delta(eps=1.0) < 1e-15
