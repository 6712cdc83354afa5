r"""From an attacker's right and wrong answers to a lower bound on epsilon, at a stated confidence. No torch.

Both bounds are of the (epsilon, delta) form: they use nothing of the mechanism but the claim

.. math::  P[M(D) \in E] \le e^\varepsilon P[M(D') \in E] + \delta \quad \text{for all neighbours } D, D'.

Shortcuts that fit one parameter of a Gaussian trade-off function (mu-GDP) to the error rates are tighter for Gaussian
noise and *wrong* for Laplace noise, whose trade-off function has another shape: they may put the "lower" bound above
the truth. There are none here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from lightning_lap2 import _validate

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Bisection stops here; the end that is returned is the one that is still rejected.
_TOLERANCE = 1e-6
# exp of more than this is of no use as an odds ratio
_LARGEST_EPS = 700.0


def clopper_pearson(successes: Ints | int, trials: Ints | int, alpha: float) -> tuple[Array, Array]:
    r"""One-sided exact limits for a binomial probability (Clopper and Pearson 1934), each at confidence 1 - alpha.

    The lower limit is the :math:`\alpha` quantile of Beta(k, n - k + 1), the upper one the :math:`1 - \alpha` quantile
    of Beta(k + 1, n - k); 0 for k = 0 and 1 for k = n. Both hold at once with probability at least 1 - 2 alpha.

    Args:
        successes: k, any shape.
        trials: n, broadcast against k. n = 0 gives (0, 1).
        alpha: error probability of each limit, in (0, 1).

    Returns:
        (lower, upper), each of the broadcast shape.
    """
    k, n = np.broadcast_arrays(np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64))
    inside_low, inside_up = k > 0, k < n
    low = np.where(inside_low, special.betaincinv(np.where(inside_low, k, 1.0), n - k + 1, alpha), 0.0)
    up = np.where(inside_up, special.betaincinv(k + 1, np.where(inside_up, n - k, 1.0), 1 - alpha), 1.0)
    return low, up


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A rate with its one-sided Clopper-Pearson limits.

    Attributes:
        count, trials: successes of how many.
        low, high: limits, each at the error probability it was asked for.
    """

    count: int
    trials: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.count / self.trials if self.trials else math.nan


@dataclass(frozen=True, kw_only=True)
class RatesBound:
    """What many runs say of one event.

    Attributes:
        epsilon: the lower bound.
        ceiling: what it would be had the event happened in all runs where it should and in no other.
        canary: column of the scores that was attacked.
        direction: ``"in"``: the event is score >= threshold, likelier with the canary; ``"out"``: score <= threshold,
            likelier without it.
        threshold: of the score.
        true, false: rates of the event in the world where it should, and should not, happen.
    """

    epsilon: float
    ceiling: float
    canary: int
    direction: str
    threshold: float
    true: Interval
    false: Interval


def rates_bound(
    scores: Array, included: npt.NDArray[np.bool_], *, delta: float, confidence: float, holdout: float = 0.3
) -> RatesBound:
    r"""Lower bound on epsilon from the error rates over independent runs.

    For an event E of a run's output, :math:`P_{in}[E] \le e^\varepsilon P_{out}[E] + \delta` and the same with the two
    worlds exchanged, so

    .. math::  \varepsilon \ge \log\frac{P_{in}[E] - \delta}{P_{out}[E]}.

    Canary, direction and threshold are chosen on the first ``holdout`` part of the runs, where they maximise this very
    bound; the rates of that one event are then estimated on the other runs, with a lower Clopper-Pearson limit for the
    numerator and an upper one for the denominator at (1 - confidence) / 2 each. So the statement holds with probability
    at least ``confidence`` whatever the choice.

    Args:
        scores: ``[R, K]``, one score per run and canary, larger where the canary seems to be in. NaN is no score: the
            event does not happen.
        included: ``[R, K]``, whether the canary was in.
        delta: of the claim.
        confidence: in (0, 1).
        holdout: fraction of the runs on which the event is chosen, in (0, 1).

    Raises:
        ValueError: fewer than 4 runs, shapes that differ, a number out of range.
    """
    _validate.probability("delta", delta)
    _validate.open_unit("confidence", confidence)
    _validate.open_unit("holdout", holdout)
    if scores.ndim != 2 or scores.shape != included.shape or len(scores) < 4:
        raise ValueError(
            f"scores and included must both be [runs >= 4, canaries], got {scores.shape}, {included.shape}"
        )
    alpha = (1 - confidence) / 2
    first = min(max(2, round(holdout * len(scores))), len(scores) - 2)
    best = (-math.inf, 0, "in", math.inf)
    for canary in range(scores.shape[1]):
        column, is_in = scores[:first, canary], included[:first, canary]
        for direction in ("in", "out"):
            value, threshold = _best_threshold(column, is_in, direction, delta, alpha)
            best = max(best, (value, canary, direction, threshold))
    _, canary, direction, threshold = best
    return _rates_at(scores[first:, canary], included[first:, canary], canary, direction, threshold, delta, alpha)


def _best_threshold(
    scores: Array, included: npt.NDArray[np.bool_], direction: str, delta: float, alpha: float
) -> tuple[float, float]:
    """The threshold of the largest bound on these runs, and that bound."""
    sign = 1.0 if direction == "in" else -1.0
    right, wrong = (included, ~included) if direction == "in" else (~included, included)
    scores = sign * np.nan_to_num(scores, nan=-sign * math.inf, posinf=math.inf, neginf=-math.inf)
    thresholds = np.unique(scores[np.isfinite(scores)])
    if not thresholds.size:
        return -math.inf, math.inf
    above_right = _count_at_least(scores[right], thresholds)
    above_wrong = _count_at_least(scores[wrong], thresholds)
    low, _ = clopper_pearson(above_right, int(right.sum()), alpha)
    _, high = clopper_pearson(above_wrong, int(wrong.sum()), alpha)
    values = np.log(np.maximum(low - delta, 1e-300) / high)
    at = int(values.argmax())
    return float(values[at]), float(sign * thresholds[at])


def _count_at_least(values: Array, thresholds: Array) -> Ints:
    return len(values) - np.searchsorted(np.sort(values), thresholds, side="left")


def _rates_at(
    scores: Array,
    included: npt.NDArray[np.bool_],
    canary: int,
    direction: str,
    threshold: float,
    delta: float,
    alpha: float,
) -> RatesBound:
    event = scores >= threshold if direction == "in" else scores <= threshold
    right, wrong = (included, ~included) if direction == "in" else (~included, included)
    true, false = (_interval(int(event[world].sum()), int(world.sum()), alpha) for world in (right, wrong))
    best = _interval(true.trials, true.trials, alpha), _interval(0, false.trials, alpha)
    return RatesBound(
        epsilon=_log_odds(true, false, delta),
        ceiling=_log_odds(*best, delta),
        canary=canary,
        direction=direction,
        threshold=threshold,
        true=true,
        false=false,
    )


def _log_odds(true: Interval, false: Interval, delta: float) -> float:
    return max(0.0, math.log((true.low - delta) / false.high)) if true.low > delta else 0.0


def _interval(count: int, trials: int, alpha: float) -> Interval:
    low, high = clopper_pearson(count, trials, alpha)
    return Interval(count=count, trials=trials, low=float(low), high=float(high))


def guesses_p_value(*, canaries: int, guesses: int, correct: int, eps: float, delta: float) -> float:
    r"""Probability bound of guessing so well in one run of an (eps, delta)-DP algorithm.

    Steinke, Nasr and Jagielski (2023), "Privacy auditing with one (1) training run", main theorem: m canaries are
    each put in by a fair coin of their own; of the output alone, r of the coins are guessed (a number fixed
    beforehand), W of them correctly. With :math:`f(v) = P[\mathrm{Binomial}(r, e^\varepsilon / (1 + e^\varepsilon))
    \ge v]`,

    .. math::  P[W \ge v] \le f(v) + 2 m \delta \max_{1 \le i \le v} \frac{f(v - i) - f(v)}{i}.

    No independence between the canaries is assumed: in a single run they may interfere. The coins of several
    independent runs, each with canaries of its own, are the coins of one (eps, delta)-DP algorithm, so the theorem
    covers them together with m and r summed up.

    Args:
        canaries: m, all coins, those not guessed included.
        guesses: r <= m.
        correct: v <= r.
        eps, delta: the claim.

    Returns:
        A p-value of the claim, in [0, 1].
    """
    m = _validate.integer("canaries", canaries, minimum=0)
    r = _validate.integer("guesses", guesses, minimum=0)
    v = _validate.integer("correct", correct, minimum=0)
    if not v <= r <= m:
        raise ValueError(f"correct <= guesses <= canaries is needed, got {v}, {r}, {m}")
    _validate.non_negative("eps", eps)
    _validate.probability("delta", delta)
    if v == 0:
        return 1.0
    accuracy = special.expit(eps)
    tail = float(stats.binom.sf(v - 1, r, accuracy))  # f(v)
    below = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, accuracy))  # f(v - i) - f(v), i = 1 .. v
    slope = float((below / np.arange(1, v + 1)).max())
    return min(1.0, tail + 2 * m * delta * slope)


@dataclass(frozen=True, kw_only=True)
class GuessesBound:
    """What the guesses in one run (or several) say.

    Attributes:
        epsilon: the lower bound.
        ceiling: the largest that any of the ways of guessing could give, had every guess been right.
        canaries: m, all coins.
        guesses, correct: r and v of the guess that gave the bound.
        sides: ``"both"``: the r/2 largest scores were guessed in, the r/2 smallest out; ``"in"``: the r largest, in.
        group: the group that all guesses were made in; ``None``: anywhere.
        tried: how many ways of guessing shared the error probability.
    """

    epsilon: float
    ceiling: float
    canaries: int
    guesses: int
    correct: int
    sides: str
    group: int | None
    tried: int


def guesses_lower_bound(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon that :func:`guesses_p_value` rejects at ``confidence``, to 1e-6 and never above it; 0 where
    it rejects none."""
    _validate.open_unit("confidence", confidence)
    alpha = 1 - confidence

    def rejected(eps: float) -> bool:
        p = guesses_p_value(canaries=canaries, guesses=guesses, correct=correct, eps=eps, delta=delta)
        return p < alpha

    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high):
        if high > _LARGEST_EPS:
            return high
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


# (sides, fraction of the coins that is guessed). Few guesses suit a mechanism that rarely gives much away, many one
# that gives a little away each time.
GUESSES = (("both", 1.0), ("both", 0.5), ("both", 0.2), ("both", 0.05), ("in", 0.25), ("in", 0.1), ("in", 0.025))
# within one group: half of its coins
GROUP_FRACTION = 0.5
# a smaller group can prove little
SMALLEST_GROUP = 20


def guesses_bound(
    scores: Array,
    included: npt.NDArray[np.bool_],
    *,
    delta: float,
    confidence: float,
    guesses: int | None = None,
    groups: npt.NDArray[np.int64] | None = None,
) -> GuessesBound:
    """Lower bound on epsilon from one score per coin: those of the largest scores are guessed to be in.

    Args:
        scores: ``[m]``, larger where the canary seems to be in; a function of the output alone.
        included: ``[m]``, the coins.
        guesses: r, half of them in and half out. ``None``: the seven numbers of :data:`GUESSES` are tried, and half the
            coins of each group; all of them share the error probability (Bonferroni), so that no choice looks at the
            coins.
        groups: ``[m]``, a number for each coin's group (such as the layer its canary lies in), for faults that hit one
            group only.

    Raises:
        ValueError: no canaries, shapes that differ, more guesses than canaries.
    """
    m = len(scores)
    if scores.shape != included.shape or scores.ndim != 1 or not m:
        raise ValueError(f"scores and included must both be [m >= 1], got {scores.shape} and {included.shape}")
    everywhere = np.arange(m)
    plans: list[tuple[Ints, str, int, int | None]]
    if guesses is None:
        plans = [(everywhere, sides, max(1, int(fraction * m)), None) for sides, fraction in GUESSES]
        plans += [
            (np.flatnonzero(groups == group), "both", int(GROUP_FRACTION * (groups == group).sum()), int(group))
            for group in ([] if groups is None else np.unique(groups))
            if SMALLEST_GROUP <= (groups == group).sum() < m
        ]
    else:
        plans = [(everywhere, "both", _validate.integer("guesses", guesses, minimum=1), None)]
    share = 1 - (1 - confidence) / len(plans)

    def bound(correct: int, number: int) -> float:
        return guesses_lower_bound(canaries=m, guesses=number, correct=correct, delta=delta, confidence=share)

    ceiling = max(bound(number, number) for _, _, number, _ in plans)
    found = []
    for members, sides, number, group in plans:
        correct = _correct(scores[members], included[members], sides, number)
        found.append((bound(correct, number), number, correct, sides, group))
    epsilon, number, correct, sides, group = max(found, key=lambda entry: entry[0])
    return GuessesBound(
        epsilon=epsilon,
        ceiling=ceiling,
        canaries=m,
        guesses=number,
        correct=correct,
        sides=sides,
        group=group,
        tried=len(plans),
    )


def _correct(scores: Array, included: npt.NDArray[np.bool_], sides: str, guesses: int) -> int:
    """Right guesses if the largest scores are guessed in, and (of both sides) the smallest out."""
    order = np.argsort(-np.nan_to_num(scores, nan=0.0), kind="stable")
    r_in = guesses if sides == "in" else (guesses + 1) // 2
    r_out = guesses - r_in
    return int(included[order[:r_in]].sum()) + int((~included[order[len(order) - r_out :]]).sum())
