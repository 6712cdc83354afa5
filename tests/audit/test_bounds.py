"""The bounds against independent computations, and against mechanisms whose epsilon is known exactly."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import stats

from lightning_lap2.audit.bounds import (
    clopper_pearson,
    guesses_bound,
    guesses_lower_bound,
    guesses_p_value,
    rates_bound,
)


def test_clopper_pearson_is_scipys_exact_interval() -> None:
    for n in (1, 7, 250):
        for k in sorted({0, 1, n // 3, n - 1, n}):
            low, high = clopper_pearson(k, n, 5e-4)
            options: dict[str, Any] = {"confidence_level": 1 - 5e-4, "method": "exact"}
            assert low == pytest.approx(stats.binomtest(k, n, alternative="greater").proportion_ci(**options).low)
            assert high == pytest.approx(stats.binomtest(k, n, alternative="less").proportion_ci(**options).high)
    low, high = clopper_pearson(np.array([0, 3]), 0 * np.array([1, 1]) + np.array([0, 9]), 0.01)
    assert (low[0], high[0]) == (0.0, 1.0)
    assert low.shape == (2,)


@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.97])
def test_clopper_pearson_covers(p: float) -> None:
    k = np.arange(61)
    mass = stats.binom.pmf(k, 60, p)
    low, high = clopper_pearson(k, 60, 0.01)
    assert mass[low > p].sum() <= 0.01
    assert mass[high < p].sum() <= 0.01


def exact_p_value(m: int, r: int, v: int, eps: float, delta: float) -> mpmath.mpf:
    """The theorem's right side as it is written, term by term in 50 digits."""
    with mpmath.workdps(50):
        accuracy = mpmath.exp(eps) / (1 + mpmath.exp(eps))

        def f(t: int) -> mpmath.mpf:
            return mpmath.fsum(
                mpmath.binomial(r, k) * accuracy**k * (1 - accuracy) ** (r - k) for k in range(max(t, 0), r + 1)
            )

        slope = max((f(v - i) - f(v)) / i for i in range(1, m + 1))
        return min(mpmath.mpf(1), f(v) + 2 * m * mpmath.mpf(delta) * slope)


@pytest.mark.parametrize(
    ("m", "r", "v", "eps", "delta"),
    [
        (20, 20, 18, 1.0, 0.0),
        (20, 20, 18, 1.0, 1e-3),
        (60, 25, 25, 0.5, 1e-5),
        (60, 25, 13, 0.0, 1e-2),
        (100, 40, 39, 2.5, 1e-4),
        (30, 10, 1, 0.7, 1e-6),
        (30, 10, 0, 0.7, 1e-6),
    ],
)
def test_p_value_is_the_theorem_in_fifty_digits(m: int, r: int, v: int, eps: float, delta: float) -> None:
    found = guesses_p_value(canaries=m, guesses=r, correct=v, eps=eps, delta=delta)
    assert found == pytest.approx(float(exact_p_value(m, r, v, eps, delta)), rel=1e-10)


def test_randomized_response_is_rejected_no_more_often_than_stated() -> None:
    """m bits, each told truly with probability e^eps / (1 + e^eps): exactly eps-DP, and the worst such mechanism."""
    eps, m = 1.2, 80
    mass = stats.binom.pmf(np.arange(m + 1), m, math.exp(eps) / (1 + math.exp(eps)))
    p = np.array([guesses_p_value(canaries=m, guesses=m, correct=v, eps=eps, delta=0.0) for v in range(m + 1)])
    for alpha in (0.2, 0.01, 1e-3):
        assert mass[p < alpha].sum() <= alpha
        assert mass[p < alpha].sum() >= alpha / 30, "and it is not far from tight"


@pytest.mark.parametrize("together", [False, True], ids=["each", "all"])
def test_revealing_with_probability_delta_is_rejected_no_more_often_than_stated(together: bool) -> None:
    """Randomized response that reveals the bit (or all bits at once) with probability delta is (eps, delta)-DP."""
    eps, m, delta = 0.8, 40, 4e-3
    accuracy, v = math.exp(eps) / (1 + math.exp(eps)), np.arange(m + 1)
    if together:
        mass = (1 - delta) * stats.binom.pmf(v, m, accuracy) + delta * (v == m)
    else:
        mass = stats.binom.pmf(v, m, delta + (1 - delta) * accuracy)
    p = np.array([guesses_p_value(canaries=m, guesses=m, correct=k, eps=eps, delta=delta) for k in v])
    pure = np.array([guesses_p_value(canaries=m, guesses=m, correct=k, eps=eps, delta=0.0) for k in v])
    for alpha in (0.2, 0.01, 1e-3):
        assert mass[p < alpha].sum() <= alpha
    assert not together or mass[pure < 1e-3].sum() > 1e-3, "without the delta term it would be"


def test_lower_bound_inverts_the_p_value_from_below() -> None:
    told: dict[str, Any] = {"canaries": 400, "guesses": 200, "correct": 170, "delta": 1e-6}
    eps = guesses_lower_bound(**told, confidence=0.999)
    assert 1.0 < eps < math.log(170 / 30)
    assert guesses_p_value(**told, eps=eps) < 1e-3 <= guesses_p_value(**told, eps=eps + 2e-6)
    assert guesses_lower_bound(canaries=400, guesses=200, correct=101, delta=0.0, confidence=0.999) == 0.0
    # with delta near 1 - confidence no number of right guesses proves anything
    assert guesses_lower_bound(canaries=400, guesses=400, correct=400, delta=1e-3, confidence=0.999) == 0.0


def test_guesses_find_the_epsilon_of_randomized_response_from_below() -> None:
    rng, eps = np.random.default_rng(1), 1.5
    found = []
    for _ in range(40):
        coins = rng.random(800) < 0.5
        truth = rng.random(800) < math.exp(eps) / (1 + math.exp(eps))
        bound = guesses_bound(np.where(coins == truth, 1.0, -1.0), coins, delta=0.0, confidence=0.99)
        found.append(bound.epsilon)
        assert bound.epsilon <= bound.ceiling
    assert sum(value > eps for value in found) <= 2
    assert np.mean(found) > 1.0


def test_guesses_in_one_group_find_what_hides_in_it() -> None:
    rng = np.random.default_rng(2)
    coins = rng.random(600) < 0.5
    groups = np.repeat([0, 1], [500, 100])
    scores = np.where(groups == 1, np.where(coins, 0.2, -0.2), rng.laplace(size=600))
    alone = guesses_bound(scores, coins, delta=0.0, confidence=0.99)
    assert alone.epsilon < 0.5
    bound = guesses_bound(scores, coins, delta=0.0, confidence=0.99, groups=groups)
    assert (bound.group, bound.correct, bound.tried) == (1, 50, 9)
    assert bound.epsilon > 1.5


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"canaries": 3, "guesses": 4, "correct": 1}, "correct <= guesses <= canaries"),
        ({"canaries": 3, "guesses": 2, "correct": -1}, "correct must be at least 0"),
        ({"delta": 2.0}, "delta must lie in"),
        ({"eps": -1.0}, "eps must not be negative"),
    ],
)
def test_refusals(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        guesses_p_value(**{"canaries": 9, "guesses": 4, "correct": 1, "eps": 1.0, "delta": 0.0, **told})


def laplace_runs(runs: int, rho: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One Laplace release of a bit shifted by rho scales, exactly rho-DP: its log likelihood ratios and coins."""
    rng = np.random.default_rng(seed)
    coins = rng.random((runs, 1)) < 0.5
    y = rng.laplace(size=(runs, 1)) + rho * coins
    # rounded: the last bits of y and y - rho would tell more than the real numbers do
    return np.round(np.abs(y) - np.abs(y - rho), 9), coins


def test_rates_find_the_epsilon_of_one_laplace_release_from_below() -> None:
    found = [rates_bound(*laplace_runs(1500, 1.0, seed), delta=0.0, confidence=0.99).epsilon for seed in range(40)]
    assert max(found) < 1.0
    assert np.mean(found) > 0.5
    many = rates_bound(*laplace_runs(200_000, 1.0, 99), delta=0.0, confidence=0.99)
    assert 0.9 < many.epsilon < 1.0
    assert many.epsilon < many.ceiling


def test_delta_is_taken_off_the_numerator() -> None:
    """P_in[E] = 1/2, P_out[E] = e^-1 / 2 for the event that the ratio is at its largest."""
    bound = rates_bound(*laplace_runs(400_000, 1.0, 5), delta=0.1, confidence=0.99)
    truth = 1.0 + 2 * math.log(1 - 0.1)  # the smallest epsilon of this release at delta = 0.1
    assert truth - 0.1 < bound.epsilon < truth


def test_a_gaussian_shortcut_would_be_wrong_for_laplace() -> None:
    """mu-GDP fitted to a true pair of error rates of the Laplace mechanism, turned into epsilon: above the truth."""
    rho, delta = 1.0, 1e-5
    mu = stats.norm.ppf(0.5) - stats.norm.ppf(math.exp(-rho) / 2)

    def excess(eps: float) -> float:
        return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu) - delta

    assert excess(3 * rho) > 0, "so the shortcut claims a lower bound above 3 where epsilon is 1"


def test_the_event_is_chosen_without_the_runs_that_judge_it() -> None:
    scores, coins = laplace_runs(200, 2.0, 3)
    chosen = rates_bound(scores, coins, delta=0.0, confidence=0.95, holdout=0.5)
    scores[100:], coins[100:] = 17.0, ~coins[100:]
    again = rates_bound(scores, coins, delta=0.0, confidence=0.95, holdout=0.5)
    assert (again.canary, again.direction, again.threshold) == (chosen.canary, chosen.direction, chosen.threshold)
    assert again.epsilon == 0.0


def test_rates_choose_the_canary_that_shows_most_and_survive_missing_scores() -> None:
    useless, coins = np.random.default_rng(0).normal(size=(600, 1)), np.random.default_rng(1).random((600, 1)) < 0.5
    scores, others = laplace_runs(600, 3.0, 4)
    scores[::50] = np.nan
    bound = rates_bound(np.hstack([useless, scores]), np.hstack([coins, others]), delta=0.0, confidence=0.99)
    assert bound.canary == 1
    assert bound.epsilon > 0.7
    assert bound.true.low <= bound.true.rate <= bound.true.high
    nothing = rates_bound(np.full((40, 1), np.nan), coins[:40], delta=0.0, confidence=0.99)
    assert nothing.epsilon == 0.0
