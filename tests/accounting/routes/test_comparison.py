"""The third route: test functions under which a Laplace step is no more than a Gaussian one (Theorem 6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.comparison import (
    Comparison,
    _integral,
    _inverse_log_kappa,
    _log_kappa,
    comparable_parameter,
    compared_pair,
)
from lightning_lap2.accounting.routes.domination import Domination, Pair, gdp_delta, gdp_epsilon, laplace_gdp
from lightning_lap2.accounting.routes.tilted import ratio_law

Array = npt.NDArray[np.float64]
NODES, WEIGHTS = np.polynomial.legendre.leggauss(300)


def panels(low: float, high: float, count: int, breaks: tuple[float, ...] = ()) -> tuple[Array, Array]:
    """Nodes and weights of composite Gauss-Legendre quadrature, with panel edges at ``breaks``."""
    edges = np.unique([*np.linspace(low, high, count + 1), *(b for b in breaks if low < b < high)])
    half = 0.5 * np.diff(edges)[:, None]
    nodes = 0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES
    return nodes.ravel(), (half * WEIGHTS).ravel()


def laplace_mean(f: Callable[[Array], Array], x: float, kink: float) -> float:
    """E[f(log r)] for one Laplace coordinate shifted by x: two atoms and the piece between."""
    z, weight = panels(0.0, x, 2, ((kink + x) / 2.0,))
    ends = f(np.array([-x, x])) @ np.array([0.5, 0.5 * math.exp(-x)])
    return float(ends + weight @ (0.5 * np.exp(-z) * f(2.0 * z - x)))


def gaussian_mean(f: Callable[[Array], Array], mu: float, kink: float) -> float:
    z, weight = panels(-12.0, 12.0 + 3.0 * mu, 6, ((kink + 0.5 * mu * mu) / mu,))
    return float(weight @ (np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi) * f(mu * z - 0.5 * mu * mu)))


def sampled_f(rate: float, log_c: float) -> Callable[[Array], Array]:
    """log r -> f_c(1 - q + q r) / c."""

    def f(log_ratio: Array) -> Array:
        log_a = log_ratio if rate == 1.0 else np.log1p(rate * np.expm1(log_ratio))
        return _integral(np.maximum(log_a - log_c, 0.0))

    return f


def kink_of(rate: float, log_c: float) -> float:
    inner = math.expm1(log_c) / rate
    return math.log1p(inner) if inner > -1.0 else -math.inf


@pytest.mark.parametrize("x", [1e-3, 0.1, 1.0, 3.0, 8.0])
def test_one_coordinate_is_below_the_gaussian_for_every_test_function(x: float) -> None:
    mu = comparable_parameter(1, x)
    for rate, share in itertools.product([1.0, 0.9, 0.3, 0.01], np.linspace(-0.99, 0.99, 23)):
        log_c = share * (x if rate == 1.0 else math.log1p(rate * math.expm1(x)))
        f, kink = sampled_f(rate, log_c), kink_of(rate, log_c)
        assert laplace_mean(f, x, kink) <= gaussian_mean(f, mu, kink) * (1.0 + 1e-9) + 1e-18


def test_no_smaller_gaussian_serves() -> None:
    """f(r) = -sqrt r is in the class, and equal by construction: the Bhattacharyya coefficients agree."""
    for x in [1e-6, 1e-3, 1.1e-3, 0.5, 20.0]:
        with mpmath.workdps(40):
            exact = mpmath.sqrt(4 * mpmath.mpf(x) - 8 * mpmath.log1p(mpmath.mpf(x) / 2))
        assert float(exact) <= comparable_parameter(1, x) * (1.0 + 1e-15)
        assert comparable_parameter(1, x) <= float(exact) * (1.0 + 1e-7)


def test_the_reverse_direction_is_never_larger() -> None:
    """Under the mixture, 1 / A against A: Lemma 1 for the test functions."""
    x = 1.3
    for rate, share in itertools.product([0.9, 0.5, 0.05], np.linspace(-0.9, 0.9, 13)):
        reach = math.log1p(rate * math.expm1(x))
        log_c = share * reach

        def reverse(log_ratio: Array, rate: float = rate, log_c: float = log_c) -> Array:
            log_a = np.log1p(rate * np.expm1(log_ratio))
            return np.exp(log_a) * _integral(np.maximum(-log_a - log_c, 0.0))

        kink = kink_of(rate, -log_c)
        forward = laplace_mean(sampled_f(rate, log_c), x, kink_of(rate, log_c))
        assert laplace_mean(reverse, x, kink) <= forward * (1.0 + 1e-9) + 1e-18


def test_parameters_are_ordered_and_concave_in_the_square() -> None:
    for rho in [1e-5, 0.1, 2.0, 7.0]:
        mus = np.array([comparable_parameter(n, rho) for n in [1, 2, 5, 100, 10**6, 10**12, math.inf]])
        assert (np.diff(mus) >= 0.0).all()
        assert mus[-1] == rho
        assert all(comparable_parameter(n, rho) <= math.sqrt(n) * laplace_gdp(rho / math.sqrt(n)) for n in (1, 9))
        uneven = math.hypot(comparable_parameter(1, 0.6 * rho), comparable_parameter(1, 0.8 * rho))
        assert uneven <= comparable_parameter(2, rho) * (1.0 + 1e-12)


def test_test_function_and_its_tangent() -> None:
    with mpmath.workdps(50):
        for x in [1e-9, 1e-3, 0.49, 0.51, 3.0, 40.0]:
            big = mpmath.mpf(x)
            exact = mpmath.e**big * (big**2 / 2 - big + 1) - 1
            assert float(_integral(np.array([x]))[0]) == pytest.approx(float(exact), rel=1e-12)
            kappa = mpmath.log(2 * (1 + mpmath.e**big * (big - 1)) / big**2)
            assert _log_kappa(x) == pytest.approx(float(kappa), rel=1e-12)
            assert _inverse_log_kappa(float(kappa)) == pytest.approx(x, rel=1e-9)
    c, l = 0.7, 0.9  # the line through K of slope one never exceeds the scaled function
    r = np.linspace(1e-3, 30.0, 4000)
    scaled = 2.0 / l**2 * c * _integral(np.maximum(np.log(r / c), 0.0))
    assert (scaled >= np.maximum(r - c * math.exp(_log_kappa(l)), 0.0) - 1e-12).all()
    x = np.linspace(0.0, 60.0, 6001)
    assert (_integral(x) <= 3.5 * np.exp(1.25 * x)).all()


def test_the_class_contains_the_test_functions() -> None:
    """h(r) = log(r/c)/r: r^{3/2} h nondecreasing, 9/4 h + 4 v h' + v^2 h'' >= 0 for 0 <= v <= r."""
    log_r = np.linspace(1e-6, 60.0, 400)[:, None]
    share = np.linspace(0.0, 1.0, 201)[None, :]  # v / r; the factor r^{-1} is left out
    h, slope, bend = log_r, 1.0 - log_r, 2.0 * log_r - 3.0
    assert (2.25 * h + 4.0 * share * slope + share**2 * bend >= -1e-12).all()
    assert (np.diff(np.exp(0.5 * log_r[:, 0]) * log_r[:, 0]) > 0.0).all()


@pytest.mark.parametrize(("mu", "rate", "steps"), [(0.5, 0.02, 40), (1.5, 0.3, 3), (0.1, 1.0, 1), (3.0, 1e-3, 500)])
def test_grid_is_above_the_exact_ratio(mu: float, rate: float, steps: int) -> None:
    """Against numerical integration of one step and exact moments of the composition."""
    law = ratio_law({Pair(mu, rate): steps}, 1e-6)
    log_ratio = (law.bottom + np.arange(law.weight.size)) * law.width
    for order in [0.0, 1.0, 1.2]:
        z, weight = panels(-12.0, 12.0 + 2.0 * mu, 40)
        a = 1.0 - rate + rate * np.exp(mu * z - 0.5 * mu * mu)
        one = float(weight @ (np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi) * a**order))
        found = float(law.weight @ np.exp(order * log_ratio)) + math.exp(law.log_missing)
        assert one**steps * (1.0 - 1e-11) <= found <= one**steps * (1.0 + 2e-3)


def test_unsampled_steps_are_close_above_the_gaussian_and_merge() -> None:
    for mu, delta in itertools.product([1e-3, 0.3, 2.0], [1e-30, 1e-10, 1e-5, 1e-2]):
        exact = gdp_epsilon(mu, delta)
        found = Comparison({Pair(mu, 1.0): 1}).epsilon(delta)
        assert exact <= found <= exact * 1.08 + 0.1 * mu
        assert Comparison({Pair(mu / 3.0, 1.0): 9}).epsilon(delta) == pytest.approx(found, rel=1e-6)
        back = Comparison({Pair(mu, 1.0): 1}).delta(found, 1.0)
        assert gdp_delta(mu, found) <= back <= delta * (1.0 + 5e-3)


def one_coordinate_loss(x: float, rate: float, width: float) -> tuple[int, Array]:
    """Masses, under the mixture, of the loss of one sampled Laplace coordinate, every loss rounded down."""
    z, weight = panels(0.0, x, 20)
    log_ratio = np.concatenate([[-x], 2.0 * z - x, [x]])
    base = np.concatenate([[0.5], 0.5 * weight * np.exp(-z), [0.5 * math.exp(-x)]])
    loss = np.log1p(rate * np.expm1(log_ratio))
    index = np.floor(loss / width).astype(int)
    upper = base * np.exp(loss)
    return int(index.min()), np.bincount(index - index.min(), weights=upper / max(1.0, upper.sum()))


@pytest.mark.parametrize(
    ("m", "rate", "steps", "width"), [(0.8, 0.1, 60, 1e-3), (0.3, 0.02, 30, 1e-3), (2.0, 1, 8, 1e-3)]
)
def test_never_below_one_coordinate(m: float, rate: float, steps: int, width: float) -> None:
    """The exact composition of a single gradient, rounded down, is a lower bound on the truth; every dimension."""
    first, one = one_coordinate_loss(1.0 / m, rate, width)
    total = np.array([1.0])
    for _ in range(steps):
        total = np.convolve(total, one)
    loss = (steps * first + np.arange(total.size)) * width
    for n, eps in itertools.product([1, 10**6], [0.05, 0.5, 2.0]):
        exact = float((total * np.maximum(-np.expm1(eps - loss), 0.0)).sum())
        pair = compared_pair(Release(m, rate, n), "laplace")
        assert Comparison({pair: steps}).delta(eps) >= exact
        accountant = MajorizedAccountant()
        accountant.step(noise_multiplier=m, sample_rate=rate, dimension=n, steps=steps)
        assert accountant.delta(eps=eps) >= exact


def test_never_below_the_subsampled_gaussian_and_close() -> None:
    """In high dimension the even spread tends to the Gaussian, whose epsilon is therefore a lower bound."""
    for mu, rate, steps in [(0.5, 0.0043, 100), (1.0, 0.01, 1000), (2.0, 0.0043, 300)]:
        truth = Domination({Pair(mu, rate): steps}).epsilon(1e-5)
        assert truth * (1.0 - 2e-3) <= Comparison({Pair(mu, rate): steps}).epsilon(1e-5) <= 1.07 * truth


@settings(max_examples=12, deadline=None)
@given(
    m=st.floats(0.3, 20.0),
    rate=st.floats(1e-3, 1.0),
    n=st.sampled_from([1, 30, 10**6, math.inf]),
    steps=st.integers(1, 400),
    delta=st.floats(1e-9, 0.1),
)
def test_monotone_in_every_argument(m: float, rate: float, n: float, steps: int, delta: float) -> None:
    def epsilon(m: float, rate: float, n: float, steps: int, delta: float) -> float:
        comparison = Comparison({compared_pair(Release(m, rate, n), "laplace"): steps})
        return comparison.epsilon(delta) if comparison.usable(delta) else math.inf

    here = epsilon(m, rate, n, steps, delta)
    slack = 1.0 + 2e-3  # the grids differ
    assert epsilon(1.2 * m, rate, n, steps, delta) <= here * slack + 1e-9
    assert epsilon(m, 0.8 * rate, n, steps, delta) <= here * slack + 1e-9
    assert epsilon(m, rate, min(n, 20), steps, delta) <= here * slack + 1e-9
    assert epsilon(m, rate, n, max(1, steps // 2), delta) <= here * slack + 1e-9
    assert epsilon(m, rate, n, steps, min(0.5, 2.0 * delta)) <= here * slack + 1e-9


def test_refuses_what_it_cannot_resolve() -> None:
    for counts, delta in [
        ({}, 1e-5),
        ({Pair(9.0, 0.1): 1}, 1e-5),
        ({Pair(1e-8, 0.1): 1}, 1e-5),
        ({Pair(1.0, 1e-13): 1}, 1e-5),
        ({Pair(1.0, 0.1): 10**9}, 1e-5),
        ({Pair(1.0 + i / 100, 0.1): 1 for i in range(40)}, 1e-5),
        ({Pair(1.0, 0.1): 1}, 0.0),
        ({Pair(1.0, 0.1): 1}, 1.0),
    ]:
        comparison = Comparison(counts)
        assert not comparison.usable(delta)
        assert comparison.delta(1.0, 0.25) <= 0.25


def test_mixed_steps_and_blocks() -> None:
    small, large = Pair(0.5, 0.01), Pair(0.6, 0.02)
    mixed = Comparison({small: 50, large: 50}).epsilon(1e-5)
    assert Comparison({small: 100}).epsilon(1e-5) < mixed < Comparison({large: 100}).epsilon(1e-5)
    joined = compared_pair(Release(1.0, 0.1, 100, ((10, 2.0),)), "laplace").parameter
    parts = [compared_pair(Release(m, 0.1, n), "laplace").parameter for n, m in [(100, 1.0), (10, 2.0)]]
    assert joined == pytest.approx(math.hypot(*parts), rel=1e-14)
    assert compared_pair(Release(1.0, 1.0 - 1e-12, 5), "laplace_l1") == compared_pair(Release(1.0, 1.0, 1), "laplace")


@pytest.mark.parametrize("eps", [50.0, 1e3, 1e6])
@pytest.mark.parametrize("rate", [0.01, 1 / 3, 1.0])
def test_huge_budgets_are_left_to_the_other_routes(eps: float, rate: float) -> None:
    """Millions of steps, whose losses no grid holds: found by a fit with eps = 1e6 and a given noise multiplier."""
    accountant = MajorizedAccountant()
    affordable = accountant.steps_within(eps=eps, delta=1e-5, noise_multiplier=0.6, sample_rate=rate, dimension=50)
    terms = {"noise_multiplier": 0.6, "sample_rate": rate, "dimension": 50}
    accountant.step(**terms, steps=int(affordable))
    assert accountant.epsilon(delta=1e-5) <= eps
    accountant.step(**terms)
    assert accountant.epsilon(delta=1e-5) > eps
