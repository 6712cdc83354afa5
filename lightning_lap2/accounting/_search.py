"""One-dimensional searches that keep a proven bracket."""

from __future__ import annotations

import math
from collections.abc import Callable


def last_affordable(cost: Callable[[int], float], budget: float, limit: int) -> int | float:
    """Largest k in [0, limit] with ``cost(k) <= budget``, for nondecreasing ``cost``; 0 where none, inf where all.

    The answer k is checked: cost(k) <= budget < cost(k + 1), as computed.
    """
    if not cost(1) <= budget:
        return 0
    low, high = 1, 1
    low_cost = high_cost = cost(1)
    while high_cost <= budget:
        if high >= limit:
            return math.inf
        low, low_cost = high, high_cost
        high = min(limit, max(high + 1, _guess(low, low_cost, budget)))
        high_cost = cost(high)
    return _bisect(cost, budget, (low, low_cost), (high, high_cost))


def _guess(k: int, spent: float, budget: float) -> int:
    """A little beyond where cost growing as k^0.6 meets the budget, between 2 and 64 times k."""
    growth = (budget / spent) ** (1.0 / 0.6) if spent > 0.0 else math.inf
    return int(k * min(64.0, max(2.0, 1.05 * growth)))


def _bisect(
    cost: Callable[[int], float], budget: float, below: tuple[int, float], above: tuple[int, float]
) -> int:
    low, low_cost = below
    high, high_cost = above
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        if turn % 3 != 2 and low_cost > 0.0 and low_cost < high_cost < math.inf:
            # Secant in log-log: cost is close to a power of k. One step in three halves the bracket regardless.
            slope = math.log(high / low) / math.log(high_cost / low_cost)
            target = low * (max(budget, low_cost) / low_cost) ** slope
            nudge = 1 if turn % 3 == 1 else 0  # land on the far side of the root, to close the bracket
            middle = min(max(int(target) + nudge, low + 1), high - 1)
        value = cost(middle)
        if value <= budget:
            low, low_cost = middle, value
        else:
            high, high_cost = middle, value
        turn += 1
    return low


def smallest_safe(
    cost: Callable[[float], float], budget: float, start: float, rtol: float, ceiling: float = 1e120
) -> float:
    """Smallest x > 0, up to a relative ``rtol`` above, with ``cost(x) <= budget`` for nonincreasing ``cost``.

    Returns ``math.inf`` where even ``ceiling`` is too little and 0.0 where 1 / ceiling is enough. The answer has been
    evaluated: cost(answer) <= budget, as computed.
    """
    low, high = start, start
    low_cost = high_cost = cost(start)
    factor = 2.0
    while high_cost > budget:
        if high >= ceiling:
            return math.inf
        low, low_cost = high, high_cost
        high, factor = min(ceiling, high * factor), factor * factor
        high_cost = cost(high)
    factor = 2.0
    while low_cost <= budget:
        if low <= 1.0 / ceiling:
            return 0.0
        high, high_cost = low, low_cost
        low, factor = max(1.0 / ceiling, low / factor), factor * factor
        low_cost = cost(low)
    turn = 0
    while high > low * (1.0 + rtol):
        middle = math.sqrt(low) * math.sqrt(high)
        if turn % 3 != 2 and high_cost > 0.0 and low_cost < math.inf and low_cost > high_cost:
            slope = math.log(high / low) / math.log(high_cost / low_cost)
            target = low * (max(budget, 1e-300) / low_cost) ** slope
            target *= 1.0 + (0.4 * rtol if turn % 3 == 0 else -0.4 * rtol)  # close the bracket from both sides
            middle = min(max(target, low * (1.0 + 0.2 * rtol)), high / (1.0 + 0.2 * rtol))
        value = cost(middle)
        if value <= budget:
            high, high_cost = middle, value
        else:
            low, low_cost = middle, value
        turn += 1
    return high
