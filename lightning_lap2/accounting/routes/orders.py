"""The route by moments: Renyi orders, added over steps and converted."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.conversion import (
    MomentCurve,
    Objective,
    epsilon_objective,
    log_delta_objective,
    minimise,
)
from lightning_lap2.accounting.routes.moments import (
    INFINITE,
    ORDER_LEVELS,
    level_count,
    level_log_moments,
    real_table,
)
from lightning_lap2.accounting.routes.route import Sides

Array = npt.NDArray[np.float64]


class Orders:
    """Upper bounds on epsilon and delta from the moments of the likelihood ratio; see :mod:`.conversion`.

    Args:
        composition: its noisy releases are accounted for.
        plain: integer orders only, without the sharpenings.
    """

    def __init__(self, composition: Composition, *, plain: bool = False) -> None:
        self._composition = composition
        self._interpolate = not plain and composition.bound != "published"

    def usable(self, delta: float) -> bool:
        """Whether the moments say anything at ``delta``."""
        return delta > 0.0

    def epsilon(self, delta: float) -> Sides:
        """Upper bound on epsilon at ``delta``, which :meth:`usable` accepted, the same in both directions (Lemma 1)."""
        value = max(0.0, self._minimise(epsilon_objective(delta))[0])
        return Sides(*[value if value < INFINITE else math.inf] * 2)

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """Upper bound on delta at a finite ``eps``."""
        return Sides(*[math.exp(min(0.0, self._minimise(log_delta_objective(min(eps, 1e100)))[0]))] * 2)

    def best_order(self, delta: float) -> float:
        """The order that gives the smallest epsilon; inf where every moment is infinite."""
        return self._minimise(epsilon_objective(delta))[1]

    def level(self, level: int) -> Array:
        """A at every order of ``ORDER_LEVELS[level]``."""
        return np.sum([np.zeros(len(ORDER_LEVELS[level])), *self._of_each(self._composition.noisy, level)], axis=0)

    def _of_each(self, counts: Iterable[tuple[Release, int]], level: int) -> list[Array]:
        mechanism, bound = self._composition.mechanism, self._composition.bound
        return [steps * level_log_moments(release, mechanism, bound, level) for release, steps in counts]

    def _whole(self, counts: Iterable[tuple[Release, int]], orders: Array) -> list[Array]:
        """A of each kind at real orders, as if it were not sampled."""
        mechanism, bound = self._composition.mechanism, self._composition.bound
        return [t * real_table(orders, release, mechanism, bound) * (1.0 + 4e-15) for release, t in counts]

    def _minimise(self, objective: Objective) -> tuple[float, float]:
        sampled = [(r, t) for r, t in self._composition.noisy if r.sample_rate < 1.0]
        unsampled = [(r, t) for r, t in self._composition.noisy if r.sample_rate == 1.0]
        curve = MomentCurve(
            level=self.level,
            levels=level_count(self._composition.bound),
            sampled=lambda level: np.reshape(self._of_each(sampled, level), (len(sampled), len(ORDER_LEVELS[level]))),
            unsampled=lambda orders: np.sum([np.zeros_like(orders), *self._whole(unsampled, orders)], axis=0),
            ceiling=lambda orders: np.reshape(self._whole(sampled, orders), (len(sampled), orders.size)),
            interpolate=self._interpolate,
        )
        return minimise(curve, objective)
