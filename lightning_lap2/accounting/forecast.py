"""Epsilon ahead of time: an upper bound at every step of a plan, for a few microseconds a query."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_lap2 import _validate
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.best import best_routes, epsilon_by
from lightning_lap2.accounting.routes.moments import INFINITE, ORDER_LEVELS, level_count, level_log_moments
from lightning_lap2.accounting.routes.orders import Orders

Array = npt.NDArray[np.float64]

_COARSE, _FINE = 12, 24


class EpsilonForecast:
    r"""Upper bound on epsilon after k further steps, 0 <= k <= ``steps``: see :meth:`epsilon`.

    Two bounds are combined. Every integer order gives a line, epsilon <= intercept + slope k, exact for that order.
    The accountant's own epsilon, with every sharpening, is known on a grid of k; it is nondecreasing in k, so its
    value at the next grid point bounds it in between. Made by
    :meth:`~lightning_lap2.accounting.MajorizedAccountant.forecast`.

    Attributes:
        steps: the last k of the plan.
        delta: the delta of every value.
    """

    def __init__(self, delta: float, grid: list[int], values: list[float], intercepts: Array, slopes: Array) -> None:
        self.delta = delta
        self.steps = grid[-1]
        self._grid = grid
        self._values = [float(v) for v in np.minimum.accumulate(np.asarray(values)[::-1])[::-1]]
        self._lines, self._from = _envelope(intercepts, slopes, self.steps)

    def epsilon(self, k: int) -> float:
        """Upper bound on epsilon after ``k`` further steps, in nats; nondecreasing in k, exact at k = ``steps``.

        Raises:
            ValueError: k is not in [0, ``steps``].
        """
        if not 0 <= k <= self.steps:
            raise ValueError(f"k must be an integer in [0, {self.steps}], got {k!r}")
        value = self._values[bisect_left(self._grid, k)]
        # every line is an upper bound; the neighbours of the lowest, in case rounding moved where they cross
        i = bisect_right(self._from, k)
        for intercept, slope in self._lines[max(0, i - 2) : i + 1]:
            value = min(value, max(0.0, intercept + k * slope))
        return value


@lru_cache(maxsize=16)
def build_forecast(composition: Composition, release: Release, steps: int, delta: float) -> EpsilonForecast:
    """Evaluate the routes on a grid of at most 39 points: see :class:`EpsilonForecast`.

    Kept, since every fit of a series of equal ones (cross-validation, an audit) asks for the same.
    """
    grid = _grid(steps)
    last, routes = best_routes(composition.adding(release, steps), delta)
    # what the best routes of the last step prove earlier: quick, and never below the best of all routes there
    values = [epsilon_by(composition.adding(release, k), delta, routes) for k in grid[:-1]] + [last]
    intercepts, slopes = _lines(composition, release, delta)
    return EpsilonForecast(delta, grid, values, intercepts, slopes)


def _envelope(intercepts: Array, slopes: Array, steps: int) -> tuple[list[tuple[float, float]], list[float]]:
    """The lines (intercept, slope) that are lowest somewhere on [0, ``steps``], from left to right, and where each
    begins to be."""
    lines: list[tuple[float, float]] = []
    begins: list[float] = []
    at = 0.0
    while intercepts.size and at <= steps:
        values = intercepts + at * slopes
        meeting = np.flatnonzero(values == values.min())
        lowest = int(meeting[slopes[meeting].argmin()])  # of lines that meet here the one that is lower from here on
        lines.append((float(intercepts[lowest]), float(slopes[lowest])))
        begins.append(at)
        flatter = slopes < slopes[lowest]
        crossings = (intercepts[flatter] - intercepts[lowest]) / (slopes[lowest] - slopes[flatter])
        intercepts, slopes = intercepts[flatter], slopes[flatter]
        if crossings.size:
            at = max(at, float(crossings.min()))
    return lines, begins


def _grid(steps: int) -> list[int]:
    """0, 1, then geometric to steps / 8, then evenly to ``steps``."""
    points = {0, min(1, steps), steps}
    knee = max(steps // 8, 1)
    points |= {int(knee ** (i / _COARSE)) for i in range(1, _COARSE + 1)}
    points |= {knee + (steps - knee) * i // _FINE for i in range(_FINE)}
    return sorted(p for p in points if p <= steps)


def _lines(composition: Composition, release: Release, delta: float) -> tuple[Array, Array]:
    """Intercept and slope in k of the epsilon of each usable integer order."""
    empty = np.zeros(0)
    remaining = composition.after_bare(delta)
    if remaining is None or not 0.0 < remaining < 1.0 or release.is_free or release.is_bare:
        return empty, empty
    intercepts, slopes = [empty], [empty]
    for level in range(min(level_count(composition.bound), 3)):
        orders = np.asarray(ORDER_LEVELS[level], dtype=np.float64)
        spent = Orders(composition).level(level)
        slope = level_log_moments(release, composition.mechanism, composition.bound, level)
        usable = (orders > 1.0) & (spent < INFINITE) & (slope < INFINITE / _validate.MAX_STEPS)
        orders, spent, slope = orders[usable], spent[usable], slope[usable]
        constant = -(math.log(remaining) + np.log(orders)) / (orders - 1.0) + np.log1p(-1.0 / orders)
        intercepts.append(spent / (orders - 1.0) + constant)
        slopes.append(slope / (orders - 1.0))
    rounding = 1.0 + 1e-14  # the accountant adds in another order
    return np.concatenate(intercepts) + 1e-14, np.concatenate(slopes) * rounding
