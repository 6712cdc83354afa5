"""The third route: test functions under which a Laplace step is no more than a Gaussian one (Theorem 6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.comparison import Comparison, class_means, log_kappa
from lightning_lap2.accounting.routes.pairs import (
    Pair,
    comparable_parameter,
    compared_pair,
    gdp_delta,
    gdp_epsilon,
    laplace_gdp,
    merged,
)
from lightning_lap2.accounting.routes.profile import FORWARD, profile

Array = npt.NDArray[np.float64]
NODES, WEIGHTS = np.polynomial.legendre.leggauss(300)


def integral(x: Array) -> Array:
    """G(x) = e^x (x^2/2 - x + 1) - 1 = sum_{k >= 3} x^k (k-1)(k-2) / (2 k!), for x >= 0."""
    y = np.minimum(x, 0.5)
    series = sum(y**k * ((k - 1) * (k - 2) / (2.0 * math.factorial(k))) for k in range(3, 17))
    return np.where(x < 0.5, series, np.exp(x) * (0.5 * x * x - x + 1.0) - 1.0)


def route(steps: int, m: float, rate: float, n: float) -> Comparison:
    return Comparison(Composition.of("laplace", "tight", [(Release(m, rate, n), steps)]))


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
        return integral(np.maximum(log_a - log_c, 0.0))

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
            return np.exp(log_a) * integral(np.maximum(-log_a - log_c, 0.0))

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
            assert float(integral(np.array([x]))[0]) == pytest.approx(float(exact), rel=1e-12)
            kappa = mpmath.log(2 * (1 + mpmath.e**big * (big - 1)) / big**2)
            assert float(log_kappa(np.array([x]))[0]) == pytest.approx(float(kappa), rel=1e-12)
    c, l = 0.7, 0.9  # the line through K of slope one never exceeds the scaled function
    r = np.linspace(1e-3, 30.0, 4000)
    scaled = 2.0 / l**2 * c * integral(np.maximum(np.log(r / c), 0.0))
    assert (scaled >= np.maximum(r - c * math.exp(float(log_kappa(np.array([l]))[0])), 0.0) - 1e-12).all()
    x = np.linspace(0.0, 60.0, 6001)
    assert (integral(x) <= 3.5 * np.exp(1.25 * x)).all()


def test_the_class_contains_the_test_functions() -> None:
    """h(r) = log(r/c)/r: r^{3/2} h nondecreasing, 9/4 h + 4 v h' + v^2 h'' >= 0 for 0 <= v <= r."""
    log_r = np.linspace(1e-6, 60.0, 400)[:, None]
    share = np.linspace(0.0, 1.0, 201)[None, :]  # v / r; the factor r^{-1} is left out
    h, slope, bend = log_r, 1.0 - log_r, 2.0 * log_r - 3.0
    assert (2.25 * h + 4.0 * share * slope + share**2 * bend >= -1e-12).all()
    assert (np.diff(np.exp(0.5 * log_r[:, 0]) * log_r[:, 0]) > 0.0).all()


@pytest.mark.parametrize(("mu", "rate"), [(0.5, 0.02), (1.5, 0.3), (0.1, 1.0), (3.0, 1e-3)])
def test_means_of_one_step_are_just_above_quadrature(mu: float, rate: float) -> None:
    log_c, mean = class_means(profile({Pair(mu, rate): 1}, 1e-6, FORWARD))
    for i in range(log_c.size // 4, log_c.size, log_c.size // 20):  # below, what left the window at its top comes in
        kink = kink_of(rate, float(log_c[i]))
        exact = math.exp(log_c[i]) * gaussian_mean(sampled_f(rate, float(log_c[i])), mu, kink)
        if exact > 1e-9:
            assert exact * (1.0 - 1e-9) <= mean[i] <= exact * 1.01 + 1e-12


def test_unsampled_steps_are_close_above_the_gaussian_and_merge() -> None:
    for mu, delta in itertools.product([1e-3, 0.3, 2.0], [1e-30, 1e-10, 1e-5, 1e-2]):
        exact = gdp_epsilon(mu, delta)
        found = route(1, 1.0 / mu, 1.0, math.inf).epsilon(delta).forward
        assert exact <= found <= exact * 1.08 + 0.1 * mu
        assert route(9, 3.0 / mu, 1.0, math.inf).epsilon(delta).forward == pytest.approx(found, rel=1e-6)
        back = route(1, 1.0 / mu, 1.0, math.inf).delta(found).forward
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
        assert route(steps, m, rate, n).delta(eps).forward >= exact
        accountant = MajorizedAccountant()
        accountant.step(noise_multiplier=m, sample_rate=rate, dimension=n, steps=steps)
        assert accountant.delta(eps=eps) >= exact


def test_never_below_the_subsampled_gaussian_and_close() -> None:
    """In high dimension the even spread tends to the Gaussian, whose epsilon is therefore a lower bound."""
    for mu, rate, steps in [(0.5, 0.0043, 100), (1.0, 0.01, 1000), (2.0, 0.0043, 300)]:
        single = pld.from_gaussian_mechanism(1.0 / mu, value_discretization_interval=1e-4, sampling_prob=rate)
        truth = single.self_compose(steps).get_epsilon_for_delta(1e-5)
        assert truth * (1.0 - 2e-3) <= route(steps, 1.0 / mu, rate, math.inf).epsilon(1e-5).forward <= 1.07 * truth


def test_refuses_what_it_cannot_resolve_and_raises_what_is_too_small() -> None:
    for release, steps, delta in [
        (Release(1 / 25.0, 0.1, math.inf), 1, 1e-5),
        (Release(1.0, 0.1, 10), 10**9, 1e-5),
        (Release(1.0, 0.1, 10), 1, 0.0),
        (Release(1.0, 0.1, 10), 1, 1.0),
    ]:
        assert not Comparison(Composition.of("laplace", "tight", [(release, steps)])).usable(delta)
    kinds = [(Release(1.0 + i / 100, 0.1, 10), 1) for i in range(40)]
    assert not Comparison(Composition.of("laplace", "tight", kinds)).usable(1e-5)
    assert merged({Pair(1e-9, 1e-14): 3, Pair(1e-8, 1e-13): 4}) == {Pair(1e-7, 1e-12): 7}
    assert merged({Pair(1.0, 1.0 - 1e-12): 3, Pair(1.0, 1.0): 1}) == {Pair(2.0 * (1.0 + 1e-15), 1.0): 1}


def test_mixed_steps_and_blocks() -> None:
    def epsilon(*counts: tuple[float, float, int]) -> float:
        composition = Composition.of("laplace", "tight", [(Release(m, q, 1000), t) for m, q, t in counts])
        return Comparison(composition).epsilon(1e-5).forward

    assert epsilon((2.0, 0.01, 100)) < epsilon((2.0, 0.01, 50), (1.7, 0.02, 50)) < epsilon((1.7, 0.02, 100))
    joined = compared_pair(Release(1.0, 0.1, 100, ((10, 2.0),)), "laplace").parameter
    parts = [compared_pair(Release(m, 0.1, n), "laplace").parameter for n, m in [(100, 1.0), (10, 2.0)]]
    assert joined == pytest.approx(math.hypot(*parts), rel=1e-14)
    assert compared_pair(Release(1.0, 1.0, 5), "laplace_l1") == compared_pair(Release(1.0, 1.0, 1), "laplace")


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
