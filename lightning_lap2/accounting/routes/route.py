"""The one shape of the routes to (epsilon, delta), and what the routes on a grid share."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.routes.pairs import Pair, merged, paired
from lightning_lap2.accounting.routes.profile import FORWARD, REVERSE, Profile, profile, resolvable

_GRID_DELTAS = tuple(10.0 ** -(1.5**i) for i in range(13))
"""Where delta is sought: a grid made for one of these serves down to the next."""
WIDTH_DELTA = 1e-8
"""All of these grids have the same width, so that it does not matter where the search begins."""
_LARGE_RATE, _MOST_VARIANTS = 0.5, 3


class Sides(NamedTuple):
    """Upper bounds in the two directions of add or remove: the events are weighed with the example (forward) or
    without it (reverse). What holds for both is the larger, but each may be proved by a route of its own."""

    forward: float
    reverse: float

    def least(self, other: Sides) -> Sides:
        """The smaller of two proved bounds, direction by direction."""
        return Sides(min(self.forward, other.forward), min(self.reverse, other.reverse))


NOTHING = Sides(math.inf, math.inf)


class Route(Protocol):
    """Upper bounds for one composition."""

    def usable(self, delta: float) -> bool:
        """Whether the route has an epsilon at ``delta``; true for every smaller composition and larger delta."""
        ...

    def epsilon(self, delta: float) -> Sides:
        """Upper bounds on epsilon at ``delta``, which :meth:`usable` accepted."""
        ...

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """Upper bounds on delta at a finite ``eps`` >= 0; larger ones than ``rival`` need not be tight."""
        ...


class GridRoute(ABC):
    """A route through the hockey sticks of pairs, one for each step, composed on a grid.

    Args:
        composition: its noisy releases are accounted for.
        pair_of: the pair of a release under a mechanism.
    """

    def __init__(self, composition: Composition, pair_of: Callable[..., Pair]) -> None:
        counts = paired(composition, pair_of)
        # Unsampled steps merge into one, which is rounded once. So that nearly unsampled ones do not cost more, the
        # largest rates are also taken as 1: those above one rate of the ledger after the other.
        rates = sorted({p.rate for p in counts if _LARGE_RATE <= p.rate < 1.0}, reverse=True)
        self._variants = [merged(counts)]
        for least in rates[:_MOST_VARIANTS]:
            full: dict[Pair, int] = {}
            for p, steps in counts.items():
                raised = Pair(p.parameter, 1.0 if p.rate >= least else p.rate, p.laplace)
                full[raised] = full.get(raised, 0) + steps
            self._variants.append(merged(full))

    def usable(self, delta: float) -> bool:
        """Whether some variant can be put on a grid."""
        return any(resolvable(counts, delta) for counts in self._variants)

    def epsilon(self, delta: float) -> Sides:
        """Upper bounds on epsilon at ``delta``, which :meth:`usable` accepted."""
        best = NOTHING
        for counts in self._variants:
            if resolvable(counts, delta):
                best = best.least(self._epsilon(counts, delta))
        return best

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """Upper bounds on delta at ``eps``: the least over grids for smaller and smaller delta, from ``rival`` on."""
        best = Sides(1.0, 1.0)
        for counts in self._variants:
            for grid, following in itertools.pairwise(_GRID_DELTAS):
                if following < rival and resolvable(counts, grid):
                    best = best.least(self._delta(counts, eps, grid))
                    if max(best) >= following:
                        break
        return best

    @abstractmethod
    def _epsilon(self, counts: Mapping[Pair, int], delta: float) -> Sides:
        """Epsilon of one variant."""

    @abstractmethod
    def _delta(self, counts: Mapping[Pair, int], eps: float, grid: float) -> Sides:
        """Delta of one variant, on the grid made for the delta ``grid``."""


def profiles(counts: Mapping[Pair, int], delta: float, width_delta: float | None = None) -> tuple[Profile, Profile]:
    """Both directions; arguments as :func:`~lightning_lap2.accounting.routes.profile.profile`.

    Without sampling they are equal: the reflection that exchanges the two distributions of a step turns its ratio into
    the inverse.
    """
    forward = profile(counts, delta, FORWARD, width_delta)
    if all(p.rate == 1.0 for p in counts):
        return forward, forward
    return forward, profile(counts, delta, REVERSE, width_delta)


def least_delta(epsilon: Callable[[float], float], eps: float) -> float:
    """Smallest delta in [1e-300, 1] with ``epsilon(delta) <= eps``, for nonincreasing ``epsilon``, rounded up."""
    low, high = math.log(1e-300), 0.0
    for _ in range(45):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if epsilon(math.exp(middle)) <= eps else (middle, high)
    return min(1.0, math.exp(high))
