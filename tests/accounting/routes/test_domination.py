"""The second route: Gaussian domination of the Laplace step, and its numerical composition."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.comparison import Comparison
from lightning_lap2.accounting.routes.domination import Domination
from lightning_lap2.accounting.routes.pairs import dominating_pair, gdp_delta, gdp_epsilon, laplace_gdp


def route(m: float, rate: float, steps: int, n: float = 1, mechanism: str = "laplace") -> Domination:
    return Domination(Composition.of(mechanism, "tight", [(Release(m, rate, n), steps)]))


def laplace_delta(x: float, eps: float) -> float:
    """Hockey-stick divergence of Lap(x, 1) from Lap(0, 1), eps of either sign."""
    if eps >= x:
        return 0.0
    return 1.0 - math.exp(eps) if eps <= -x else 1.0 - math.exp(0.5 * (eps - x))


@pytest.mark.parametrize("x", [1e-300, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 1.0, 5.0, 40.0, 9e3])
def test_smallest_mu_is_met_from_above(x: float) -> None:
    with mpmath.workdps(350):  # solve sf(y) = exp(-x/2) / 2 from a start on the safe side
        target = mpmath.mpf(x) / 2
        y = min(mpmath.sqrt(mpmath.pi / 8) * x, mpmath.sqrt(mpmath.mpf(x)))
        for _ in range(12):
            sf = mpmath.erfc(y / mpmath.sqrt(2)) / 2
            y -= (-mpmath.log(2 * sf) - target) * sf / mpmath.npdf(y)
        exact = float(2 * y)
    assert exact <= laplace_gdp(x) * (1.0 + 1e-15)
    assert laplace_gdp(x) <= exact * (1.0 + 1e-9)
    assert laplace_gdp(x) <= math.sqrt(math.pi / 2.0) * x * (1.0 + 2e-12)


def test_gaussian_pair_dominates_one_coordinate_at_every_epsilon() -> None:
    for x in [1e-3, 0.1, 1.0, 6.0]:
        mu = laplace_gdp(x)
        for eps in np.linspace(0.0, 1.5 * x, 200):
            assert laplace_delta(x, eps) <= gdp_delta(mu, eps) + 1e-15


def test_even_spread_is_the_worst_and_is_bounded_for_every_dimension() -> None:
    for rho in [0.01, 1.0, 8.0]:
        mus = [dominating_pair(Release(1.0 / rho, 0.1, n), "laplace").parameter for n in [1, 2, 10, 10**6, 10**12]]
        assert (np.diff(mus) > -1e-12 * rho).all()
        limit = math.sqrt(math.pi / 2.0) * rho
        assert mus[0] == pytest.approx(laplace_gdp(rho), rel=1e-12)
        assert mus[-1] == pytest.approx(limit, rel=1e-5)
        assert max(mus) <= limit * (1.0 + 1e-11)
        uneven = math.hypot(laplace_gdp(0.6 * rho), laplace_gdp(0.8 * rho))
        assert uneven <= dominating_pair(Release(1.0 / rho, 0.1, 2), "laplace").parameter


def test_blocks_add_in_squares() -> None:
    joined = dominating_pair(Release(1.0, 0.1, 100, ((10, 2.0),)), "laplace").parameter
    parts = [dominating_pair(Release(m, 0.1, n), "laplace").parameter for n, m in [(100, 1.0), (10, 2.0)]]
    assert joined == pytest.approx(math.hypot(*parts), rel=1e-14)


def test_two_laplace_coordinates_are_dominated_by_one_with_the_summed_shift() -> None:
    """l1 clipping: the worst gradient has one coordinate, at every epsilon of both signs."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    for x1, x2 in itertools.product([0.1, 1.0, 3.0], repeat=2):
        z = 0.5 * x2 * (nodes + 1.0)  # loss of the second coordinate under mu1: atoms at +-x2, a density between
        loss = np.concatenate([[x2], x2 - 2.0 * z, [-x2]])
        mass = np.concatenate([[0.5], 0.25 * x2 * weights * np.exp(-z), [0.5 * math.exp(-x2)]])
        for eps in np.linspace(-x1 - x2, x1 + x2, 41):
            product = sum(m * laplace_delta(x1, eps - v) for m, v in zip(mass, loss, strict=True))
            assert product <= laplace_delta(x1 + x2, eps) + 1e-4  # quadrature across kinks


@pytest.mark.parametrize(
    ("n", "q", "steps", "rho", "orders", "domination", "comparison", "tight"),
    [
        (26_010, 0.0043, 100, 0.5, 0.173, 0.1045, 0.0785, 0.0785),
        (10**6, 0.001, 1000, 1.0, 0.678, 0.307, 0.1575, 0.1575),
        (26_010, 0.0043, 5860, 0.5, 0.700, 0.855, 0.658, 0.658),
        (26_010, 0.0043, 5860, 3.0, 786.0, 145.8, 66.7, 64.95),  # domination 148 by the looser mu <= sqrt(pi / 2) rho
    ],
)
def test_table_of_the_routes(
    n: int, q: float, steps: int, rho: float, orders: float, domination: float, comparison: float, tight: float
) -> None:
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.0 / rho, sample_rate=q, dimension=n, steps=steps)
    assert accountant.epsilon(delta=1e-5, orders_only=True) == pytest.approx(orders, rel=3e-3)
    assert max(route(1.0 / rho, q, steps, n).epsilon(1e-5)) == pytest.approx(domination, rel=2e-3)
    assert max(Comparison(accountant.composition).epsilon(1e-5)) == pytest.approx(comparison, rel=2e-3)
    assert accountant.epsilon(delta=1e-5) == pytest.approx(tight, rel=2e-3)


def test_never_below_the_exact_laplace_distribution_in_one_dimension() -> None:
    """dp-accounting's optimistic rounding is a lower bound on the truth."""
    for m, q, steps in itertools.product([0.5, 2.0], [0.01, 0.3], [1, 100]):
        build = {"value_discretization_interval": q / 20.0, "sampling_prob": q, "use_connect_dots": False}
        low = pld.from_laplace_mechanism(m, pessimistic_estimate=False, **build).self_compose(steps)
        high = pld.from_laplace_mechanism(m, value_discretization_interval=q / 500.0, sampling_prob=q)
        high = high.self_compose(steps)
        for mechanism in ("laplace", "laplace_l1"):
            accountant = MajorizedAccountant(mechanism=mechanism)
            accountant.step(noise_multiplier=m, sample_rate=q, dimension=1, steps=steps)
            for delta in (1e-7, 1e-3):
                ours = accountant.epsilon(delta=delta)
                assert ours >= low.get_epsilon_for_delta(delta)
                if mechanism == "laplace":
                    assert ours >= high.get_epsilon_for_delta(delta) * (1.0 - 1e-3) - q / 500.0
                else:
                    assert ours == pytest.approx(high.get_epsilon_for_delta(delta), rel=2e-3, abs=q / 250.0)


def test_never_below_the_even_spread_in_two_dimensions() -> None:
    """Compose the exact loss of g = (C, C) / sqrt 2 (rounded down, so a lower bound on the truth)."""
    q, m, steps, width = 0.05, 1.0, 20, 2e-3
    x = 1.0 / (m * math.sqrt(2.0))
    nodes, weights = np.polynomial.legendre.leggauss(400)
    z = 0.5 * x * (nodes + 1.0)
    loss = np.concatenate([[-x], 2.0 * z - x, [x]])
    mass = np.concatenate([[0.5], 0.25 * x * weights * np.exp(-z), [0.5 * math.exp(-x)]])
    pair_loss = np.add.outer(loss, loss).ravel()
    sampled = np.log1p(q * np.expm1(pair_loss))
    upper = np.outer(mass, mass).ravel() * np.exp(sampled)  # under the mixture
    upper /= upper.sum()
    index = np.floor(sampled / width).astype(int)
    pmf = np.bincount(index - index.min(), weights=upper)
    total = np.array([1.0])
    for _ in range(steps):
        total = np.convolve(total, pmf)
    losses = (np.arange(total.size) + steps * index.min()) * width
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=m, sample_rate=q, dimension=2, steps=steps)
    for eps in [0.1, 0.3, 0.6, 1.0]:
        truth = (total * -np.expm1(np.minimum(eps - losses, 0.0))).sum()
        assert accountant.delta(eps=eps) >= truth


def test_gaussian_mechanism_is_the_distribution_of_dp_accounting() -> None:
    accountant = MajorizedAccountant(mechanism="gaussian")
    accountant.step(noise_multiplier=1.1, sample_rate=0.01, dimension=10, steps=500)
    build = {"value_discretization_interval": 2e-4, "sampling_prob": 0.01}
    exact = pld.from_gaussian_mechanism(1.1, **build).self_compose(500).get_epsilon_for_delta(1e-6)
    assert accountant.epsilon(delta=1e-6) == pytest.approx(exact, rel=1e-3)


def test_without_sampling_the_gaussian_is_exact() -> None:
    for mu, eps in itertools.product([1e-3, 0.3, 2.0, 9.0], [0.0, 0.1, 1.0, 30.0]):
        with mpmath.workdps(50):
            first = mpmath.ncdf(mpmath.mpf(mu) / 2 - mpmath.mpf(eps) / mpmath.mpf(mu))
            second = mpmath.exp(eps) * mpmath.ncdf(-mpmath.mpf(mu) / 2 - mpmath.mpf(eps) / mpmath.mpf(mu))
            exact = float(first - second)
        assert exact <= gdp_delta(mu, eps) <= exact * (1.0 + 1e-4) + 1e-300
        if 1e-200 < exact < 1.0:
            assert gdp_epsilon(mu, exact) == pytest.approx(eps, rel=1e-6, abs=1e-9)
    accountant = MajorizedAccountant(mechanism="gaussian")
    accountant.step(noise_multiplier=4.0, sample_rate=1.0, dimension=10, steps=16)
    assert accountant.epsilon(delta=1e-5) == pytest.approx(gdp_epsilon(1.0, 1e-5), rel=1e-9)


def test_refusals() -> None:
    assert not route(1.0 / 100.0, 0.1, 1).usable(1e-5) or laplace_gdp(100.0) < 24.0
    assert not route(1e-3, 0.1, 1, mechanism="gaussian").usable(1e-5)
    assert route(1e-3, 1.0, 1, mechanism="gaussian").usable(1e-5)  # in closed form
    assert not route(1.0, 0.1, 10**9).usable(1e-5)
    assert not route(1.0, 0.1, 1).usable(0.0)


def test_many_small_steps_meet_the_central_limit() -> None:
    rate, mu, steps = 1e-3, 2e-3, 3 * 10**6 + 17
    limit = gdp_epsilon(math.sqrt(steps * rate**2 * math.expm1(mu**2)), 1e-5)
    assert max(route(1.0 / mu, rate, steps, mechanism="gaussian").epsilon(1e-5)) == pytest.approx(limit, rel=2e-2)


def test_rates_at_the_edge_of_a_float() -> None:
    for rate in [5e-324, 1e-200, 1e-13, 1.0 - 2**-53, 1.0 - 1e-8]:
        bounds = route(0.8, rate, 3, 100)
        assert all(0.0 <= value <= 1.0 for value in bounds.delta(0.01))
        assert all(value >= 0.0 for value in bounds.epsilon(1e-6))


def test_even_spread_is_not_the_worst_for_total_variation() -> None:
    """Why the loss distribution of the even spread alone is no accountant: n = 2, rho = 1/2, delta at epsilon 0."""
    x = 0.5 / math.sqrt(2.0)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    z = 0.5 * x * (nodes + 1.0)
    loss = np.concatenate([[x], x - 2.0 * z, [-x]])
    mass = np.concatenate([[0.5], 0.25 * x * weights * np.exp(-z), [0.5 * math.exp(-x)]])
    even = sum(m * laplace_delta(x, -v) for m, v in zip(mass, loss, strict=True))
    assert laplace_delta(0.5, 0.0) == pytest.approx(0.221, abs=5e-4)
    assert even == pytest.approx(0.174, abs=1e-3)
