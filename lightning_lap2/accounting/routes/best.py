"""The smallest number that any route proves."""

from __future__ import annotations

import math

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.routes.comparison import Comparison, compared_pair
from lightning_lap2.accounting.routes.domination import Domination, dominating_pair
from lightning_lap2.accounting.routes.orders import Orders
from lightning_lap2.accounting.routes.pure import Pure


def best_epsilon(composition: Composition, delta: float) -> float:
    """Smallest provable epsilon of ``composition`` at ``delta`` in [0, 1]."""
    return _epsilon(composition, delta, quick=False)


def quick_epsilon(composition: Composition, delta: float) -> float:
    """:func:`best_epsilon` without domination: milliseconds, never smaller."""
    return _epsilon(composition, delta, quick=True)


def _epsilon(composition: Composition, delta: float, quick: bool) -> float:
    remaining = composition.after_bare(delta)
    if remaining is None:
        return math.inf
    if remaining >= 1.0 or not composition.noisy:
        return 0.0
    if composition.bound == "published":
        return orders_epsilon(composition, remaining)
    value = min(
        route.epsilon(remaining) if route.usable(remaining) else math.inf
        for route in (Orders(composition), Pure(composition))
    )
    comparison = Comparison.of(composition)
    if value > 0.0 and comparison is not None and comparison.usable(remaining):
        value = min(value, comparison.epsilon(remaining))
    domination = None if quick else Domination.of(composition)
    if domination is None or value == 0.0 or not domination.usable(remaining):
        return value
    if _outdone(composition, domination, remaining) or domination.hopeless(remaining, value):
        return value
    return min(value, domination.epsilon(remaining))


def orders_epsilon(composition: Composition, delta: float) -> float:
    """Plain minimum over integer orders."""
    remaining = composition.after_bare(delta)
    if remaining is None:
        return math.inf
    if remaining >= 1.0 or not composition.noisy:
        return 0.0
    route = Orders(composition, plain=True)
    return route.epsilon(remaining) if route.usable(remaining) else math.inf


def best_delta(composition: Composition, eps: float) -> float:
    """Smallest provable delta of ``composition`` at ``eps`` in [0, inf]."""
    bare = composition.bare_mass
    if not composition.noisy or math.isinf(eps):
        return bare
    value = Orders(composition).delta(eps)
    if composition.bound != "published":
        value = min(value, Pure(composition).delta(eps))
        comparison, domination = Comparison.of(composition), Domination.of(composition)
        if comparison is not None:
            value = comparison.delta(eps, value)
        if domination is not None and not _outdone(composition, domination, value):
            value = min(value, domination.delta(eps, value))
    return min(1.0, bare + (1.0 - bare) * value)


def _outdone(composition: Composition, route: Domination, delta: float) -> bool:
    """Whether domination surely loses to the comparison, whose pairs are closer together: a screen that saves
    time, never validity. Measured: true where the parameters differ by 15 %, delta well below total variation."""
    if composition.mechanism != "laplace" or delta > 0.1 * route.total_variation():
        return False
    comparison = Comparison.of(composition)
    if comparison is None or not comparison.usable(delta):
        return False
    return all(
        dominating_pair(r, composition.mechanism).parameter >= 1.15 * compared_pair(r, composition.mechanism).parameter
        for r, _ in composition.noisy
    )
