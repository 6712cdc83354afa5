"""One-dimensional searches that keep a proven bracket."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Bracket:
    """Two positive points with the budget between their costs, and where to look next.

    Cost is close to a power of x, so the next point is a log-log secant, nudged past the root towards the end that
    did not move last; where two secants in a row have not halved the bracket (or a cost is 0 or inf), its middle.
    """

    budget: float
    near: tuple[float, float]  # (x, cost) at the end with the smaller x
    far: tuple[float, float]
    last: tuple[float, float] = (math.inf, math.inf)  # log-widths one and two evaluations ago
    moved_near: bool = False

    @property
    def width(self) -> float:
        return math.log(self.far[0]) - math.log(self.near[0])

    def propose(self, nudge: float) -> float:
        (a, cost_a), (b, cost_b) = self.near, self.far
        usable = min(cost_a, cost_b, self.budget) > 0.0 and cost_a != cost_b and max(cost_a, cost_b) < math.inf
        if not usable or self.width > 0.5 * self.last[1]:
            return math.sqrt(a) * math.sqrt(b)
        slope = self.width / (math.log(cost_b) - math.log(cost_a))
        target = a * math.exp(slope * (math.log(self.budget) - math.log(cost_a)))
        return target * (1.0 + nudge if self.moved_near else 1.0 - nudge)

    def move(self, x: float, cost: float, *, near: bool) -> None:
        self.last = (self.width, self.last[0])
        self.moved_near = near
        if near:
            self.near = (x, cost)
        else:
            self.far = (x, cost)


def last_affordable(cost: Callable[[int], float], budget: float, limit: int) -> int | float:
    """Largest k in [0, limit] with ``cost(k) <= budget``, for nondecreasing ``cost``; 0 where none, inf where all.

    The answer k is checked: cost(k) <= budget < cost(k + 1), as computed.
    """
    low, high = 1, 1
    low_cost = high_cost = cost(1)
    if not high_cost <= budget:
        return 0
    while high_cost <= budget:
        if high >= limit:
            return math.inf
        low, low_cost = high, high_cost
        ratio = min(budget / low_cost, 100.0) if low_cost > 0.0 else 100.0
        high = min(limit, max(low + 1, int(low * min(64.0, max(2.0, 1.05 * ratio ** (1.0 / 0.6))))))
        high_cost = cost(high)
    bracket = _Bracket(budget, (low, low_cost), (high, high_cost))
    while high - low > 1:
        middle = min(max(round(bracket.propose(nudge=1.0 / low)), low + 1), high - 1)
        value = cost(middle)
        fits = value <= budget
        bracket.move(middle, value, near=fits)
        low, high = (middle, high) if fits else (low, middle)
    return low


def smallest_safe(
    cost: Callable[[float], float],
    budget: float,
    start: float,
    rtol: float,
    growth: float = 2.0,
    ceiling: float = 1e120,
) -> float:
    """Smallest x > 0, up to a relative ``rtol`` above, with ``cost(x) <= budget`` for nonincreasing ``cost``.

    The bracket grows from ``start`` by ``growth``, its square, and so on. Returns ``math.inf`` where even ``ceiling``
    is too little and 1 / ceiling where that is enough. A finite answer has been evaluated: cost(answer) <= budget.
    """
    low, high = start, start
    low_cost = high_cost = cost(start)
    factor = growth
    while high_cost > budget:
        if high >= ceiling:
            return math.inf
        low, low_cost = high, high_cost
        high, factor = min(ceiling, high * factor), factor * factor
        high_cost = cost(high)
    factor = growth
    while low_cost <= budget:
        if low <= 1.0 / ceiling:
            return low
        high, high_cost = low, low_cost
        low, factor = max(1.0 / ceiling, low / factor), factor * factor
        low_cost = cost(low)
    bracket = _Bracket(budget, (low, low_cost), (high, high_cost))
    while high > low * (1.0 + rtol):
        middle = bracket.propose(nudge=0.4 * rtol)
        middle = min(max(middle, low * (1.0 + 0.2 * rtol)), high / (1.0 + 0.2 * rtol))
        value = cost(middle)
        fits = value <= budget
        bracket.move(middle, value, near=not fits)
        low, high = (low, middle) if fits else (middle, high)
    return high
