r"""Lower bounds on epsilon: the exact composition of one fixed gradient, every error on the low side.

One coordinate shifted by x has the loss L = -x (z < 0), x (z > x) and 2z - x between. Merging outputs is
post-processing, so it can only lower epsilon; merging the interval of losses (a, b) of one coordinate gives exactly the
loss (a + b) / 2, since the two densities are e^{L/2} and e^{-L/2} times a constant.

The loss of a sampled step, log(1 - q + q e^L) under the mixture, is rounded to the nearest point of a grid of width h
and shifted so that its mean is kept. The errors of T steps are independent, of mean zero and within an interval of
length h, so by Hoeffding's inequality their sum exceeds t = h sqrt(T log(1/eta) / 2) with probability at most eta:
delta(eps) >= delta_grid(eps + t) - eta.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import fft

Array = npt.NDArray[np.float64]

_CELLS = 4000
_MAX_POINTS = 1 << 20
_OUTSIDE = 1e-13


def one_coordinate_epsilon(m: float, rate: float, steps: int, delta: float) -> float:
    """Lower bound on the epsilon of g = (C, 0, ..., 0)."""
    x = 1.0 / m
    edges = np.linspace(-x, x, _CELLS + 1)
    inside = 0.5 * np.diff(np.exp(0.5 * (edges - x)))
    loss = np.concatenate([[-x], 0.5 * (edges[1:] + edges[:-1]), [x]])
    return _composed(loss, np.concatenate([[0.5 * math.exp(-x)], inside, [0.5]]), rate, steps, delta)


def even_spread_epsilon(m: float, rate: float, steps: int, dimension: int, delta: float) -> float:
    """Lower bound on the epsilon of g = (C, ..., C) / sqrt n: each coordinate merged to the losses -x, 0 and x."""
    x = 1.0 / (m * math.sqrt(dimension))
    down, up = 0.5 * math.exp(-x), 0.5
    mean = dimension * (up - down)
    reach = math.ceil((10.0 + 1.0 / m) * math.sqrt(dimension))
    size = fft.next_fast_len(2 * reach + 1, real=True)
    one = np.zeros(size)
    one[[0, 1, -1]] = -0.5 * math.expm1(-x), up, down
    mass = fft.irfft(fft.rfft(one) ** dimension, size)
    first = round(mean) - reach
    index = first + np.arange(size)
    mass = np.maximum(mass[index % size], 0.0)
    kept = (np.abs(index) <= reach - abs(first + reach)) & (np.abs(index) <= dimension)  # as far down as up
    return _composed(index[kept] * x, mass[kept], rate, steps, delta)


def _composed(loss: Array, upper: Array, rate: float, steps: int, delta: float) -> float:
    """Lower bound on epsilon of ``steps`` sampled steps whose loss without sampling is ``loss`` with probability
    ``upper`` under the shifted measure; mass that is missing from ``upper`` counts as loss -inf.

    ``loss`` is symmetric about 0, and so is the pair: under the base measure the probabilities are those of -loss.
    """
    upper = upper / max(1.0, float(upper.sum()))
    mass = rate * upper + (1.0 - rate) * upper[::-1]
    sampled = np.log1p(rate * np.expm1(np.minimum(loss, 600.0))) if rate < 1.0 else loss
    kept = mass > 0.0
    mass, sampled = mass[kept], sampled[kept]
    mean = float(mass @ sampled) / float(mass.sum())
    deviation = math.sqrt(float(mass @ (sampled - mean) ** 2) / float(mass.sum()))
    bottom, top = _range(sampled, mass, steps)
    span = float(sampled.max() - sampled.min())
    width = max(deviation / 400.0, (top - bottom) / (0.45 * _MAX_POINTS), span / (0.9 * _MAX_POINTS))
    index = np.rint(sampled / width).astype(np.int64)
    shift = float(mass @ (sampled - index * width)) / float(mass.sum())
    lowest = int(index.min())
    size = fft.next_fast_len(max(math.ceil((top - bottom) / width) + 2, int(index.max()) - lowest + 2), real=True)
    spectrum = fft.rfft(np.bincount(index - lowest, weights=mass), size) ** steps
    total = fft.irfft(spectrum, size)
    start = math.floor((bottom - steps * shift) / width)
    total = np.maximum(np.roll(total, (steps * lowest - start) % size) - 1e-17 * steps**0.5 - 1e-18, 0.0)
    losses = (start + np.arange(size)) * width + steps * shift
    eta = 1e-3 * delta
    slip = width * math.sqrt(0.5 * steps * math.log(1.0 / eta))
    return float(max(0.0, _epsilon(losses, total, delta + eta + 2.0 * _OUTSIDE) - slip))


def _range(loss: Array, mass: Array, steps: int) -> tuple[float, float]:
    """Chernoff: an interval that the sum of ``steps`` losses leaves with probability below ``_OUTSIDE`` a side."""
    need = -math.log(_OUTSIDE)
    deviation = math.sqrt(float(mass @ loss**2)) * math.sqrt(steps)
    bounds: list[list[float]] = [[], []]
    for side, sign in enumerate((-1.0, 1.0)):
        for s in np.geomspace(min(0.1 / deviation, 0.5), 300.0 / deviation, 50):
            exponent = sign * s * loss
            highest = float(exponent.max())
            log_moment = highest + math.log(float(mass @ np.exp(exponent - highest)))
            bounds[side].append((steps * log_moment + need) / s)
    return -min(bounds[0]), min(bounds[1])


def _epsilon(loss: Array, mass: Array, delta: float) -> float:
    """Smallest eps >= 0 with sum of mass (1 - e^{eps - loss})_+ <= delta, by bisection, rounded down."""
    low, high = 0.0, max(float(loss[-1]), 0.0)

    def at(eps: float) -> float:
        above = loss > eps
        return float(mass[above] @ -np.expm1(eps - loss[above]))

    if at(0.0) <= delta:
        return 0.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if at(middle) > delta else (low, middle)
    return low
