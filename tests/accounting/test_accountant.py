"""The ledger: conversion, edges, state, affordable steps, forecast."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_lap2.accounting import MajorizedAccountant, Release, UnsoundBoundWarning, log_moments
from lightning_lap2.accounting.routes.moments import INFINITE
from lightning_lap2.accounting.routes.orders import Orders
from lightning_lap2.accounting.routes.pure import pure_delta, pure_epsilon, pure_step

PLAN: dict[str, Any] = {"noise_multiplier": 1.5, "sample_rate": 0.0043, "dimension": 26_010}
PAIRS = [
    ("laplace", "tight"),
    ("laplace", "joint"),
    ("laplace", "published"),
    ("gaussian", "tight"),
    ("laplace_l1", "tight"),
]

ignore_unsound = pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")


def charged(bound: str = "tight", mechanism: str = "laplace", **step: Any) -> MajorizedAccountant:
    accountant = MajorizedAccountant(bound=bound, mechanism=mechanism)
    accountant.step(**{**PLAN, **step})
    return accountant


# ---------------------------------------------------------------- conversion


def test_epsilon_by_orders_is_the_formula() -> None:
    orders = np.arange(2, 400)
    moments = log_moments(**PLAN, orders=orders.tolist()) * 5860
    for delta in [1e-12, 1e-5, 1e-2]:
        below = orders - 1.0
        formula = moments / below + np.log(below / orders) - (math.log(delta) + np.log(orders)) / below
        accountant = charged(steps=5860)
        assert accountant.epsilon(delta=delta, orders_only=True) == pytest.approx(formula.min(), rel=1e-10)
        assert accountant.epsilon(delta=delta) <= formula.min()


@ignore_unsound
@pytest.mark.parametrize(("mechanism", "bound"), PAIRS)
def test_delta_and_epsilon_are_inverse(mechanism: str, bound: str) -> None:
    accountant = charged(bound, mechanism, steps=2000)
    for delta in [1e-8, 1e-5, 1e-2]:
        eps = accountant.epsilon(delta=delta)
        assert accountant.delta(eps=eps) == pytest.approx(delta, rel=5e-3)
        assert accountant.delta(eps=eps * 1.1) < delta < accountant.delta(eps=eps * 0.9)


def test_pure_bound_in_log_space() -> None:
    assert pure_step(0.01, 1e9) == pytest.approx(1e9 + math.log(0.01), rel=1e-15)
    assert pure_step(0.3, 2.0) == pytest.approx(math.log1p(0.3 * math.expm1(2.0)), rel=1e-14)
    assert pure_step(1e-9, 1e-9) == pytest.approx(1e-18, rel=1e-8)
    for pure, delta in itertools.product([1e-6, 0.5, 3.0, 900.0], [1e-12, 1e-5, 0.4]):
        eps = pure_epsilon(pure, delta)
        assert 0.0 <= eps <= pure
        assert pure_delta(pure, eps) <= delta * (1.0 + 1e-9) + 1e-16
    accountant = charged(noise_multiplier=5.0, sample_rate=0.01, dimension=100, steps=3)
    assert accountant.epsilon(delta=0.0) == pytest.approx(3 * math.log1p(0.01 * math.expm1(2.0)), rel=1e-12)
    assert accountant.delta(eps=accountant.epsilon(delta=0.0)) == 0.0
    assert charged(mechanism="gaussian").epsilon(delta=0.0) == math.inf


def test_real_orders_without_sampling() -> None:
    """At q = 1 the best order is rarely an integer: the default is strictly better than the orders alone."""
    accountant = charged("joint", noise_multiplier=1.0, sample_rate=1.0, dimension=50, steps=3)
    assert accountant.best_order(1e-5) != round(accountant.best_order(1e-5))
    assert accountant.epsilon(delta=1e-5) < accountant.epsilon(delta=1e-5, orders_only=True) * (1.0 - 1e-6)


def test_mixed_steps_compose_by_addition_of_moments() -> None:
    accountant = charged("joint", steps=100)
    accountant.step(noise_multiplier=3.0, sample_rate=1.0, dimension=10)
    accountant.step(noise_multiplier=2.0, sample_rate=0.1, dimension=10, steps=5)
    orders = list(range(2, 65))
    total = 100 * log_moments(**PLAN, orders=orders, bound="joint")
    total += log_moments(3.0, 1.0, 10, orders, bound="joint") + 5 * log_moments(2.0, 0.1, 10, orders, bound="joint")
    k = np.asarray(orders, dtype=float)
    formula = (total - math.log(1e-5) - np.log(k)) / (k - 1) + np.log1p(-1 / k)
    assert accountant.epsilon(delta=1e-5, orders_only=True) == pytest.approx(formula.min(), rel=1e-10)
    assert accountant.epsilon(delta=1e-5) <= formula.min()


def test_heterogeneous_steps_through_the_second_route() -> None:
    accountant = charged(noise_multiplier=2.1, steps=50)
    accountant.step(noise_multiplier=2.0, sample_rate=0.0043, dimension=26_010, steps=50)
    alone = charged(noise_multiplier=2.1, steps=100).epsilon(delta=1e-5)
    worse = charged(noise_multiplier=2.0, steps=100).epsilon(delta=1e-5)
    assert alone < accountant.epsilon(delta=1e-5) < worse < accountant.epsilon(delta=1e-5, orders_only=True)


def test_bounds_are_ordered() -> None:
    for m, q, n, steps in itertools.product([0.5, 4.0], [0.001, 0.3], [1, 1000, 10**9], [1, 300]):
        step = {"noise_multiplier": m, "sample_rate": q, "dimension": n, "steps": steps}
        tight, joint = charged("tight", **step), charged("joint", **step)
        assert tight.epsilon(delta=1e-5) <= joint.epsilon(delta=1e-5) * (1.0 + 1e-12)
        assert tight.epsilon(delta=1e-5) <= tight.epsilon(delta=1e-5, orders_only=True)
        assert tight.delta(eps=0.5) <= joint.delta(eps=0.5) * (1.0 + 1e-9)


# ---------------------------------------------------------------- edges


@ignore_unsound
@pytest.mark.parametrize(("mechanism", "bound"), PAIRS)
def test_exact_edges(mechanism: str, bound: str) -> None:
    empty = MajorizedAccountant(bound, mechanism)
    assert (empty.steps, empty.epsilon(delta=1e-5), empty.delta(eps=0.0)) == (0, 0.0, 0.0)
    for free in [{"sample_rate": 0.0}, {"dimension": 0}, {"noise_multiplier": math.inf}, {"steps": 0}]:
        accountant = charged(bound, mechanism, **free)
        assert accountant.steps == free.get("steps", 1)
        assert accountant.epsilon(delta=0.0) == accountant.epsilon(delta=1e-300) == accountant.delta(eps=0.0) == 0.0
    bare = charged(bound, mechanism, noise_multiplier=0.0, sample_rate=0.25, steps=2)
    mass = 1.0 - 0.75**2
    assert bare.delta(eps=math.inf) == bare.delta(eps=0.0) == pytest.approx(mass, rel=1e-15)
    assert bare.epsilon(delta=mass * (1.0 - 1e-9)) == math.inf
    assert bare.epsilon(delta=mass * (1.0 + 1e-9)) == 0.0
    assert charged(bound, mechanism, noise_multiplier=0.0, sample_rate=1.0).delta(eps=9.0) == 1.0
    full = charged(bound, mechanism, noise_multiplier=2.0, sample_rate=1.0)
    assert 0.0 < full.epsilon(delta=1e-5) < math.inf
    assert full.epsilon(delta=1.0) == 0.0
    assert full.delta(eps=math.inf) == 0.0


def test_bare_releases_compose_with_noisy_ones() -> None:
    accountant = charged(steps=100)
    before = accountant.epsilon(delta=1e-5)
    accountant.step(noise_multiplier=0.0, sample_rate=1e-6, dimension=5)
    assert accountant.epsilon(delta=9e-7) == math.inf
    assert accountant.epsilon(delta=1e-5 + 1e-6) == pytest.approx(before, rel=1e-4)
    assert accountant.delta(eps=before) == pytest.approx(1e-5 + 1e-6, rel=1e-2)


@ignore_unsound
@pytest.mark.parametrize(("mechanism", "bound"), PAIRS)
def test_infinite_dimension(mechanism: str, bound: str) -> None:
    eps = charged(bound, mechanism, dimension=math.inf, steps=10).epsilon(delta=1e-5)
    large = charged(bound, mechanism, dimension=10**12, steps=10).epsilon(delta=1e-5)
    assert eps >= large * (1.0 - 1e-9)
    assert math.isfinite(eps) == (bound == "tight")


def test_overspending_is_visible_even_for_tiny_costs() -> None:
    accountant = charged(noise_multiplier=1e160, sample_rate=1e-200, steps=2**53)
    assert Orders(accountant.composition).level(0)[1] > 0.0


@ignore_unsound
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    pair=st.sampled_from(PAIRS),
    m=st.one_of(st.sampled_from([0.0, 5e-324, 1e-200, 1e300, math.inf]), st.floats(-12, 12).map(lambda e: 10.0**e)),
    q=st.one_of(st.sampled_from([0.0, 1.0, 5e-324, 1.0 - 2**-53]), st.floats(-15, 0).map(lambda e: 10.0**e)),
    n=st.one_of(st.just(math.inf), st.floats(0, 12).map(lambda e: int(10.0**e))),
    steps=st.floats(0, 15).map(lambda e: int(10.0**e)),
    delta=st.one_of(st.sampled_from([0.0, 1.0, 5e-324]), st.floats(-20, 0).map(lambda e: 10.0**e)),
    eps=st.one_of(st.sampled_from([0.0, 1e300, math.inf]), st.floats(-12, 6).map(lambda e: 10.0**e)),
)
def test_no_nan_no_warning_anywhere(
    pair: tuple[str, str], m: float, q: float, n: float, steps: int, delta: float, eps: float
) -> None:
    mechanism, bound = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UnsoundBoundWarning)
        accountant = MajorizedAccountant(bound, mechanism)
        accountant.step(noise_multiplier=m, sample_rate=q, dimension=n, steps=steps)
        accountant.step(noise_multiplier=2.0, sample_rate=0.01, dimension=10)
        spent = accountant.epsilon(delta=delta)
        assert spent >= 0.0
        assert accountant.epsilon(delta=delta, orders_only=True) >= spent
        assert 0.0 <= accountant.delta(eps=eps) <= 1.0
        assert accountant.best_order(delta) > 1.0
        forecast = accountant.forecast(delta=delta, noise_multiplier=m, sample_rate=q, dimension=n, steps=3)
        assert spent <= forecast.epsilon(0) <= forecast.epsilon(2) <= forecast.epsilon(3)
        assert not (log_moments(m, q, n, [2, 30], bound, mechanism) < 0.0).any()


@pytest.mark.parametrize(("mechanism", "bound"), [p for p in PAIRS if p[1] != "published"])
def test_epsilon_is_monotone_in_every_argument(mechanism: str, bound: str) -> None:
    base: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "dimension": 1000, "steps": 100}
    moves: dict[str, list[Any]] = {
        "noise_multiplier": [50.0, 5.0, 1.01, 1.0, 0.5, 0.1],
        "sample_rate": [1e-5, 1e-3, 0.01, 0.0102, 0.3, 1.0],
        "dimension": [1, 10, 1000, 1100, 10**7, math.inf if bound == "tight" else 10**10],
        "steps": [1, 2, 100, 101, 120, 3000],
    }
    for name, values in moves.items():
        spent = [charged(bound, mechanism, **{**base, name: v}).epsilon(delta=1e-5) for v in values]
        assert all(a <= b * (1.0 + 1e-6) for a, b in itertools.pairwise(spent)), (name, spent)
    accountant = charged(bound, mechanism, **base)
    by_delta = [accountant.epsilon(delta=d) for d in [1e-300, 1e-12, 1e-5, 1e-2, 0.5]]
    assert by_delta == sorted(by_delta, reverse=True)
    by_eps = [accountant.delta(eps=e) for e in [0.0, 1e-3, 0.1, 1.0, 10.0]]
    assert by_eps == sorted(by_eps, reverse=True)


# ---------------------------------------------------------------- ledger and state


def test_repeated_steps_merge_and_cost_little() -> None:
    accountant = MajorizedAccountant()
    start = time.process_time()
    for _ in range(20_000):
        accountant.step(**PLAN)
    assert time.process_time() - start < 2.0
    assert accountant == charged(steps=20_000)
    assert len(accountant.state_dict()["releases"]) == 1


@ignore_unsound
@pytest.mark.parametrize(("mechanism", "bound"), PAIRS)
def test_state_round_trip_covers_every_attribute(mechanism: str, bound: str) -> None:
    accountant = charged(bound, mechanism, steps=7)
    accountant.step(noise_multiplier=math.inf, sample_rate=1.0, dimension=math.inf, steps=2)
    accountant.step(noise_multiplier=0.1 + 0.2, sample_rate=1 / 3, dimension=10**12, extra_blocks=[(1, 20.0)])
    text = json.dumps(accountant.state_dict(), allow_nan=False)
    again = MajorizedAccountant.from_state_dict(json.loads(text))
    assert vars(again) == vars(accountant)
    assert again == accountant
    assert again.epsilon(delta=1e-5) == accountant.epsilon(delta=1e-5)
    assert json.dumps(again.state_dict()) == text


def test_a_release_survives_json_and_may_leave_out_what_it_has_not() -> None:
    for release in (
        Release(math.inf, 1.0, math.inf),
        Release(0.1 + 0.2, 1 / 3, 10**12, [(1, 20.0)], [(4e11, 0.5, 2), (2e11, 0.5, 1)]),
    ):
        assert Release.from_dict(json.loads(json.dumps(release.to_dict(), allow_nan=False))) == release
    plain = {"noise_multiplier": 1.5, "sample_rate": 0.25, "dimension": 8}
    assert Release.from_dict(plain) == Release(1.5, 0.25, 8) == Release(2.0, 0.25, 8).with_multiplier(1.5)
    for damaged in ({}, {**plain, "extra": 1}, {"noise_multiplier": 1.5, "dimension": 8}, [1]):
        with pytest.raises(ValueError, match="expected the entries"):
            Release.from_dict(damaged)  # type: ignore[arg-type]


def test_copy_is_independent() -> None:
    accountant = charged(steps=3)
    for clone in (accountant.copy(), copy.deepcopy(accountant)):
        assert vars(clone) == vars(accountant)
        clone.step(**PLAN)
        assert (clone.steps, accountant.steps) == (4, 3)
        assert clone != accountant


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("bound",), "best"),
        (("mechanism",), None),
        (("releases",), None),
        (("releases", 0), None),
        (("releases", 0, "noise_multiplier"), -1.0),
        (("releases", 0, "noise_multiplier"), math.nan),
        (("releases", 0, "sample_rate"), "0.1"),
        (("releases", 0, "dimension"), 1.5),
        (("releases", 0, "steps"), -1),
        (("releases", 0, "steps"), 1.0),
        (("releases", 0, "steps"), True),
        (("releases", 0, "extra_blocks"), [[1]]),
        (("releases", 0, "extra_blocks"), 3),
        (("extra",), 1),
        (("releases", 0, "extra"), 1),
    ],
)
def test_corrupted_state_is_refused(path: tuple[Any, ...], value: Any) -> None:
    state = charged().state_dict()
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match="state is not a valid accountant state"):
        MajorizedAccountant.from_state_dict(state)
    with pytest.raises(ValueError, match="state is not a valid"):
        MajorizedAccountant.from_state_dict({"version": 1})
    with pytest.raises(ValueError, match="state is not a valid"):
        MajorizedAccountant.from_state_dict([1])  # type: ignore[arg-type]


def test_published_warns_on_use_and_names_the_alternative() -> None:
    with pytest.warns(UnsoundBoundWarning, match='Use bound="tight"'):
        MajorizedAccountant(bound="published")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: a.step(**{**PLAN, "steps": 1.0}), TypeError, "steps must be an integer"),
        (lambda a: a.step(**{**PLAN, "steps": -1}), ValueError, "steps must be at least 0"),
        (lambda a: a.step(**PLAN, extra_blocks=[(1, -1.0)]), ValueError, "extra_blocks noise_multiplier"),
        (lambda a: a.epsilon(delta=2.0), ValueError, r"delta must lie in \[0, 1\], got 2.0"),
        (lambda a: a.epsilon(delta="x"), TypeError, "delta must be a number"),
        (lambda a: a.delta(eps=-1.0), ValueError, r"eps must not be negative, got -1.0"),
        (lambda a: a.forecast(delta=0.1, steps=3, **PLAN).epsilon(4), ValueError, r"k must be an integer in \[0, 3\]"),
        (lambda a: MajorizedAccountant(mechanism="gaussian", bound="joint"), ValueError, "bound must be 'tight'"),
    ],
)
def test_argument_errors(call: Any, error: type[Exception], words: str) -> None:
    accountant = MajorizedAccountant()
    with pytest.raises(error, match=words):
        call(accountant)
    assert accountant.steps == 0


# ---------------------------------------------------------------- affordable steps


@ignore_unsound
@pytest.mark.parametrize(("mechanism", "bound"), PAIRS)
@pytest.mark.parametrize("before", [0, 40])
def test_steps_within_is_exact(mechanism: str, bound: str, before: int) -> None:
    accountant = charged(bound, mechanism, noise_multiplier=2.0, steps=before)
    for eps in [0.05, 0.9]:
        further = accountant.steps_within(eps=eps, delta=1e-5, **PLAN)
        assert isinstance(further, int)
        for k, fits in [(further, True), (further + 1, False)]:
            after = accountant.copy()
            after.step(**PLAN, steps=k)
            assert (after.epsilon(delta=1e-5) <= eps) == fits or (further == 0 and fits)
    assert accountant.steps == before


def test_steps_within_at_its_ends() -> None:
    assert charged(steps=5860).steps_within(eps=0.5, delta=1e-5, **PLAN) == 0
    empty = MajorizedAccountant()
    assert empty.steps_within(eps=math.inf, delta=1e-5, **PLAN) == math.inf
    assert empty.steps_within(eps=0.1, delta=1e-5, **{**PLAN, "sample_rate": 0.0}) == math.inf
    bare = {**PLAN, "noise_multiplier": 0.0, "sample_rate": 1e-6}
    assert empty.steps_within(eps=1.0, delta=1.05e-5, **bare) == 10
    spent = charged(steps=5860).epsilon(delta=1e-5)
    assert charged(steps=5860).steps_within(eps=spent, delta=1e-5, **PLAN) == 0
    assert empty.steps_within(eps=spent, delta=1e-5, **PLAN) == 5860


# ---------------------------------------------------------------- forecast


@ignore_unsound
@pytest.mark.parametrize(
    ("mechanism", "bound", "plan", "before", "steps"),
    [
        ("laplace", "tight", PLAN, 0, 5860),
        ("laplace", "tight", {**PLAN, "noise_multiplier": 1 / 3}, 3, 200),
        ("laplace", "tight", {**PLAN, "noise_multiplier": 2.0}, 0, 100),  # the second route wins
        ("laplace", "tight", {**PLAN, "sample_rate": 1.0}, 1, 40),
        ("laplace", "joint", PLAN, 10, 300),
        ("laplace", "published", PLAN, 10, 300),
        ("gaussian", "tight", PLAN, 10, 300),
        ("laplace_l1", "tight", PLAN, 0, 300),
        ("laplace", "tight", {**PLAN, "noise_multiplier": 0.0, "sample_rate": 1e-6}, 2, 20),
        ("laplace", "tight", {**PLAN, "sample_rate": 0.0}, 2, 20),
        ("laplace", "tight", PLAN, 2, 0),
    ],
)
def test_forecast_is_a_safe_staircase(
    mechanism: str, bound: str, plan: dict[str, Any], before: int, steps: int
) -> None:
    accountant = charged(bound, mechanism, steps=before)
    forecast = accountant.forecast(delta=1e-5, steps=steps, **plan)
    values = [forecast.epsilon(k) for k in range(steps + 1)]
    assert values == sorted(values)
    for k in sorted({0, min(1, steps), steps // 7, steps // 3, steps - 1 if steps else 0, steps}):
        after = accountant.copy()
        after.step(**plan, steps=k)
        truth = after.epsilon(delta=1e-5)
        assert values[k] >= truth * (1.0 - 1e-9)
        if k == steps:
            assert values[k] == truth
    assert accountant.steps == before


def test_forecast_is_cheap() -> None:
    forecast = MajorizedAccountant().forecast(delta=1e-5, steps=10**4, **{**PLAN, "dimension": 10**9})
    start = time.process_time()
    for k in range(0, 10**4, 5):
        forecast.epsilon(k)
    assert (time.process_time() - start) / 2000 < 20e-6


def test_infinite_moments_never_come_out_finite() -> None:
    accountant = charged("tight", noise_multiplier=1e-200, dimension=math.inf, steps=10)
    assert accountant.epsilon(delta=1e-5) == math.inf
    assert accountant.delta(eps=1e6) == pytest.approx(10 * 0.0043)  # at worst, the example was drawn
    assert (Orders(accountant.composition).level(0)[1:] >= INFINITE).all()
