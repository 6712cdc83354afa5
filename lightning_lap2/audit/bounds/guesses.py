"""One run: a lower bound on epsilon from guessed coins (Steinke, Nasr & Jagielski 2023)."""

from __future__ import annotations

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
