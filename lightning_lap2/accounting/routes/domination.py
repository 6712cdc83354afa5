r"""The second valid route: a Laplace step is dominated by a Gaussian one, whose composition is computed numerically.

One coordinate shifted by x scales is mu*(x)-GDP with :math:`\mu^*(x) = -2 \Phi^{-1}(e^{-x/2} / 2)` and no smaller
mu; :math:`u \mapsto \mu^*(\sqrt u)^2` is concave, so a clipped step is :math:`\sqrt n \mu^*(\rho / \sqrt n)`-GDP.
Domination of trade-off functions survives Poisson subsampling and composition (docs/guarantee.md), so T steps
cost no more than T subsampled Gaussians with sigma = 1 / mu: the ``dp-accounting`` privacy-loss distribution,
rounded pessimistically. Steps without sampling compose exactly, mu adding in squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.kernel import log_kernel

MAX_PARAMETER = 64.0
"""Pairs further apart than this cost an epsilon in the hundreds a step; the other routes serve them."""
MIN_RATE, MIN_PARAMETER = 1e-14, 1e-12
"""Below these the losses of one step drown in the rounding of its probabilities."""
MAX_STEPS = 10**8
"""Beyond this a grid that fits into memory is wider than the loss of one step."""
MAX_PAIRS = 32
"""More distinct pairs than this (a schedule that changes at every step) are left to the moments."""
_STEP_POINTS, _TOTAL_POINTS = 2.0**15, 2.0**19
_ROUNDING_PER_STEP = 2e-15


def laplace_gdp(shift: float) -> float:
    r"""Upper bound within 1e-12 of mu*(x), the smallest mu for which Lap(0, 1) against Lap(x, 1) is mu-GDP.

    mu* = 2 y where x = 2 H(y) and H(y) = -log(2 sf(y)) is the integrated hazard of the normal. H is convex and
    increasing, so Newton's method from above stays above. It starts from the tangent H(y) >= sqrt(2/pi) y
    (mu* <= sqrt(pi/2) x), or from H(y) >= y^2 / 2.
    """
    if shift <= 1e-10:
        return math.sqrt(math.pi / 2.0) * shift
    if shift > 1e4:
        return 2.0 * math.sqrt(shift)
    y = min(math.sqrt(math.pi / 8.0) * shift, math.sqrt(shift))
    for _ in range(60):
        log_sf = float(log_ndtr(-y))
        hazard = math.exp(-0.5 * y * y - 0.5 * math.log(2.0 * math.pi) - log_sf)
        integrated = -math.log1p(-math.erf(y / math.sqrt(2.0))) if y < 1.0 else -log_sf - math.log(2.0)
        step = (integrated - 0.5 * shift) / hazard
        y -= step
        if step <= 1e-14 * y:
            break
    return 2.0 * y * (1.0 + 1e-12)


@dataclass(frozen=True)
class Pair:
    """A dominating pair of one step: N(0, 1) against N(parameter, 1), or Laplace likewise, sampled at ``rate``."""

    parameter: float
    rate: float
    laplace: bool = False

    @property
    def loss_deviation(self) -> float:
        """About the standard deviation of the privacy loss of one step (q times the chi-divergence)."""
        x = min(self.parameter, 20.0)
        chi2 = math.expm1(float(log_kernel(x, 2.0))) if self.laplace else math.expm1(x * x)
        return max(min(self.rate * math.sqrt(chi2), self.parameter), 1e-100)

    @property
    def total_variation(self) -> float:
        """Upper bound on the total variation distance of one step."""
        far = -math.expm1(-0.5 * self.parameter) if self.laplace else math.erf(self.parameter / math.sqrt(8.0))
        return self.rate * far * (1.0 + 1e-15)

    @property
    def loss_range(self) -> float:
        """About the largest privacy loss of one step that is not truncated (mass e^-50)."""
        top = self.parameter if self.laplace else self.parameter * (9.6 + 0.5 * self.parameter)
        return top + math.log(self.rate + (1.0 - self.rate) * math.exp(-top))


def dominating_pair(release: Release, mechanism: str) -> Pair:
    """The pair of a release that is neither free nor bare. Blocks add in squares of mu.

    Under l1 clipping a single coordinate with the summed shift dominates as well; of the two valid pairs the one whose
    loss varies less is taken.

    A rate within 1e-9 of 1 is rounded up to 1, which costs more, because its losses cannot be resolved.
    """
    blocks = release.blocks
    rate = release.sample_rate if release.sample_rate < 1.0 - 1e-9 else 1.0
    if mechanism == "gaussian":
        parameters = [rho for _, rho in blocks]
    elif mechanism == "laplace_l1":
        parameters = [laplace_gdp(rho) for _, rho in blocks]
    else:
        parameters = [_even_spread_gdp(n, rho) for n, rho in blocks]
    gaussian = Pair(math.hypot(*parameters) * (1.0 + 1e-15), rate)
    if mechanism != "laplace_l1":
        return gaussian
    single = Pair(math.fsum(rho for _, rho in blocks), rate, laplace=True)
    return single if len(blocks) == 1 else min(single, gaussian, key=lambda pair: pair.loss_deviation)


@lru_cache(maxsize=1024)
def _even_spread_gdp(n: float, rho: float) -> float:
    if math.isinf(n):
        return math.sqrt(math.pi / 2.0) * rho
    root = math.sqrt(n)
    return min(root * laplace_gdp(rho / root), math.sqrt(math.pi / 2.0) * rho * (1.0 + 1e-15))


def paired(composition: Composition, pair_of: Callable[[Release, str], Pair]) -> dict[Pair, int]:
    """The noisy releases as pairs, each with its number of steps."""
    counts: dict[Pair, int] = {}
    for release, steps in composition.noisy:
        pair = pair_of(release, composition.mechanism)
        counts[pair] = counts.get(pair, 0) + steps
    return counts


class Domination:
    """Numerical composition of dominating pairs, computed when first asked for.

    Args:
        counts: steps of each pair.
    """

    def __init__(self, counts: Mapping[Pair, int]) -> None:
        merged: dict[Pair, int] = {}
        square = 0.0
        for pair, steps in counts.items():
            if pair.rate == 1.0 and not pair.laplace:
                square += steps * (pair.parameter * pair.parameter)
            elif steps:
                merged[pair] = merged.get(pair, 0) + steps
        self._gaussian = math.sqrt(square) * (1.0 + 1e-15)
        self._sampled = merged
        self._distribution: Any = None

    @classmethod
    def of(cls, composition: Composition) -> Domination | None:
        """The route for ``composition``; None where its bound is not ``"tight"``."""
        return cls(paired(composition, dominating_pair)) if composition.bound == "tight" else None

    def usable(self, delta: float) -> bool:
        """Whether this route has an epsilon at ``delta``."""
        return 0.0 < delta < 1.0 and (self.total_variation() <= delta or self._resolves(delta))

    def _resolves(self, delta: float) -> bool:
        """Whether the numerical composition means something near ``delta``: not too far apart, above rounding."""
        clear = all(p.rate >= MIN_RATE and p.parameter >= MIN_PARAMETER for p in self._sampled)
        far = max([self._gaussian, *(p.parameter for p in self._sampled)]) > MAX_PARAMETER
        small = len(self._sampled) <= MAX_PAIRS and sum(self._sampled.values()) <= MAX_STEPS
        return clear and not far and small and self._slack() < 0.02 * delta

    def hopeless(self, delta: float, rival: float) -> bool:
        """Whether epsilon would surely be no better than ``rival``: a screen that saves time, never validity.

        The central limit of the composition (Bu, Dong, Long, Su 2020) errs low where the loss is not heavy-tailed
        and epsilon is moderate.
        """
        if rival > 10.0 or any(p.parameter > 1.25 or p.loss_deviation > 0.3 for p in self._sampled):
            return False
        square = self._gaussian**2
        square += sum(t * p.loss_deviation**2 for p, t in self._sampled.items())
        return gdp_epsilon(math.sqrt(square), delta) >= 1.02 * rival

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at ``delta`` (which :meth:`usable` accepted)."""
        if self.total_variation() <= delta:
            return 0.0
        if not self._sampled:
            return gdp_epsilon(self._gaussian, delta)
        with np.errstate(all="ignore"):
            value = float(self._pld().get_epsilon_for_delta(delta - self._slack()))
        return max(value, 0.0) * (1.0 + 1e-12)

    def delta(self, eps: float, rival: float = 1.0) -> float:
        """Upper bound on delta at ``eps``; at worst ``rival``, an upper bound known otherwise."""
        best = min(rival, self.total_variation())
        if not self._resolves(min(best, 0.5)):
            return best
        if not self._sampled:
            return min(best, gdp_delta(self._gaussian, eps))
        with np.errstate(all="ignore"):
            value = float(self._pld().get_delta_for_epsilon(eps))
        return min(best, value + self._slack())

    def total_variation(self) -> float:
        """Upper bound on the total variation distance, the sum over steps; may exceed 1."""
        sampled = sum(t * p.total_variation for p, t in self._sampled.items())
        return sampled + math.erf(self._gaussian / math.sqrt(8.0)) * (1.0 + 1e-15)

    def _slack(self) -> float:
        """Bound on what the fast Fourier transforms lose: measured at 2e-17 per step, a hundred times that here."""
        return _ROUNDING_PER_STEP * (100.0 + sum(self._sampled.values())) if self._sampled else 0.0

    def _interval(self) -> float:
        """Width of the loss grid: 1/64 to 1/32 of the loss deviation of one step, or what the point budget allows.

        Connecting the dots adds about (h / deviation)^2 / 12 to the variance: below 1e-4 here. A wider grid is looser
        and still an upper bound. A power of two, so that neighbouring queries share their grids.
        """
        total = sum(self._sampled.values())
        square = sum(t * p.loss_deviation**2 for p, t in self._sampled.items()) + self._gaussian**2
        width = min(min(p.loss_deviation, 0.25) for p in self._sampled) / 32.0
        width = max(width, math.sqrt(square / (total + 1.0)) / 512.0)
        reach = max(p.loss_range for p in self._sampled)
        width = max(width, reach / _STEP_POINTS, (28.0 * math.sqrt(square) + 2.0 * reach) / _TOTAL_POINTS)
        return float(2.0 ** math.floor(math.log2(width)))

    def _pld(self) -> Any:
        if self._distribution is None:
            interval = self._interval()
            parts = [(p, t) for p, t in self._sampled.items()]
            if self._gaussian > 0.0:
                parts.append((Pair(self._gaussian, 1.0), 1))
            self._distribution = _compose(parts, interval)
        return self._distribution


def _compose(parts: Iterable[tuple[Pair, int]], interval: float) -> Any:
    total: Any = None
    for pair, steps in parts:
        single = _single_step(pair, interval)
        for several in _repeat(single, steps):
            total = several if total is None else total.compose(several)
    return total


def _repeat(single: Any, steps: int) -> list[Any]:
    """``single`` composed ``steps`` times, as one or two factors.

    A short distribution is kept as a table by ``dp-accounting``, which then forms the integer size**steps: large
    powers are taken in two stages.
    """
    stage = 1 << 16
    if steps <= stage:
        return [single.self_compose(steps) if steps > 1 else single]
    factors = [single.self_compose(stage).self_compose(steps // stage)]
    return factors + (_repeat(single, steps % stage) if steps % stage else [])


@lru_cache(maxsize=64)
def _single_step(pair: Pair, interval: float) -> Any:
    """Pessimistic privacy-loss distribution of one step, both directions of add or remove."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # imported late: slow, and seldom needed

    build = pld.from_laplace_mechanism if pair.laplace else pld.from_gaussian_mechanism
    scale = (1.0 / pair.parameter) * (1.0 - 1e-15)
    return build(scale, value_discretization_interval=interval, sampling_prob=pair.rate)


def gdp_delta(mu: float, eps: float) -> float:
    r"""delta(eps) of mu-GDP, :math:`\Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)`.

    Taken as the first term times 1 - exp(difference of logs), the difference widened by its rounding error.
    """
    if mu == 0.0 or eps > 1e100 * mu:
        return 0.0
    first = float(log_ndtr(0.5 * mu - eps / mu))
    second = eps + float(log_ndtr(-0.5 * mu - eps / mu))
    gap = second - first - 4e-15 * (1.0 + abs(first) + abs(second) + eps)
    return min(1.0, math.exp(first) * -math.expm1(gap) * (1.0 + 1e-15)) if gap < 0.0 else 0.0


def gdp_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 with ``gdp_delta(mu, eps) <= delta``, rounded up, for 0 < delta < 1."""
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    if mu > 1e100:
        return math.inf
    low, high = 0.0, mu
    while gdp_delta(mu, high) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if gdp_delta(mu, middle) > delta else (low, middle)
    return high
