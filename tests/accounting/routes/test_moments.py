"""The moments against independent oracles: mpmath, quadrature of the joint ratio, dp-accounting."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from dp_accounting.rdp import RdpAccountant

from lightning_lap2.accounting import UnsoundBoundWarning, log_moments
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.kernel import exp_remainder, log_kernel, majorant_nodes
from lightning_lap2.accounting.routes.moments import even_spread_table, level_log_moments, majorant_table

ORDERS = [2, 3, 5, 8, 20, 64]


def exact_log_kernel(x: float, k: float) -> mpmath.mpf:
    """log F(x, k) from the definition, 60 digits: the integral of p(z - x)^k p(z)^(1 - k) in closed form."""
    with mpmath.workdps(60):
        x, k = mpmath.mpf(x), mpmath.mpf(k)
        return mpmath.log((k * mpmath.exp((k - 1) * x) + (k - 1) * mpmath.exp(-k * x)) / (2 * k - 1))


def exact_log_moment(tables: list[mpmath.mpf], q: float, k: int) -> float:
    """log sum_j C(k, j) (1-q)^(k-j) q^j exp(S_j), 60 digits."""
    with mpmath.workdps(60):
        q = mpmath.mpf(q)
        terms = (mpmath.binomial(k, j) * (1 - q) ** (k - j) * q**j * mpmath.exp(tables[j]) for j in range(k + 1))
        return float(mpmath.log(mpmath.fsum(terms)))


def quadrature_log_moment(shifts: list[float], q: float, k: int) -> float:
    """log E_mu0[(1 - q + q mu1/mu0)^k] by integrating the joint ratio itself.

    log mu1/mu0 is a sum of independent pieces, each an atom at +-x and a density in between; the integral runs over
    the noise, with Gauss-Legendre pieces between the kinks at 0 and x.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    losses, masses = [], []
    for x in shifts:
        z = 0.5 * x * (nodes + 1.0)
        losses.append(np.concatenate([[-x], 2.0 * z - x, [x]]))
        masses.append(np.concatenate([[0.5], 0.5 * x * weights * 0.5 * np.exp(-z), [0.5 * math.exp(-x)]]))
    total = 0.0
    for parts in itertools.product(*(range(len(m)) for m in masses[:-1])):
        loss = sum(losses[i][j] for i, j in enumerate(parts)) + losses[-1]
        mass = math.prod(masses[i][j] for i, j in enumerate(parts)) * masses[-1]
        total += float((mass * (1.0 - q + q * np.exp(loss)) ** k).sum())
    return math.log(total)


@pytest.mark.parametrize("k", [1.0, 1.001, 1.5, 2.0, 7.0, 399.0, 65536.0])
@pytest.mark.parametrize("x", [0.0, 1e-160, 1e-12, 1e-6, 1e-3, 0.0099, 0.0101, 0.3, 1.0, 3.0, 100.0])
def test_kernel_has_full_precision(x: float, k: float) -> None:
    assert float(log_kernel(x, k)) == pytest.approx(float(exact_log_kernel(x, k)), rel=2e-14, abs=1e-300)


def test_remainder_of_the_exponential() -> None:
    for y in [-50.0, -0.3, -0.01, -1e-9, 0.0, 1e-9, 0.01, 0.2999, 0.3001, 1.0]:
        with mpmath.workdps(60):
            exact = float(mpmath.expm1(mpmath.mpf(y)) - mpmath.mpf(y))
        assert float(exp_remainder(np.float64(y))) == pytest.approx(exact, rel=4e-15)


@pytest.mark.parametrize("q", [1e-9, 0.0043, 0.3, 1.0 - 1e-9])
@pytest.mark.parametrize(("n", "m"), [(1, 0.5), (3, 40.0), (10**6, 1.1), (10**12, 3.0), (10**12, 1e4)])
def test_tight_against_sixty_digits(n: int, m: float, q: float) -> None:
    with mpmath.workdps(60):
        shift = 1 / (mpmath.mpf(m) * mpmath.sqrt(n))
        table = [mpmath.mpf(0), mpmath.mpf(0)] + [n * exact_log_kernel(shift, j) for j in range(2, max(ORDERS) + 1)]
    got = log_moments(m, q, n, ORDERS)
    exact = [exact_log_moment(table, q, k) for k in ORDERS]
    np.testing.assert_allclose(got, exact, rtol=2e-12)


@pytest.mark.parametrize("q", [0.01, 0.5])
@pytest.mark.parametrize("n", [2, 3])
def test_tight_is_the_joint_ratio_integrated(n: int, q: float) -> None:
    for m, k in itertools.product([0.4, 1.0, 3.0], [2, 3, 7]):
        even = [1.0 / (m * math.sqrt(n))] * n
        bound = log_moments(m, q, n, [k])[0]
        assert bound == pytest.approx(quadrature_log_moment(even, q, k), rel=1e-9)
        for split in ([0.6, 0.8, 0.0], [1.0, 0.0, 0.0], [0.9, 0.3, 0.3]):  # no other gradient is worse
            norm = math.hypot(*split[:n])
            other = [s / (norm * m) for s in split[:n]]
            assert quadrature_log_moment(other, q, k) <= bound * (1.0 + 1e-10)


def test_reverse_direction_is_never_larger() -> None:
    nodes, weights = np.polynomial.legendre.leggauss(60)
    for x, q, a in itertools.product([0.2, 1.0, 4.0], [0.01, 0.5, 0.99], [1.5, 2.0, 9.0]):
        z = 0.5 * x * (nodes + 1.0)
        loss = np.concatenate([[-x], 2.0 * z - x, [x]])
        mass = np.concatenate([[0.5], 0.25 * x * weights * np.exp(-z), [0.5 * math.exp(-x)]])
        mixture = 1.0 - q + q * np.exp(loss)
        assert (mass * mixture ** (1.0 - a)).sum() <= (mass * mixture**a).sum() * (1.0 + 1e-12)


def test_published_bound_is_refuted_in_two_dimensions() -> None:
    """n = 2, m = 1, q = .01, k = 2, g = (C, C) / sqrt 2: the printed value is below the truth."""
    truth = quadrature_log_moment([math.sqrt(0.5)] * 2, 0.01, 2)
    with pytest.warns(UnsoundBoundWarning, match="not a valid bound"):
        printed = log_moments(1.0, 0.01, 2, [2], bound="published")[0]
    assert truth == pytest.approx(1.05376e-4, rel=1e-5)
    assert printed == pytest.approx(1.01163e-4, rel=1e-5)
    assert printed < truth <= log_moments(1.0, 0.01, 2, [2])[0] * (1.0 + 1e-9)


@pytest.mark.parametrize("mechanism", ["laplace", "laplace_l1"])
def test_one_coordinate_is_the_laplace_of_dp_accounting(mechanism: str) -> None:
    orders = [1.5, 2.0, 3.7, 8.0, 64.0]
    for m in [0.1, 1.0, 7.0]:
        accountant = RdpAccountant(orders)
        accountant.compose(LaplaceDpEvent(m))
        ours = log_moments(m, 1.0, 1, orders, mechanism=mechanism) / (np.asarray(orders) - 1.0)
        np.testing.assert_allclose(ours, accountant._rdp, rtol=1e-11)


def test_gaussian_is_the_gaussian_of_dp_accounting() -> None:
    from dp_accounting import PoissonSampledDpEvent

    orders = [2, 3, 17, 64]
    accountant = RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.3)))
    ours = log_moments(1.3, 0.01, 5, orders, mechanism="gaussian") / (np.asarray(orders) - 1.0)
    np.testing.assert_allclose(ours, accountant._rdp, rtol=1e-8)


def test_tight_is_below_joint_and_gaussian_and_approaches_it() -> None:
    for m, q in itertools.product([0.3, 1.0, 8.0], [1e-4, 0.05, 1.0]):
        gaussian = log_moments(m, q, 1, ORDERS, mechanism="gaussian")
        previous = np.zeros(len(ORDERS))
        for n in [1, 2, 10, 10**3, 10**6, 10**9, 10**12]:
            tight, joint = (log_moments(m, q, n, ORDERS, bound=b) for b in ("tight", "joint"))
            assert (tight <= joint * (1.0 + 1e-12)).all()
            assert (previous <= tight * (1.0 + 1e-12)).all()
            assert (tight <= gaussian * (1.0 + 1e-12)).all()
            previous = tight
        np.testing.assert_allclose(tight, gaussian, rtol=1e-2)
        np.testing.assert_allclose(log_moments(m, q, math.inf, ORDERS), gaussian, rtol=1e-12)


@pytest.mark.parametrize("bound", ["tight", "joint", "published"])
@pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")
def test_monotone_in_every_argument(bound: str) -> None:
    base = {"noise_multiplier": 1.0, "sample_rate": 0.02, "dimension": 500}
    up = {"noise_multiplier": [3.0, 1.0, 0.99, 0.1, 0.02], "sample_rate": [1e-6, 0.02, 0.0201, 0.9, 1.0]}
    if bound != "published":
        up["dimension"] = [1, 500, 501, 10**5, 10**12]
    for name, values in up.items():
        rows = np.array([log_moments(**{**base, name: v}, orders=ORDERS, bound=bound) for v in values])
        assert (np.diff(rows, axis=0) > 0.0).all(), name
        assert (np.diff(rows, axis=1) > 0.0).all(), "orders"


def test_majorant_sum_by_blocks_is_above_and_close() -> None:
    i = np.arange(1.0, 300_001.0)
    x = 1.0 / (np.sqrt(i) + np.sqrt(i - 1.0))
    nodes, weights = majorant_nodes(float(i.size))
    assert nodes.size < 1200
    for rho, k in itertools.product([0.01, 1.0, 30.0], [2.0, 9.0, 399.0]):
        exact = math.fsum(log_kernel(rho * x, k))
        assert 0.0 <= float(log_kernel(rho * nodes, k) @ weights) / exact - 1.0 < 1e-8


def test_high_joint_orders_are_interpolated_from_above() -> None:
    release = Release(30.0, 0.01, 1000)
    high = level_log_moments(release, "laplace", "joint", 2)
    j = np.arange(1.0, 4097.0)
    table = np.concatenate([[0.0], majorant_table(j, release.blocks)])
    from lightning_lap2.accounting.routes.moments import ORDER_LEVELS, subsampled_log_moments

    exact = subsampled_log_moments(ORDER_LEVELS[2], table, 0.01)
    assert (high >= exact * (1.0 - 1e-12)).all()
    np.testing.assert_allclose(high, exact, rtol=1e-2)


def test_blocks_add_under_one_coin() -> None:
    joined = Release(1.0, 0.1, 100, ((10, 2.0),))
    orders = np.array([2.0, 5.0])
    parts = even_spread_table(orders, ((100.0, 1.0),)) + even_spread_table(orders, ((10.0, 0.5),))
    np.testing.assert_allclose(even_spread_table(orders, joined.blocks), parts, rtol=1e-14)
    both = level_log_moments(joined, "laplace", "tight", 0)[1:]
    alone = [level_log_moments(r, "laplace", "tight", 0)[1:] for r in (Release(1.0, 0.1, 100), Release(2.0, 0.1, 10))]
    assert (both > alone[0] + alone[1]).all()  # one coin costs more than two


@pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")
@pytest.mark.parametrize("bound", ["tight", "joint", "published"])
def test_edges(bound: str) -> None:
    for free in [(math.inf, 0.1, 5), (1.0, 0.0, 5), (1.0, 0.1, 0), (0.0, 0.0, 5)]:
        assert log_moments(*free, orders=[2, 3], bound=bound).tolist() == [0.0, 0.0]
    assert log_moments(0.0, 0.1, 5, orders=[1, 2], bound=bound).tolist() == [0.0, math.inf]
    assert log_moments(1e-320, 1.0, 5, orders=[2], bound=bound).tolist() == [math.inf]
    for n in [1, 10**12]:
        tiny = log_moments(1e200, 1e-9, n, orders=[2, 399], bound=bound)
        assert (tiny > 0.0).all()
        assert (tiny < 1e-300).all()


def test_orders_in_any_sequence_and_real_without_sampling() -> None:
    forward = log_moments(1.0, 0.1, 10, [2, 3, 9])
    assert log_moments(1.0, 0.1, 10, [9, 2, 3, 2]).tolist() == [forward[2], forward[0], forward[1], forward[0]]
    real = log_moments(1.0, 1.0, 10, [2.0, 2.5, 3.0])
    assert real[0] < real[1] < 0.5 * (real[0] + real[2])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"noise_multiplier": -1.0}, ValueError, r"noise_multiplier must not be negative, got -1.0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier must be a number"),
        ({"noise_multiplier": True}, TypeError, "noise_multiplier must be a number"),
        ({"sample_rate": 1.5}, ValueError, r"sample_rate must lie in \[0, 1\], got 1.5"),
        ({"dimension": 2.5}, ValueError, "dimension must be a non-negative integer or inf"),
        ({"dimension": -1}, ValueError, "dimension must be a non-negative integer or inf"),
        ({"orders": [2.5]}, ValueError, "orders must hold an integer >= 1"),
        ({"orders": [0]}, ValueError, "orders must hold"),
        ({"orders": []}, ValueError, "orders must hold at least one"),
        ({"orders": ["2"]}, TypeError, "orders must hold"),
        ({"bound": "best"}, ValueError, "bound must be one of"),
        ({"bound": None}, TypeError, "bound must be one of"),
        ({"mechanism": "cauchy"}, ValueError, "mechanism must be one of"),
        ({"mechanism": "gaussian", "bound": "joint"}, ValueError, "where mechanism='gaussian', got 'joint'"),
        ({"mechanism": "laplace_l1", "bound": "published"}, ValueError, "where mechanism='laplace_l1'"),
    ],
)
def test_argument_errors(change: dict[str, object], error: type[Exception], words: str) -> None:
    good = {"noise_multiplier": 1.0, "sample_rate": 0.1, "dimension": 10, "orders": [2], "bound": "tight"}
    with pytest.raises(error, match=words):
        log_moments(**{**good, **change})  # type: ignore[arg-type]
