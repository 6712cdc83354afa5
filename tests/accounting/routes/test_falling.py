"""The fourth route: the constants of Lemma 5', the test functions of Theorem 7, and brute force below the bounds."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import ndtr

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.falling import (
    LEAST_CURVATURE,
    Falling,
    FallingFunction,
    curvature,
    falling_function,
)
from lightning_lap2.accounting.routes.pairs import laplace_gdp

Array = npt.NDArray[np.float64]


def route(steps: int, m: float, rate: float, n: float = 1) -> Falling:
    return Falling(Composition.of("laplace", "tight", [(Release(m, rate, n), steps)]))


# ---------------------------------------------------------------- Lemma 5': J(x, x, lambda) >= 0


def transform(x: float, lam: float) -> float:
    """J(x, x, lam), less a bound on what quadrature loses.

    The Laplace part is in closed form: the integral of cos(w t) e^{-t/2} (1 - e^{(t - x)/2}) up to min(x, T).
    The Gaussian part by the midpoint rule: its integrand has |f''| <= w^2 + w (1 + 0.8) + 0.25 + 0.8 + sup |delta_N''|,
    and |delta_N''| = |e^t (phi(t/x + x/2)/x - Phi(-t/x - x/2))| <= 0.4/x + 1.5, since e^t < 3 up to T.
    """
    w, nodes = math.sqrt(lam), 1000
    top = 0.5 * math.pi / w
    t = (np.arange(nodes) + 0.5) * top / nodes
    gaussian = ndtr(0.5 * x - t / x) - np.exp(t) * ndtr(-0.5 * x - t / x)
    first = float((np.cos(w * t) * np.exp(-0.5 * t)) @ gaussian) * top / nodes
    s = min(x, top)
    damped = (0.5 - math.exp(-0.5 * s) * (0.5 * math.cos(w * s) - w * math.sin(w * s))) / (lam + 0.25)
    second = damped - math.exp(-0.5 * x) * math.sin(w * s) / w
    bend = lam + 1.8 * w + 2.55 + 0.4 / x
    return first - second - bend * top**3 / (24.0 * nodes**2) - 1e-12


SERIES_UP_TO = 0.08


def test_the_constants_hold_on_the_whole_interval() -> None:
    """At fixed lambda |dJ/dx| <= 1 / (2 w): d delta_N / d mu is in [0, 0.4], d delta_L / dx in [0, 0.5], and the
    integral of the cosine is 1 / w. J falls with lambda, so a cell may be judged by the lambda of its left end; its
    width is what J there allows."""
    x, cells = SERIES_UP_TO, 0
    while x < 1.195:
        lam = max(LEAST_CURVATURE, 1.9 / x)
        value = transform(x, lam)
        assert value > 0.0, (x, lam, value)
        x += 0.95 * value * 2.0 * math.sqrt(lam)
        cells += 1
    assert cells < 20_000


def test_the_constants_hold_near_zero() -> None:
    """lambda = 1.9 / x, x <= SERIES_UP_TO, in interval arithmetic.

    cos >= 1 - lambda t^2 / 2 everywhere and cos <= that + lambda^2 t^4 / 24, W <= 0 only on (0, x), where
    |W| <= 2 delta_L <= x - t. With the moments of W from W'' - W/4 = nu, twice J is at least
    A - lambda M / 2 - lambda^2 x^6 / 720, A = 4 (B_L - B_N), M = 8 A + 4 (e^{-x/2} (x^2 + x^3/6) - x^2 e^{-x^2/8}).
    Divided by x^3, as power series with a bound on the rest.
    """
    terms = 16

    def coefficients() -> tuple[list[mpmath.mpf], list[mpmath.mpf]]:
        half = [mpmath.mpf(-1) ** k / (mpmath.factorial(k) * 2**k) for k in range(terms)]  # e^{-x/2}
        square = [mpmath.mpf(0)] * terms  # e^{-x^2/8}
        for k in range(0, terms, 2):
            square[k] = mpmath.mpf(-1) ** (k // 2) / (mpmath.factorial(k // 2) * 8 ** (k // 2))
        shifted = [mpmath.mpf(0), *half[:-1]]
        a = [4 * (h + s / 2 - g) for h, s, g in zip(half, shifted, square, strict=True)]
        second = [mpmath.mpf(0)] * terms
        for k in range(2, terms):
            second[k] = half[k - 2] + (half[k - 3] / 6 if k >= 3 else 0) - square[k - 2]
        return a, [8 * p + 4 * q for p, q in zip(a, second, strict=True)]

    a, m = coefficients()
    assert all(abs(c) < 1e-20 for c in a[:3]) and all(abs(c) < 1e-20 for c in m[:4])
    assert float(a[3]) == pytest.approx(1 / 6) and float(m[4]) == pytest.approx(1 / 6)
    iv = mpmath.iv
    cells = 200
    for i in range(cells):
        x = iv.mpf([mpmath.mpf(i) * SERIES_UP_TO / cells, mpmath.mpf(i + 1) * SERIES_UP_TO / cells])
        value = iv.mpf(0)
        for k in range(terms - 1, 2, -1):
            value = value * x + iv.mpf(a[k]) - iv.mpf("0.95") * iv.mpf(m[k + 1] if k + 1 < terms else 0)
        value -= iv.mpf("3.61") * x / 720
        value -= iv.mpf([-1, 1]) * iv.mpf("1e-12")  # the rest of the series, below x^13 times coefficients below 1
        assert value.a > 0, (i, value)


def test_beyond_the_interval_a_gaussian_of_the_same_parameter_dominates() -> None:
    shifts = np.linspace(1.195, 40.0, 400)
    assert all(laplace_gdp(float(x)) <= x for x in shifts)


def test_curvature_is_bounded_and_falls() -> None:
    found = [curvature(rho) for rho in (1e-9, 1e-3, 0.1, 0.5, 1.0, 10.0)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == LEAST_CURVATURE


# ---------------------------------------------------------------- the test functions


def h_of(lam: float) -> tuple[float, float, float, float]:
    w, b = math.sqrt(lam), 2.25 + lam
    top = (math.pi - math.atan(2.0 * w / (b - 3.0))) / w
    turn = math.exp(top)
    return w, b, turn, turn * (b - 2.0) / (b - 4.0)


@pytest.mark.parametrize("lam", [LEAST_CURVATURE, 12.0, 400.0])
def test_the_class_contains_the_test_functions(lam: float) -> None:
    """B h + 4 v h' + v^2 h'' >= 0 for 0 <= v <= r on both pieces, and no kink downwards."""
    w, b, turn, end = h_of(lam)
    power = b / (b - 4.0)
    share = np.linspace(0.0, 1.0, 101)[None, :]
    u = np.linspace(1e-9, math.log(turn), 400)[:, None]
    s, ds = np.sin(w * u), w * np.cos(w * u)  # h = r^{-3/2} s; times r^{3/2}: r h' and r^2 h''
    slope, bend = ds - 1.5 * s, -lam * s - 4.0 * ds + 3.75 * s
    assert (b * s + 4.0 * share * slope + share**2 * bend >= -1e-9).all()
    r = np.linspace(turn, end, 401)[:-1, None]
    left, v = end - r, share * r
    falling = b - 4.0 * power * v / left + power * (power - 1.0) * (v / left) ** 2
    assert (falling >= -1e-6).all()
    before = (w * math.cos(w * math.log(turn)) / math.sin(w * math.log(turn)) - 1.5) / turn
    assert before == pytest.approx(-power / (end - turn), rel=1e-9)


@pytest.mark.parametrize("lam", [LEAST_CURVATURE, 12.0, 400.0, 1e5])
def test_the_polygon_is_just_above_the_function(lam: float) -> None:
    w, b, turn, end = h_of(lam)
    power = b / (b - 4.0)
    f = falling_function(lam)
    with mpmath.workdps(40):
        height = mpmath.mpf(turn) ** mpmath.mpf(-1.5) * mpmath.sin(w * mpmath.log(turn))

        def h(r: mpmath.mpf) -> mpmath.mpf:
            if r < turn:
                return r ** mpmath.mpf(-1.5) * mpmath.sin(w * mpmath.log(r))
            return height * ((end - r) / (end - turn)) ** power

        for share in (0.1, 0.37, 0.8, 1.0, 1.3):
            r = 1 + share * (mpmath.mpf(end) - 1)
            pieces = sorted({mpmath.mpf(1), min(r, mpmath.mpf(turn)), min(r, mpmath.mpf(end))})
            exact = float(mpmath.quad(lambda t, r=r: h(t) * (r - t), pieces))
            polygon = float(f.weights @ np.maximum(float(r) - f.nodes, 0.0))
            assert exact * (1.0 - 1e-7) <= polygon <= exact * (1.0 + 2e-3) + 1e-3 * (f.nodes[1] - 1.0)
    r = np.linspace(1.0, 2.0 * end, 3000)
    polygon = np.maximum(r[:, None] - f.nodes, 0.0) @ f.weights
    for s, kappa in zip(f.slopes, f.zeros, strict=True):
        assert (polygon >= s * (r - kappa) * (1.0 - 1e-12) - 1e-12).all()
        assert kappa > 1.0
    assert (f.weights >= 0.0).all()


# ---------------------------------------------------------------- Theorem 7, by brute force

NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)


def laplace_ratio(x: float) -> tuple[Array, Array]:
    """Values and masses of the ratio of Lap(x, 1) over Lap(0, 1) under the second."""
    edges = np.linspace(0.0, x, 5)
    half = 0.5 * np.diff(edges)[:, None]
    z = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES).ravel()
    inner = (half * WEIGHTS).ravel() * 0.5 * np.exp(-z)
    return np.exp(np.concatenate([[-x], 2.0 * z - x, [x]])), np.concatenate([[0.5], inner, [0.5 * math.exp(-x)]])


def gaussian_ratio(mu: float) -> tuple[Array, Array]:
    z = np.linspace(-9.0, 9.0 + 3.0 * mu, 1500)
    mass = np.exp(-0.5 * z * z) * (z[1] - z[0]) / math.sqrt(2.0 * math.pi)
    return np.exp(mu * z - 0.5 * mu * mu), mass


def product(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    return np.outer(first[0], second[0]).ravel(), np.outer(first[1], second[1]).ravel()


def sampled(ratio: tuple[Array, Array], rate: float) -> tuple[Array, Array]:
    return 1.0 - rate + rate * ratio[0], ratio[1]


def mean_of(f: FallingFunction, scaled: Array, mass: Array) -> float:
    values = np.interp(scaled, f.nodes, np.maximum(f.nodes[:, None] - f.nodes, 0.0) @ f.weights)
    return float((values + np.maximum(scaled - f.nodes[-1], 0.0) * f.weights.sum()) @ mass)


def test_expectations_of_the_test_functions_are_ordered() -> None:
    """One step in one and two coordinates, and two steps: E F((R - c0) / sigma) <= E F((R' - c0) / sigma)."""
    rng = np.random.default_rng(7)
    for _ in range(100):
        x, y = np.exp(rng.uniform(math.log(0.05), math.log(4.0), 2))
        rate = 1.0 if rng.random() < 0.2 else float(np.exp(rng.uniform(math.log(1e-3), 0.0)))
        kind = rng.integers(3)
        if kind == 0:
            low, high, floor, shift = sampled(laplace_ratio(x), rate), sampled(gaussian_ratio(x), rate), 1.0 - rate, x
        elif kind == 1:
            low = sampled(product(laplace_ratio(x), laplace_ratio(y)), rate)
            high, floor, shift = sampled(gaussian_ratio(math.hypot(x, y)), rate), 1.0 - rate, max(x, y)
        else:
            low = product(sampled(laplace_ratio(x), rate), sampled(laplace_ratio(y), 0.3))
            high = product(sampled(gaussian_ratio(x), rate), sampled(gaussian_ratio(y), 0.3))
            floor, shift = (1.0 - rate) * 0.7, max(x, y)
        f = falling_function(curvature(shift))
        sigma = float(np.exp(rng.uniform(math.log(0.02 * rate), math.log(3.0))))

        means = [mean_of(f, (values - floor) / sigma, mass) for values, mass in (low, high)]
        assert means[0] <= means[1] * (1.0 + 3e-4) + 1e-9  # the polygon, and quadrature across kinks


def exact_delta(ratio: tuple[Array, Array], eps: float) -> tuple[float, float]:
    r, mass = ratio
    forward = float(mass @ np.maximum(r - math.exp(eps), 0.0))
    return forward, float(mass @ np.maximum(1.0 - math.exp(eps) * r, 0.0))


@pytest.mark.parametrize(
    ("m", "rate"), [(0.38, 1e-3), (0.8, 0.1), (2.0, 0.5), (1.0, 1.0), (0.25, 0.3), (1.5, 0.9), (0.5, 0.6)]
)
def test_never_below_one_coordinate_in_either_direction(m: float, rate: float) -> None:
    """One and two steps of g = (C, 0, ...) by quadrature; every dimension is bounded by the same number."""
    one = sampled(laplace_ratio(1.0 / m), rate)
    for steps, ratio in [(1, one), (2, product(one, one))]:
        for eps in [0.01, 0.1, 0.5, 1.5, 3.0]:
            truth = exact_delta(ratio, eps)
            bound = route(steps, m, rate).delta(eps)
            for exact, found in zip(truth, bound, strict=True):
                assert found >= exact - 2e-5 * rate  # quadrature across the kink
            accountant = MajorizedAccountant()
            accountant.step(noise_multiplier=m, sample_rate=rate, dimension=1000, steps=steps)
            assert accountant.delta(eps=eps) >= max(truth) - 2e-5 * rate


def test_never_below_the_even_spread() -> None:
    """g = C (1, ..., 1) / 2 in four coordinates: products of ratios, the two directions apart."""
    for m, rate in [(0.5, 0.01), (1.0, 0.3)]:
        pair = product(laplace_ratio(0.5 / m), laplace_ratio(0.5 / m))
        order = np.argsort(pair[0])
        groups = np.array_split(order, 400)  # merging outputs lowers every divergence
        r = np.array([float(pair[0][g] @ pair[1][g] / pair[1][g].sum()) for g in groups])
        merged_pair = (r, np.array([float(pair[1][g].sum()) for g in groups]))
        ratio = sampled(product(merged_pair, merged_pair), rate)
        for eps in [0.02, 0.2, 1.0, 2.0]:
            for exact, found in zip(exact_delta(ratio, eps), route(1, m, rate, 4).delta(eps), strict=True):
                assert found >= exact - 1e-5 * rate


@pytest.mark.parametrize(
    ("q", "steps", "m", "eps"),
    [
        (1e-4, 10, 0.38, 0.5958),
        (1e-4, 1000, 0.48, 0.8495),
        (1e-3, 10, 0.53, 0.8288),
        (1e-3, 1000, 0.66, 0.9376),
        (1e-4, 10**5, 0.57, 0.9690),
        (1e-2, 10, 0.8, 0.9743),
        (1e-2, 1000, 0.6, 7.577),
        (1.0, 1000, 120.0, 0.9947),
    ],
)
def test_values_of_an_independent_computation(q: float, steps: int, m: float, eps: float) -> None:
    assert MajorizedAccountant().epsilon(delta=1e-5) == 0.0
    found = route(steps, m, q, 26_010).epsilon(1e-5)
    assert found.forward == pytest.approx(eps, rel=2e-3)


def test_nearly_unsampled_steps_are_not_credited_with_the_floor_of_sampled_ones() -> None:
    """Taken as unsampled, a step's ratio has no positive lower bound: its reflection must not use c0 = (1 - q)^T."""
    for rate in (0.5, 0.9, 0.999, 1.0 - 1e-10):
        sampled_bound, whole = route(3, 0.8, rate).epsilon(1e-6), route(3, 0.8, 1.0).epsilon(1e-6)
        assert sampled_bound.forward <= whole.forward
        assert sampled_bound.reverse <= whole.reverse * (1.0 + 1e-9)
    assert route(3, 0.8, 1.0 - 1e-10).epsilon(1e-6).reverse == pytest.approx(whole.reverse, rel=1e-9)


def test_reverse_is_zero_where_no_ratio_is_that_small() -> None:
    bound = route(10, 0.5, 1e-4)
    assert bound.delta(1.01e-3).reverse == 0.0 < bound.delta(0.9e-3).reverse
    for steps, m, q in itertools.product([1, 50], [0.4, 1.5], [1.0]):
        both = route(steps, m, q).epsilon(1e-5)
        assert both.forward == both.reverse
