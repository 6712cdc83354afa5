"""The hockey sticks on the grid: above the truth, close, in both directions, and nested."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from lightning_lap2.accounting.routes.pairs import Pair, gdp_epsilon, merged
from lightning_lap2.accounting.routes.profile import FORWARD, REVERSE, profile


def one_gaussian_step(mu: float, rate: float, eps: float, side: int) -> float:
    """Hockey stick of one sampled Gaussian step, 50 digits."""
    with mpmath.workdps(300):
        mu_, q, e = mpmath.mpf(mu), mpmath.mpf(rate), mpmath.exp(mpmath.mpf(eps))
        level = e if side == FORWARD else 1 / e  # where the ratio 1 - q + q r meets it
        inner = (level - 1 + q) / q
        if inner <= 0:
            return 0.0
        z = mpmath.log(inner) / mu_ + mu_ / 2
        base, shifted = mpmath.ncdf(-z), mpmath.ncdf(mu_ - z)
        if side == FORWARD:
            return float((1 - q) * base + q * shifted - e * base)
        return float((1 - base) - e * ((1 - q) * (1 - base) + q * (1 - shifted)))


@pytest.mark.parametrize("side", [FORWARD, REVERSE])
@pytest.mark.parametrize(
    ("mu", "rate"), [(0.01, 0.3), (1.0, 1e-4), (1.0, 1.0), (4.0, 0.02), (20.0, 0.5), (0.5, 1 - 1e-6)]
)
def test_one_step_is_met_from_above(mu: float, rate: float, side: int) -> None:
    for delta in [1e-100, 1e-12, 1e-5, 1e-2]:
        found = profile({Pair(mu, rate): 1}, delta, side)
        eps = found.reaches(delta)
        if not math.isinf(eps):  # with mu = 20 at 1e-100 the losses leave double precision
            assert one_gaussian_step(mu, rate, eps, side) <= delta * (1.0 + 1e-9)
            lower = eps * (1.0 - 1e-6) - 2.0 * found.width
            assert lower <= 0.0 or one_gaussian_step(mu, rate, lower, side) > delta


@pytest.mark.parametrize(
    ("mu", "rate", "steps"), [(0.7, 0.01, 1000), (2.5, 1e-3, 50), (0.1, 0.5, 300), (1.0, 0.004, 20_000)]
)
def test_composition_in_both_directions_against_dp_accounting(mu: float, rate: float, steps: int) -> None:
    """Its optimistic rounding is below the truth, its pessimistic one above."""
    build = {"value_discretization_interval": 1e-4, "sampling_prob": rate}
    above = pld.from_gaussian_mechanism(1.0 / mu, **build).self_compose(steps)
    low = {"pessimistic_estimate": False, "use_connect_dots": False}
    below = pld.from_gaussian_mechanism(1.0 / mu, **build, **low).self_compose(steps)
    for side, name in [(FORWARD, "_pmf_remove"), (REVERSE, "_pmf_add")]:
        ours = profile({Pair(mu, rate): steps}, 1e-6, side)
        eps = ours.reaches(1e-6)
        assert getattr(below, name).get_delta_for_epsilon(eps) <= 1e-6
        high = getattr(above, name)
        assert high.get_delta_for_epsilon(eps * (1.0 - 5e-3) - 1e-4) >= 1e-6


@pytest.mark.parametrize(("x", "rate"), [(0.3, 1.0), (2.0, 0.1), (6.0, 0.3)])
def test_one_laplace_step(x: float, rate: float) -> None:
    for side in (FORWARD, REVERSE):
        found = profile({Pair(x, rate, laplace=True): 1}, 1e-3, side)
        for share in (0.2, 0.5, 0.8, 0.99):
            top = math.log1p(rate * math.expm1(x)) if side == FORWARD else -math.log1p(rate * math.expm1(-x))
            eps = share * top
            level = math.exp(eps if side == FORWARD else -eps)
            u = math.log1p((level - 1.0) / rate)  # the log ratio of the unsampled pair there
            base = 1.0 if u < -x else 0.5 * math.exp(-0.5 * (u + x))  # P(log r > u) under the unshifted distribution
            shifted = 1.0 - 0.5 * math.exp(0.5 * (u - x))
            forward = (1.0 - rate) * base + rate * shifted - level * base
            reverse = (1.0 - base) - ((1.0 - rate) * (1.0 - base) + rate * (1.0 - shifted)) / level
            exact = forward if side == FORWARD else reverse
            value = float(found(np.array([eps]))[0])
            assert exact * (1.0 - 1e-9) <= value <= exact * 1.01 + 1e-9


def test_laplace_composition_against_dp_accounting() -> None:
    for x, rate, steps in [(0.5, 0.1, 200), (3.0, 1e-3, 300), (0.05, 1.0, 400)]:
        build = {"value_discretization_interval": 1e-4, "sampling_prob": rate}
        above = pld.from_laplace_mechanism(1.0 / x, **build).self_compose(steps)
        ours = max(
            profile({Pair(x, rate, laplace=True): steps}, 1e-6, side).reaches(1e-6) for side in (FORWARD, REVERSE)
        )
        assert ours == pytest.approx(above.get_epsilon_for_delta(1e-6), rel=3e-3, abs=2e-4)


def test_unsampled_steps_compose_to_the_closed_form() -> None:
    """Two Gaussian kinds on the grid, not merged: the sum of squares is known."""
    for mu, steps, delta in itertools.product([0.01, 0.2], [10, 10_000], [1e-80, 1e-6]):
        exact = gdp_epsilon(mu * math.sqrt(steps), delta)
        found = profile({Pair(mu, 1.0): steps}, delta, FORWARD).reaches(delta)
        assert exact * (1.0 - 1e-9) <= found <= exact * (1.0 + 3e-3)


def test_coarser_grids_lie_higher() -> None:
    counts = {Pair(0.8, 0.01): 300, Pair(0.3, 0.2): 40}
    for side in (FORWARD, REVERSE):
        fine, coarse = (profile(counts, 1e-6, side, width_delta=d) for d in (1e-3, 1e-190))
        assert coarse.width > fine.width
        at = np.linspace(0.1, 3.0, 50)
        assert (fine(at) <= coarse(at) * (1.0 + 1e-9)).all()
        assert (np.diff(fine.value) <= 0.0).all()


def test_below_the_grid_and_above_it() -> None:
    found = profile({Pair(1.0, 0.5): 3}, 1e-6, FORWARD)
    assert float(found(np.array([-200.0]))[0]) == pytest.approx(1.0, rel=1e-3)  # E R
    assert 0.0 < float(found(np.array([1e4]))[0]) < 1e-18


def test_merging_never_costs_less() -> None:
    counts = merged({Pair(0.5, 1.0): 9, Pair(0.5, 0.2): 3, Pair(0.5, 0.2, laplace=True): 2})
    assert counts == {
        Pair(0.5, 0.2): 3,
        Pair(0.5, 0.2, laplace=True): 2,
        Pair(1.5 * (1.0 + 1e-15), 1.0): 1,
    }
