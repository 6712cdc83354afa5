"""Many runs: a lower bound on epsilon from two error rates with Clopper-Pearson limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from lightning_lap2 import _validate

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
