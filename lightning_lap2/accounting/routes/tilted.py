r"""The likelihood ratio R' of composed, Poisson-subsampled Gaussian steps, on a grid, rounded upwards.

One step has A = 1 - q + q r under the base measure, r = exp(mu z - mu^2 / 2) with z standard normal. Its law is
moved to the points of a grid of losses log A so that every cell keeps its mass and its mean of A: that raises the
mean of every convex function of A, and of R' = prod A, since it is convex in each factor (connecting the dots:
Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022). The masses are tilted by exp(theta loss), composed by one fast
Fourier transform and tilted back. With theta near the best Rényi order the tilted law has its bulk where epsilon is,
so that rounding is small relative to delta, however small delta is.

What is left out at the top, of one step and of the window of the transform, is bounded through the moment of order
``TAIL_ORDER`` and returned. What the window leaves out at the bottom comes round to its top, on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.special import log_ndtr, ndtr

from lightning_lap2.accounting.routes.domination import Pair

Array = npt.NDArray[np.float64]

TAIL_ORDER = 1.25
MAX_POINTS = 1 << 20
_ULP = float(np.finfo(np.float64).eps)
_FACTORS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class RatioLaw:
    """R' on a grid: ``weight[i]`` is the mass at log R' = (bottom + i) width, not below its exact value.

    Attributes:
        log_missing: log of a bound on E[R'^TAIL_ORDER] over what is not on the grid.
    """

    bottom: int
    width: float
    weight: Array
    log_missing: float


def ratio_law(counts: Mapping[Pair, int], delta: float) -> RatioLaw:
    """The law of R', fine enough to find epsilon at ``delta``.

    Args:
        counts: steps of each Gaussian pair, at most one of them with rate 1.
        delta: in (0, 1).
    """
    deviation = math.sqrt(sum(t * step_deviation(p) ** 2 for p, t in counts.items()))
    log_tolerance = math.log(delta) + 2.0 * math.log(min(1.0, deviation)) - 16.0
    reach = {p: _reach(p, counts, log_tolerance) for p in counts}
    width = min(_grid_width(p) for p in counts)
    while True:
        longest = max((_log_ratio(p, reach[p]) - _log_ratio(p, -9.5)) / width for p in counts)
        if longest <= MAX_POINTS:
            grid = _Grid(counts, {p: _single_step(p, width, reach[p]) for p in counts})
            order = grid.tilt(delta)
            bottom, size = grid.window(order, log_tolerance, deviation)
            if size <= MAX_POINTS:
                break
            longest = size
        width *= 2.0 ** math.ceil(math.log2(longest / MAX_POINTS))
    log_missing = [log_tolerance] + [
        math.log(t) + grid.log_moment(TAIL_ORDER) - grid.steps[p].log_moment(TAIL_ORDER) + _log_tail(p, reach[p])
        for p, t in counts.items()
    ]
    # The moments of the other steps leave out their own tails, each within the tolerance: hence the factor e.
    return RatioLaw(bottom, width, grid.compose(order, bottom, size), float(np.logaddexp.reduce(log_missing)) + 1.0)


def step_deviation(pair: Pair) -> float:
    """About the standard deviation of the loss of one step."""
    return min(pair.rate * math.sqrt(math.expm1(pair.parameter**2)), pair.parameter)


def _grid_width(pair: Pair) -> float:
    """1/128 to 1/64 of the deviation of the loss of one step, or of four times its bulk if that is less; a power of
    two. Connecting the dots adds about (width / deviation)^2 / 6 to the variance."""
    bulk = 4.0 * pair.rate * min(pair.parameter, 1.0)
    return float(2.0 ** math.floor(math.log2(min(step_deviation(pair), bulk) / 64.0)))


def _log_ratio(pair: Pair, z: float) -> float:
    """log(1 - q + q exp(mu z - mu^2 / 2))."""
    exponent = pair.parameter * z - 0.5 * pair.parameter**2
    if pair.rate == 1.0:
        return exponent
    if exponent > 1.0:
        return exponent + math.log(pair.rate + (1.0 - pair.rate) * math.exp(-exponent))
    return math.log1p(pair.rate * math.expm1(exponent))


def _log_tail(pair: Pair, reach: float) -> float:
    """Upper bound on log E[A^s; z > reach], s = TAIL_ORDER: A <= 1 + q r, (1 + v)^s <= 2^{s-1} (1 + v^s), and the
    power s of r shifts the normal by s mu."""
    s, q, mu = TAIL_ORDER, pair.rate, pair.parameter
    power = s * math.log(q) + 0.5 * s * (s - 1.0) * mu * mu + float(log_ndtr(s * mu - reach))
    return (s - 1.0) * math.log(2.0) + float(np.logaddexp(float(log_ndtr(-reach)), power))


def _reach(pair: Pair, counts: Mapping[Pair, int], log_tolerance: float) -> float:
    """Smallest z in quarters beyond which E[R'^s] has no more than the tolerance, s = TAIL_ORDER.

    E[A^s] <= E[A^2]^{s-1}, since log E[A^a] is convex and 0 at a = 1.
    """
    power = sum(t * math.log1p(p.rate**2 * math.expm1(p.parameter**2)) for p, t in counts.items())
    spare = (TAIL_ORDER - 1.0) * power + math.log(counts[pair]) - log_tolerance
    reach = TAIL_ORDER * pair.parameter + math.sqrt(2.0 * max(spare, 0.0)) + 2.0
    while reach > 1.0 and spare + _log_tail(pair, reach - 0.25) < 0.0:
        reach -= 0.25
    return math.ceil(4.0 * reach) / 4.0


@dataclass(frozen=True)
class _Step:
    """Masses of one step at the losses (first + i) width."""

    first: int
    width: float
    mass: Array

    def losses(self) -> Array:
        return np.arange(self.first, self.first + self.mass.size, dtype=np.float64) * self.width

    def log_moment(self, order: float) -> float:
        """log E[A^order]."""
        exponent = order * self.losses()
        if max(float(exponent[0]), float(exponent[-1])) < 300.0:
            return math.log(float(self.mass @ np.exp(exponent)))
        with np.errstate(divide="ignore"):
            return float(np.logaddexp.reduce(np.log(self.mass) + exponent))


@lru_cache(maxsize=32)
def _single_step(pair: Pair, width: float, reach: float) -> _Step:
    """One step on the grid, without what lies above z = ``reach``; what lies below z = -9.5 is moved up."""
    q, mu = pair.rate, pair.parameter
    first = math.floor(_log_ratio(pair, -9.5) / width)
    last = math.ceil(_log_ratio(pair, reach) / width)
    losses: Array = np.arange(first, last + 1, dtype=np.float64) * width
    excess = np.expm1(losses) / q  # r - 1 at the points; below -1 where log A would be below log(1 - q)
    with np.errstate(divide="ignore"):
        z: Array = ((losses if q == 1.0 else np.log1p(np.maximum(excess, -1.0))) + 0.5 * mu * mu) / mu
    mass, shifted = _cells(z), _cells(z - mu)  # probability of each cell, and its share of E[r]
    gap = np.exp(losses[:-1]) * (math.expm1(width) / q)  # of r between neighbours
    upper = np.clip(((shifted - mass) - excess[:-1] * mass) / gap, 0.0, mass)
    points = np.zeros(losses.size)
    points[1:] += upper
    points[:-1] += mass - upper
    points[0] += ndtr(z[0])
    points.setflags(write=False)
    return _Step(first, width, points)


def _cells(z: Array) -> Array:
    """Normal probabilities between neighbouring points, each difference taken in its smaller tail."""
    left, right = ndtr(z), ndtr(-z)
    return np.maximum(np.where(z[:-1] > 0.0, right[:-1] - right[1:], left[1:] - left[:-1]), 0.0)


@dataclass(frozen=True)
class _Grid:
    """Steps on one grid, before they are composed."""

    counts: Mapping[Pair, int]
    steps: Mapping[Pair, _Step]

    def log_moment(self, order: float) -> float:
        return sum(t * self.steps[p].log_moment(order) for p, t in self.counts.items())

    def tilt(self, delta: float) -> float:
        """About 0.7 of the order that gives the smallest epsilon by moments: nearer to it, single losses at the top
        of the grid begin to carry the tilted law."""
        best, chosen, order = math.inf, 1.25, 1.25
        while order < 1e7:
            value = (self.log_moment(order) - math.log(delta * order)) / (order - 1.0) + math.log1p(-1.0 / order)
            if value > best:
                break
            best, chosen, order = value, order, order * 1.25
        return max(0.7 * chosen, 1.25)

    def window(self, order: float, log_tolerance: float, deviation: float) -> tuple[int, int]:
        """Lowest index and number of points, by Chernoff's bound: above lies no more of E[R'^TAIL_ORDER] than the
        tolerance, above and below no more of the tilted law than e^-30."""
        width = next(iter(self.steps.values())).width
        here = self.log_moment(order)
        tops, tilted_tops, bottoms = [], [], []
        for factor in _FACTORS:
            above = order * factor
            there = self.log_moment(above)
            tops.append((there - log_tolerance) / (above - TAIL_ORDER))
            tilted_tops.append((there - here + 30.0) / (above - order))
            below = order * (1.0 - 1.0 / factor) + (factor - 1.0) / deviation
            bottoms.append((here - self.log_moment(order - below) - 30.0) / below)
        highest = sum(t * (self.steps[p].first + self.steps[p].mass.size) for p, t in self.counts.items())
        lowest = sum(t * self.steps[p].first for p, t in self.counts.items())
        top = min(math.ceil(max(min(tops), min(tilted_tops)) / width) + 1, highest)
        bottom = max(math.floor(max(bottoms) / width) - 1, lowest)
        longest = max(s.mass.size for s in self.steps.values())
        return bottom, int(fft.next_fast_len(max(top - bottom + 1, longest, 16), real=True))

    def compose(self, order: float, bottom: int, size: int) -> Array:
        """Masses of R' at the ``size`` points from index ``bottom`` on, rounded up."""
        spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
        doubt = np.zeros(spectrum.size)
        log_mass, first, width, total = 0.0, 0, 1.0, 0
        for p, t in self.counts.items():
            step = self.steps[p]
            log_moment = step.log_moment(order)
            with np.errstate(divide="ignore"):
                tilted = np.exp(np.log(step.mass) + order * step.losses() - log_moment)
            phi = fft.rfft(tilted, size)
            spectrum *= phi**t
            doubt += t / np.maximum(np.abs(phi), 1e-200)
            log_mass, first, width, total = log_mass + t * log_moment, first + t * step.first, step.width, total + t
        tilted = fft.irfft(spectrum, size)
        # Each factor phi is off by at most eta, the product by eta |product| sum(T / |phi|), a point by the mean of
        # that over frequencies, and by the rounding of the inverse transform.
        eta = _ULP * (8.0 + 4.0 * math.log2(size))
        error = float(np.minimum(np.abs(spectrum) * doubt, total).mean()) + float(np.abs(tilted).max())
        tilted = np.roll(np.maximum(tilted, 0.0) + eta * error, (first - bottom) % size)
        losses = (bottom + np.arange(size)) * width
        result: Array = tilted * np.exp(np.minimum(log_mass - order * losses, 700.0)) * (1.0 + 1e-13)
        return result
