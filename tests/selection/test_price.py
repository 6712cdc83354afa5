"""The price of a search: against exact enumeration of discrete mechanisms, dp-accounting and scipy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_lap2.accounting import MajorizedAccountant, NoFiniteNoiseError, Release, calibrate_noise_multiplier
from lightning_lap2.accounting.selection import (
    RunCount,
    RunLimit,
    plan_search,
    search_epsilon,
    total_variation,
)

Array = npt.NDArray[np.float64]
COUNTS = [
    RunCount(3.0, shape=0.0),
    RunCount(10.0, shape=0.0),
    RunCount(4.0, shape=1.0),
    RunCount(10.0, shape=2.5),
    RunCount(5.0, shape=-0.5),
    RunCount(1.0),
    RunCount(1.0 + 1e-12, shape=1.0),
    RunCount(0.5, "poisson"),
    RunCount(3.0, "poisson"),
    RunCount(12.0, "poisson"),
]
named = pytest.mark.parametrize("runs", COUNTS, ids=lambda runs: f"{runs.name}-{runs.mean:g}")


def law(runs: RunCount) -> Array:
    """P[K = k], k = 0, 1, ..., from scipy's distributions or from the definition."""
    k = np.arange(20_000)
    if runs.distribution == "poisson":
        return stats.poisson.pmf(k, runs.mean)
    if runs.mean <= 1.0 + 1e-12:
        return (k == 1).astype(float)
    if runs.shape == 0.0:
        return np.where(k > 0, stats.logser.pmf(k, 1.0 - runs.gamma), 0.0)
    if runs.shape > 0.0:
        whole = stats.nbinom.pmf(k, runs.shape, runs.gamma)
        return np.where(k > 0, whole / (1.0 - whole[0]), 0.0)
    ratio = np.cumprod([(1.0 - runs.gamma) * (j + runs.shape) / (j + 1.0) for j in range(1, k.size - 1)])
    unscaled = np.concatenate([[0.0, 1.0], ratio])
    return unscaled / unscaled.sum()


def best_of(runs: RunCount, mechanism: Array) -> Array:
    """Law of the best of K runs by brute force; the last entry is that no run was drawn."""
    chances = law(runs)
    below, up_to = np.concatenate([[0.0], np.cumsum(mechanism)[:-1]]), np.minimum(np.cumsum(mechanism), 1.0)
    k = np.arange(chances.size)
    best = [float(chances @ (top**k - low**k)) for low, top in zip(below, up_to, strict=True)]
    return np.array([*best, chances[0]])


def delta(p: Array, q: Array, eps: float) -> float:
    """The smallest delta with which the two laws are (eps, delta)-close, both ways."""
    factor = math.exp(eps)
    return max(float(np.maximum(p - factor * q, 0.0).sum()), float(np.maximum(q - factor * p, 0.0).sum()))


def divergence(p: Array, q: Array, order: float) -> float:
    there, back = ((x**order * y ** (1.0 - order)).sum() for x, y in ((p, q), (q, p)))
    return math.log(max(there, back)) / (order - 1.0)


def epsilon(p: Array, q: Array, target: float) -> float:
    """The smallest eps with delta(eps) <= target, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta(p, q, middle) <= target else (middle, high)
    return high


def pair(seed: int, outcomes: int = 7, spread: float = 0.5) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(outcomes))
    q = p * np.exp(spread * rng.standard_normal(outcomes))
    return p, q / q.sum()


def spread_point(p: Array, q: Array, runs: RunCount) -> tuple[float, float]:
    """The least eps_1 whose delta is small enough, by a scan."""
    for eps in np.linspace(1e-3, 5.0, 5000):
        if delta(p, q, eps) <= runs.admitted_delta(eps):
            return float(eps), delta(p, q, eps)
    raise AssertionError


ORDERS = [1.5, 2.0, 4.0, 8.0, 20.0]


def facts(p: Array, q: Array, runs: RunCount, target: float) -> dict[str, RunLimit]:
    """Exact statements about one run, for each theorem by itself."""
    each = target / runs.mean
    main = (epsilon(p, q, each), each)
    divergences = tuple((order, divergence(p, q, order)) for order in ORDERS)
    reach = tuple((-math.log1p(-1.0 / order), delta(p, q, -math.log1p(-1.0 / order))) for order in ORDERS)
    if runs.distribution == "poisson":
        variation = (0.01, delta(p, q, 0.01))
        return {"profile": RunLimit((main, variation)), "theorem 6": RunLimit(reach, divergences)}
    point = spread_point(p, q, runs)
    return {
        "profile": RunLimit((main, point)),
        "mixed": RunLimit((point,), divergences),
        "theorem 2": RunLimit((), divergences),
    }


@named
def test_no_price_is_below_the_exact_one(runs: RunCount) -> None:
    """Each theorem by itself, on laws whose best of K is enumerated."""
    for seed in range(6):
        p, q = pair(seed, spread=(0.1, 0.5, 1.5)[seed % 3])
        best_p, best_q = best_of(runs, p), best_of(runs, q)
        for target in (1e-6, 1e-3, 0.05):
            for name, limit in facts(p, q, runs, target).items():
                price = limit.search_epsilon(runs, target)
                assert delta(best_p, best_q, price) <= target * (1.0 + 1e-9) + 1e-13, (name, seed, target)


@pytest.mark.parametrize("runs", [RunCount(10.0), RunCount(10.0, shape=1.0), RunCount(10.0, "poisson")])
def test_the_price_is_needed_and_not_far_off(runs: RunCount) -> None:
    """A score just below the best ones, likelier where those are rarer: one run's epsilon does not pay for it."""
    factor = math.exp(0.5)
    p, q = (np.array([1.0 - sum(high), *high]) for high in ((0.01 * factor, 0.05), (0.01, 0.05 * factor)))
    exact = epsilon(best_of(runs, p), best_of(runs, q), 1e-4)
    single = epsilon(p, q, 1e-4)
    price = facts(p, q, runs, 1e-4)["profile"].search_epsilon(runs, 1e-4)
    assert 1.2 * single < exact <= price <= 2.0 * exact


def test_ties_cost_nothing_more() -> None:
    """Equal scores: the first run with the best score. Outputs (score, private bit), enumerated for K <= 3."""
    weights = {1: 0.5, 2: 0.3, 3: 0.2}  # any law of K
    p = {(0, 0): 0.2, (0, 1): 0.3, (1, 0): 0.1, (1, 1): 0.4}

    def first_best(k: int) -> dict[tuple[int, int], float]:
        found = dict.fromkeys(p, 0.0)
        for index in np.ndindex(*(4,) * k):
            outputs = [list(p)[i] for i in index]
            winner = next(o for o in outputs if o[0] == max(score for score, _ in outputs))
            found[winner] += math.prod(p[o] for o in outputs)
        return found

    for output, chance in p.items():
        best = sum(weight * first_best(k)[output] for k, weight in weights.items())
        below = sum(c for (score, _), c in p.items() if score < output[0])
        level = sum(c for (score, _), c in p.items() if score == output[0])
        # Lemma 1: density E_u[f'(F(y-) + u F{y})] against one run, whatever is tied
        density = sum(weight * ((below + level) ** k - below**k) / level for k, weight in weights.items())
        assert best == pytest.approx(chance * density, rel=1e-12)


def test_a_mixture_of_configurations_keeps_the_limit_of_its_parts() -> None:
    """Two mechanisms that keep one limit at different points; the configuration is part of the output."""
    runs, target = RunCount(6.0), 1e-3
    (p1, q1), (p2, q2) = pair(1, spread=0.3), pair(2, spread=0.6)
    each = target / runs.mean
    main = max(epsilon(p1, q1, each), epsilon(p2, q2, each))
    first = max(spread_point(p1, q1, runs)[0], spread_point(p2, q2, runs)[0])
    price = RunLimit(((main, each), (first, runs.admitted_delta(first)))).search_epsilon(runs, target)
    order = np.random.default_rng(0).permutation(14)  # scores of both interleave
    p, q = (np.concatenate([0.3 * a, 0.7 * b])[order] for a, b in ((p1, p2), (q1, q2)))
    assert delta(best_of(runs, p), best_of(runs, q), price) <= target


# -- against dp-accounting ----------------------------------------------------------------------------------------

GAUSSIAN_ORDERS = [1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 512.0]


def gaussian(sigma: float) -> tuple[tuple[float, float], ...]:
    return tuple((order, order / (2.0 * sigma**2)) for order in GAUSSIAN_ORDERS)


def theirs(sigma: float, mean: float, shape: float, target: float) -> float:
    accountant = RdpAccountant(orders=GAUSSIAN_ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(GaussianDpEvent(sigma), mean, shape))
    return float(accountant.get_epsilon(target))


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 100.0])
def test_theorem_2_is_that_of_dp_accounting(shape: float, mean: float) -> None:
    for sigma in (0.7, 2.0, 8.0):
        runs = RunCount(mean, shape=shape)
        ours = RunLimit((), gaussian(sigma)).search_epsilon(runs, 1e-5)
        assert ours == pytest.approx(theirs(sigma, mean, shape, 1e-5), rel=1e-7)


@pytest.mark.parametrize("mean", [1.5, 10.0, 100.0])
def test_theorem_6_is_that_of_dp_accounting_and_no_run(mean: float) -> None:
    """dp-accounting leaves out the event that no run is drawn, of probability e^-mean, which ours adds."""
    for sigma in (0.7, 2.0, 8.0):
        divergences = gaussian(sigma)
        orders, values = (list(column) for column in zip(*divergences, strict=True))
        reached = [-math.log1p(-1.0 / order) for order in orders]
        points = [(eps, rdp_privacy_accountant.compute_delta(orders, values, eps)[0]) for eps in reached]
        runs = RunCount(mean, "poisson")
        ours = min(
            RunLimit((point,), (found,)).search_epsilon(runs, 1e-5)
            for point, found in zip(points, divergences, strict=True)
        )
        assert theirs(sigma, mean, math.inf, 1e-5) * (1.0 - 1e-9) <= ours
        added = math.log1p(math.exp(-mean) / mean) / (orders[0] - 1.0)
        assert ours <= theirs(sigma, mean, math.inf, 1e-5) + added


@pytest.mark.parametrize(("mean", "shape"), [(3.0, 0.0), (10.0, 1.0), (10.0, math.inf), (50.0, 0.0)])
def test_a_gaussian_search_costs_no_more_than_dp_accounting_says(mean: float, shape: float) -> None:
    runs = RunCount(mean, "poisson") if math.isinf(shape) else RunCount(mean, shape=shape)
    accountant = MajorizedAccountant(mechanism="gaussian")
    accountant.step(noise_multiplier=2.0, sample_rate=1.0, dimension=10)
    ours, rival = search_epsilon(accountant, runs, delta=1e-5), theirs(2.0, mean, shape, 1e-5)
    assert accountant.epsilon(delta=1e-5) < ours < 0.95 * rival


# -- the number of runs -------------------------------------------------------------------------------------------


@named
def test_the_law_of_the_number_of_runs(runs: RunCount) -> None:
    chances = law(runs)
    k = np.arange(chances.size)
    assert chances.sum() == pytest.approx(1.0, abs=1e-9)
    assert float(chances @ k) == pytest.approx(runs.mean, rel=1e-6)
    reached = np.cumsum(chances)
    for uniform in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-7):
        assert runs.draw(uniform) == int(np.searchsorted(reached, uniform, side="right"))
    for share in (0.0, 0.1, 0.5, 1.0):
        assert runs.chance_of(share) == pytest.approx(1.0 - float(chances @ (1.0 - share) ** k), abs=1e-9)
    assert math.exp(runs.log_none) == pytest.approx(chances[0])


def test_the_largest_uniform_ends() -> None:
    for runs in COUNTS:
        assert runs.draw(1.0 - 2.0**-53) < 10_000


@settings(max_examples=200, deadline=None)
@given(mean=st.floats(1.001, 1e5), shape=st.sampled_from([-0.5, 0.0, 0.3, 1.0, 7.0]))
def test_gamma_has_the_mean(mean: float, shape: float) -> None:
    gamma = RunCount(mean, shape=shape).gamma
    assert 0.0 < gamma < 1.0
    found = (
        (1.0 / gamma - 1.0) / math.log(1.0 / gamma) if shape == 0.0 else shape * (1 / gamma - 1) / (1 - gamma**shape)
    )
    assert found == pytest.approx(mean, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), eps=st.floats(0.0, 2.0))
def test_total_variation_from_a_point(seed: int, eps: float) -> None:
    p, q = pair(seed)
    assert 0.5 * np.abs(p - q).sum() <= total_variation(eps, delta(p, q, eps)) * (1.0 + 1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RunCount(0.5), "mean_runs must be at least 1"),
        (lambda: RunCount(math.inf), "mean_runs must be positive and finite"),
        (lambda: RunCount(0.0, "poisson"), "mean_runs must be positive"),
        (lambda: RunCount(3.0, shape=-1.0), "shape must be finite and above -1"),
        (lambda: RunCount(3.0, "poisson", 1.0), "shape=1.0 has no meaning"),
        (lambda: RunCount(3.0, "binomial"), "distribution must be one of"),  # type: ignore[arg-type]
    ],
)
def test_refused(make: Callable[[], RunCount], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# -- plans --------------------------------------------------------------------------------------------------------

PLAN = {"sample_rate": 1.0, "steps": 4, "dimension": 100}
SAMPLED = {"sample_rate": 0.1, "steps": 40, "dimension": 50}
RELEASES = Release(math.inf, 0.1, 50), 40


@pytest.mark.parametrize("runs", [RunCount(5.0), RunCount(5.0, shape=1.0), RunCount(5.0, "poisson"), RunCount(1.0)])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_planned_search_meets_its_budget_and_little_less(runs: RunCount, mechanism: str) -> None:
    found = plan_search(eps=2.0, delta=1e-4, runs=runs, mechanism=mechanism, **PLAN)
    assert 2.0 * (1.0 - 2e-3) <= found.epsilon <= 2.0
    assert found.epsilon == found.limit.search_epsilon(runs, 1e-4)
    accountant = MajorizedAccountant(mechanism=mechanism)
    accountant.step(noise_multiplier=found.noise_multiplier, **PLAN)
    assert search_epsilon(accountant, runs, delta=1e-4) == found.epsilon
    assert found.limit.met_by(accountant)
    one = calibrate_noise_multiplier(eps=2.0, delta=1e-4, mechanism=mechanism, **PLAN)
    assert found.noise_multiplier >= one * (1.0 - 1e-3)


@pytest.mark.parametrize(
    "limit",
    [
        RunLimit(((1.5, 2e-5), (0.4, 0.04))),
        RunLimit(((0.11, 0.12),), ((9.0, 0.8),)),
        RunLimit((), ((9.0, 0.8), (2.5, 0.2))),
    ],
)
def test_another_plan_is_held_to_the_limit(limit: RunLimit) -> None:
    accountant = MajorizedAccountant()
    multiplier = limit.least_multiplier(accountant, *RELEASES)
    release = RELEASES[0].with_multiplier(multiplier)
    assert limit.most_steps(accountant, release) >= SAMPLED["steps"]
    accountant.step(noise_multiplier=multiplier, **SAMPLED)
    assert limit.met_by(accountant)
    left = limit.most_steps(accountant, release)
    accountant.step(noise_multiplier=multiplier, **{**SAMPLED, "steps": int(left) + 1})
    assert not limit.met_by(accountant)
    less = MajorizedAccountant()
    less.step(noise_multiplier=0.98 * multiplier, **SAMPLED)
    assert not limit.met_by(less)


def test_a_limit_that_nothing_meets() -> None:
    spent = MajorizedAccountant()
    spent.step(noise_multiplier=1.0, **SAMPLED)
    limit = RunLimit(((50.0, 1e-4),), ((4.0, 1e-3),))
    with pytest.raises(NoFiniteNoiseError, match="Renyi divergence of order 4"):
        limit.least_multiplier(spent, *RELEASES)
    with pytest.raises(ValueError, match="published"):
        plan_search(eps=1.0, delta=1e-5, runs=RunCount(5.0), bound="published", **PLAN)


def test_renyi_divergences_of_a_ledger() -> None:
    accountant = MajorizedAccountant(mechanism="gaussian")
    accountant.step(noise_multiplier=2.0, sample_rate=1.0, dimension=3, steps=2)
    orders = [1.5, 2.0, 10.0, 256.0]
    exact = [2 * order / 8.0 for order in orders]
    found = accountant.renyi_divergences(orders)
    assert found[1:] == pytest.approx(exact[1:], rel=1e-12)
    assert found[0] >= exact[0]  # a chord between orders 1 and 2
    accountant.step(noise_multiplier=2.0, sample_rate=0.1, dimension=3, steps=5)
    sampled = RdpAccountant(orders=orders[1:3])
    sampled.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 5)
    assert accountant.renyi_divergences(orders[1:3]) - np.array(exact[1:3]) == pytest.approx(sampled.rdp, rel=1e-9)
    accountant.step(noise_multiplier=0.0, sample_rate=0.1, dimension=3)
    assert np.isinf(accountant.renyi_divergences(orders)).all()
    with pytest.raises(ValueError, match="orders must hold numbers in"):
        accountant.renyi_divergences([1.0])
