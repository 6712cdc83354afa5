r"""The third route: a Laplace step is compared with a Gaussian one through a class of test functions.

Domination at every (epsilon, delta) asks for Gaussian noise that is up to sqrt(pi/2) too small
(:mod:`~lightning_lap2.accounting.routes.domination`). Less suffices. Let R be the likelihood ratio of T steps, in
either direction, and R' that of T Poisson-subsampled Gaussian steps N(0, 1) against N(mu, 1) with

.. math::   \mu^2 = n (4 x - 8 \log(1 + x / 2)) \le \rho^2, \qquad x = \rho / \sqrt n,

the mu at which both pairs have the same Bhattacharyya coefficient. Theorem 6 of docs/guarantee.md: E[f(R)] <= E[f(R')]
for every f with f''(r) = h(r) >= 0, r^{3/2} h(r) nondecreasing, and 9/4 h(r) + 4 v h'(r) + v^2 h''(r) >= 0 for
0 <= v <= r. Such is, for every c > 0, with h(r) = log(r/c) / r for r > c and 0 below,

.. math::   f_c(r) = c\,G(\log(r/c)), \qquad G(x) = e^x (x^2/2 - x + 1) - 1 \quad (x \ge 0).

The tangent of f_c at r = c e^l, whose slope is l^2 / 2, meets zero at K = c kappa(l) with
kappa(l) = 2 (1 + e^l (l - 1)) / l^2, so (R - K)_+ <= (2 / l^2) f_c(R) and

.. math::   \delta(\log K) \le \frac{2}{l^2} E[f_c(R')], \qquad K = c\,\kappa(l), \quad c, l > 0 \text{ arbitrary}.

Given delta, each c has its l and its K in closed form; the smallest K is searched for. R' is computed on a grid,
rounded upwards (:mod:`~lightning_lap2.accounting.routes.tilted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.domination import Pair, paired
from lightning_lap2.accounting.routes.tilted import TAIL_ORDER, RatioLaw, ratio_law

Array = npt.NDArray[np.float64]

MAX_PARAMETER = 8.0
"""Pairs further apart cost an epsilon in the tens a step; the other routes serve them."""
MIN_RATE, MIN_PARAMETER = 1e-12, 1e-7
"""Below these the losses of one step drown in the rounding of its probabilities."""
MAX_STEPS = 10**8
MAX_LOG_SQUARE = 1e4
"""Of log E[R'^2]: beyond it losses could overflow where e is raised to them; the other routes serve."""
MAX_PAIRS = 32
_LOG_TAIL_CONSTANT = math.log(3.5)
"""G(x) <= 3.5 e^{5x/4}: the maximum of (x^2/2 - x + 1) e^{-x/4} is 3.43, at x = 8.87."""


@lru_cache(maxsize=1024)
def comparable_parameter(n: float, rho: float) -> float:
    """mu of the Gaussian step with which an l2-clipped Laplace step is compared; see the module.

    Args:
        n: coordinates, >= 1 or infinite.
        rho: C / b, the largest shift.
    """
    x = rho / math.sqrt(n)
    if x < 1e-3:  # the root of n (4x - 8 log(1 + x/2)) is rho (1 - x/6 + 7 x^2/144 - ...)
        return rho * (1.0 - x / 6.0 + x * x / 20.0)
    rounding = 1.0 + 4e-15 * (1.0 + 1.0 / x)
    return min(rho, math.sqrt(n * (4.0 * x - 8.0 * math.log1p(0.5 * x))) * rounding)


def compared_pair(release: Release, mechanism: str) -> Pair:
    """The Gaussian pair of a release of Laplace noise that is neither free nor bare; blocks add in squares.

    A rate within 1e-9 of 1 is rounded up to 1, which costs more.
    """
    sizes = [(1.0 if mechanism == "laplace_l1" else n, rho) for n, rho in release.blocks]
    rate = release.sample_rate if release.sample_rate < 1.0 - 1e-9 else 1.0
    return Pair(math.hypot(*(comparable_parameter(n, rho) for n, rho in sizes)) * (1.0 + 1e-15), rate)


class Comparison:
    """Upper bounds on epsilon and delta of a composition, from the Gaussian steps it is compared with.

    Args:
        counts: steps of each Gaussian pair.
    """

    def __init__(self, counts: Mapping[Pair, int]) -> None:
        square = math.fsum(t * (p.parameter * p.parameter) for p, t in counts.items() if p.rate == 1.0)
        self._counts = {p: t for p, t in counts.items() if p.rate < 1.0 and t}
        if square > 0.0:  # Gaussian steps without sampling are one Gaussian step
            self._counts[Pair(math.sqrt(square) * (1.0 + 1e-15), 1.0)] = 1

    @classmethod
    def of(cls, composition: Composition) -> Comparison | None:
        """The route for ``composition``; None where its bound is not ``"tight"`` or the noise is Gaussian already."""
        if composition.bound != "tight" or composition.mechanism == "gaussian":
            return None
        return cls(paired(composition, compared_pair))

    def usable(self, delta: float) -> bool:
        """Whether the comparison can be computed with meaning at ``delta``."""
        return (
            1e-200 < delta < 1.0
            and 0 < len(self._counts) <= MAX_PAIRS
            and sum(self._counts.values()) <= MAX_STEPS
            and all(p.rate >= MIN_RATE and MIN_PARAMETER <= p.parameter <= MAX_PARAMETER for p in self._counts)
            and sum(t * math.log1p(p.rate**2 * math.expm1(p.parameter**2)) for p, t in self._counts.items())
            <= MAX_LOG_SQUARE
        )

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at ``delta``, which :meth:`usable` accepted."""
        functional = _Functional(ratio_law(self._counts, delta))

        def reached(index: int) -> float:
            value = functional(index)
            return functional.log_c(index) + _log_kappa(math.sqrt(2.0 * value / delta)) if value < 1e300 else math.inf

        return max(0.0, _lowest(reached, functional.size)) * (1.0 + 1e-12) + self._drift()

    def delta(self, eps: float, rival: float = 1.0) -> float:
        """Upper bound on delta at ``eps``; at worst ``rival``, an upper bound known otherwise."""
        best = rival
        while self.usable(min(best, 0.5)) and eps <= 600.0:
            value = min(best, self._delta(max(eps * (1.0 - 1e-12) - self._drift(), 0.0), min(best, 0.5)))
            if value > 1e-2 * best:  # else again, with a grid for the smaller delta
                return value
            best = value
        return best

    def _delta(self, eps: float, expected: float) -> float:
        functional = _Functional(ratio_law(self._counts, expected))

        def reached(index: int) -> float:
            gap = eps - functional.log_c(index)
            if gap <= 0.0:
                return math.inf
            return math.log(max(2.0 * functional(index), 1e-300)) - 2.0 * math.log(_inverse_log_kappa(gap))

        return math.exp(min(0.0, _lowest(reached, functional.size)))

    def _drift(self) -> float:
        """Rounding of the mean loss: the probabilities of a step are off by a few ulp, times q."""
        return 2e-15 * sum(t * p.rate for p, t in self._counts.items()) + 1e-14


class _Functional:
    """``functional(i)``: upper bound on E[f_c(R')] with log c at point i of the grid of ``law``."""

    def __init__(self, law: RatioLaw) -> None:
        self._law = law
        self.size = law.weight.size
        self._fits = self.size * law.width < 650.0  # else the largest ratios overflow
        self._table = _integral(np.minimum(np.arange(self.size) * law.width, 650.0))

    def log_c(self, index: int) -> float:
        return (self._law.bottom + index) * self._law.width

    def __call__(self, index: int) -> float:
        log_c = self.log_c(index)
        if log_c > 650.0 or not self._fits:
            return math.inf
        inside = math.exp(log_c) * float(self._law.weight[index:] @ self._table[: self.size - index])
        log_missing = self._law.log_missing + _LOG_TAIL_CONSTANT + (1.0 - TAIL_ORDER) * log_c
        return inside * (1.0 + 1e-12) + math.exp(min(log_missing, 700.0))


def _integral(x: Array) -> Array:
    """G(x) = e^x (x^2/2 - x + 1) - 1 = sum_{k >= 3} x^k (k-1)(k-2) / (2 k!), for x >= 0."""
    y = np.minimum(x, 0.5)
    series = np.zeros_like(y)
    for k in range(16, 2, -1):
        series = series * y + (k - 1) * (k - 2) / (2.0 * math.factorial(k))
    return np.where(x < 0.5, series * y**3, np.exp(x) * (0.5 * x * x - x + 1.0) - 1.0)


def _log_kappa(l: float) -> float:
    """log kappa(l), kappa(l) = 2 (1 + e^l (l - 1)) / l^2 = 2 sum_{k >= 0} l^k (k + 1) / (k + 2)!; increasing."""
    if l < 0.5:
        series = 0.0
        for k in range(16, 0, -1):
            series = series * l + 2.0 * (k + 1) / math.factorial(k + 2)
        return math.log1p(series * l)
    return l + math.log(2.0 * (math.exp(-l) + l - 1.0)) - 2.0 * math.log(l)


def _inverse_log_kappa(gap: float) -> float:
    """Largest l found with log kappa(l) <= gap, for gap > 0: 2 l / 3 <= log kappa(l) <= l + log 2."""
    low, high = 0.0, 1.5 * gap
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _log_kappa(middle) <= gap else (low, middle)
    return max(low, 1e-300)


def _lowest(function: Callable[[int], float], size: int) -> float:
    """Smallest value of ``function`` met on 0 .. size - 1: on a coarse grid, then by golden section around its best.

    Every point gives a valid bound, so a missed minimum only costs tightness.
    """
    coarse = sorted({i * (size - 1) // 32 for i in range(33)})
    values = [function(i) for i in coarse]
    at = int(np.argmin(values))
    best = values[at]
    a, b = coarse[max(at - 1, 0)], coarse[min(at + 1, len(coarse) - 1)]
    seen = dict(zip(coarse, values, strict=True))

    def value(i: int) -> float:
        if i not in seen:
            seen[i] = function(i)
        return seen[i]

    while b - a > 3:
        x, y = b - round(0.618 * (b - a)), a + round(0.618 * (b - a))
        if x >= y:
            x, y = a + (b - a) // 2, a + (b - a) // 2 + 1
        if value(x) <= value(y):
            b = y
        else:
            a = x
    return min([best, *(value(i) for i in range(a, b + 1))])
