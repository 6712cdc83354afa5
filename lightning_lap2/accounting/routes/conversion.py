r"""From log-moments to (epsilon, delta).

With A(a) = sum over steps of log E[ratio^a] at order a > 1, Renyi differential privacy gives (Balle, Barthe,
Gaboardi, Hsu, Sato 2020, Theorem 21)

.. math::
    \varepsilon(\delta) &= \max(0, \min_a [ A(a) + (a-1) \log((a-1)/a) - \log\delta - \log a ] / (a-1)), \\
    \delta(\varepsilon) &= \min(1, \min_a \exp( A(a) - (a-1)\varepsilon + (a-1)\log(a-1) - a \log a )).

A is convex (the log of a moment), so it lies below its chords: A may be interpolated linearly between integer
orders, and is exact at real orders for steps without sampling. Writing h(a) for the bracket, h is convex, so
h(a) / (a - 1) is quasi-convex and a local minimum is the minimum: the search over orders stops there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting.routes.moments import INFINITE, ORDER_LEVELS

Array = npt.NDArray[np.float64]
Objective = Callable[[Array, Array], Array]
"""(orders, A at these orders) -> what is minimised over orders."""


@dataclass(frozen=True)
class MomentCurve:
    """A(a) of a composition, as far as it has been computed.

    Args:
        level: ``level(i)`` is A at the integer orders ``ORDER_LEVELS[i]``, all steps together.
        levels: number of levels.
        sampled: like ``level``, of each kind of step known at integers only (with sampling), shape [kinds, orders].
        unsampled: A of the other steps at real orders.
        ceiling: A of the sampled kinds at real orders if they were not sampled, shape [kinds, orders]: never smaller.
        interpolate: whether orders between the integers may be used.
    """

    level: Callable[[int], Array]
    levels: int
    sampled: Callable[[int], Array]
    unsampled: Callable[[Array], Array]
    ceiling: Callable[[Array], Array]
    interpolate: bool


def epsilon_objective(delta: float) -> Objective:
    """The bracket of epsilon(delta) above, for 0 < delta <= 1."""
    log_delta = math.log(delta)

    def objective(orders: Array, moments: Array) -> Array:
        above = orders - 1.0
        return (moments - log_delta - np.log(orders)) / above + np.log1p(-1.0 / orders)

    return objective


def log_delta_objective(eps: float) -> Objective:
    """The exponent of delta(epsilon) above, for finite eps >= 0."""

    def objective(orders: Array, moments: Array) -> Array:
        above = orders - 1.0
        return moments - above * eps + above * np.log1p(-1.0 / orders) - np.log(orders)

    return objective


def minimise(curve: MomentCurve, objective: Objective) -> tuple[float, float]:
    """Minimum of ``objective`` over orders and the order that attains it; (inf, inf) where every moment is infinite.

    Integer orders first, level by level while the minimum sits at the upper end; then, where the curve allows
    it, real orders between the two neighbours of the best integer.
    """
    orders: list[Array] = []
    sampled: list[Array] = []
    values: list[Array] = []
    best = 0
    for i in range(curve.levels):
        grid, moments = np.asarray(ORDER_LEVELS[i], dtype=np.float64), curve.level(i)
        usable = (grid > 1.0) & (moments < INFINITE)
        value = np.full(grid.size, np.inf)
        value[usable] = objective(grid[usable], moments[usable])
        orders.append(grid)
        values.append(value)
        if curve.interpolate:
            sampled.append(curve.sampled(i))
        joined = np.concatenate(values)
        best = int(np.argmin(joined))
        if best < joined.size - 1:
            break
    every = np.concatenate(orders)
    minimum, order = float(joined[best]), float(every[best])
    if curve.interpolate:
        around = slice(max(best - 1, 0), best + 2)
        fine, at = _refine(curve, objective, every[around], np.concatenate(sampled, axis=1)[:, around])
        if fine < minimum:
            minimum, order = fine, at
    return minimum, order if minimum < math.inf else math.inf


def _refine(curve: MomentCurve, objective: Objective, knots: Array, sampled: Array) -> tuple[float, float]:
    """Minimise over real orders in [knots[0], knots[-1]]: a 33-point grid, narrowed five times.

    A kind of sampled steps lies below its chords and below what it would be without sampling, of which the smaller is
    taken: else epsilon would fall where a rate reaches 1 and its moments become known at real orders.
    """
    low, high = float(knots[0]), float(knots[-1])
    low = max(low, 1.0 + 1e-6 * (high - 1.0))
    minimum, order = math.inf, math.inf
    for _ in range(5):
        grid = np.linspace(low, high, 33)
        moments = curve.unsampled(grid)
        for chords, whole in zip(sampled, curve.ceiling(grid), strict=True):
            moments = moments + np.minimum(np.interp(grid, knots, chords), whole)
        usable = moments < INFINITE
        if not usable.any():
            break
        value = np.where(usable, objective(grid, np.where(usable, moments, 0.0)), np.inf)
        i = int(np.argmin(value))
        if value[i] < minimum:
            minimum, order = float(value[i]), float(grid[i])
        low, high = float(grid[max(i - 1, 0)]), float(grid[min(i + 1, grid.size - 1)])
    return minimum, order
