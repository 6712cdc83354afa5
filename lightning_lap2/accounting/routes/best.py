"""The smallest number that any route proves: every route that can answer is asked, and the values are compared.

A release without noise is set aside first; see :meth:`~lightning_lap2.accounting.composition.Composition.after_bare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from typing_extensions import assert_never

from lightning_lap2._registry import Registry
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.family import family_of
from lightning_lap2.accounting.routes.domination import Variation
from lightning_lap2.accounting.routes.orders import Orders
from lightning_lap2.accounting.routes.pure import Pure
from lightning_lap2.accounting.routes.route import NOTHING, Route, Sides

Maker = Callable[[Composition], Route]


ROUTES: Registry[tuple[tuple[str, ...], Maker]] = Registry("route", {}, on_trust=True)


def register_route(name: str, make: Maker, *, mechanisms: Collection[str]) -> None:
    """Asks one route more wherever ``bound="tight"`` is proven for one of ``mechanisms``, in this process.

    Nothing here can check that what it answers is an upper bound: the smallest answer counts, so one that is too small
    is an epsilon that is too small. The report of every run in this process names it.

    Args:
        name: for reports.
        make: from a :class:`~lightning_lap2.accounting.composition.Composition` to a
            :class:`~lightning_lap2.accounting.routes.route.Route`.
        mechanisms: that it is valid for.

    Raises:
        TypeError, ValueError: a name that is taken, or a mechanism that is not known.
    """
    ROUTES.add(name, (tuple(family_of(mechanism).name for mechanism in mechanisms), make))


def routes_of(composition: Composition) -> tuple[Maker, ...]:
    """The routes that are valid for a mechanism and bound, the quick ones first."""
    match composition.bound:
        case "published":
            return (plain_orders,)
        case "joint":
            return Orders, Pure
        case "tight":
            family = family_of(composition.mechanism)
            stated = (Orders, Pure) if family.gdp is None else (Orders, Pure, Variation)
            added = (make for names, make in ROUTES.values() if family.name in names)
            return (*stated, *family.routes(composition), *added)
        case _:
            assert_never(composition.bound)


def plain_orders(composition: Composition) -> Orders:
    """Integer orders only."""
    return Orders(composition, plain=True)


def best_epsilon(composition: Composition, delta: float, enough: float = 0.0) -> float:
    """Smallest provable epsilon of ``composition`` at ``delta`` in [0, 1].

    Args:
        enough: the search through the routes may stop at a value no larger than this: what comes out then is proved
            and at most ``enough``, though not the smallest.
    """
    return _epsilon(composition, delta, routes_of(composition), enough)[0]


def orders_epsilon(composition: Composition, delta: float) -> float:
    """Plain minimum over integer orders."""
    return _epsilon(composition, delta, (plain_orders,), 0.0)[0]


def best_routes(composition: Composition, delta: float) -> tuple[float, tuple[Maker, ...]]:
    """Epsilon, and the routes that give it in either direction."""
    value, winners = _epsilon(composition, delta, routes_of(composition), 0.0)
    return value, winners


def epsilon_by(composition: Composition, delta: float, makers: Iterable[Maker]) -> float:
    """Smallest epsilon that ``makers`` prove; never below :func:`best_epsilon`."""
    return _epsilon(composition, delta, tuple(makers), 0.0)[0]


def _epsilon(
    composition: Composition, delta: float, makers: tuple[Maker, ...], enough: float
) -> tuple[float, tuple[Maker, ...]]:
    remaining = composition.after_bare(delta)
    if remaining is None:
        return math.inf, ()
    if remaining >= 1.0 or not composition.noisy:
        return 0.0, ()
    best, forward, reverse = NOTHING, None, None
    for make in makers:
        route = make(composition)
        value = route.epsilon(remaining) if route.usable(remaining) else NOTHING
        if value.forward < best.forward:
            forward = make
        if value.reverse < best.reverse:
            reverse = make
        best = best.least(value)
        if max(best) <= enough:
            break
    return max(best), tuple(make for make in dict.fromkeys((forward, reverse)) if make is not None)


def best_delta(composition: Composition, eps: float) -> float:
    """Smallest provable delta of ``composition`` at ``eps`` in [0, inf]."""
    bare = composition.bare_mass
    if not composition.noisy or math.isinf(eps):
        return bare
    best = Sides(1.0, 1.0)
    for make in routes_of(composition):
        best = best.least(make(composition).delta(eps, max(best)))
    return min(1.0, bare + (1.0 - bare) * max(best))
