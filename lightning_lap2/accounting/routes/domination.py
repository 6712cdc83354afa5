r"""The second route: a step is dominated by a pair whose composition is computed numerically.

One coordinate shifted by x scales is mu*(x)-GDP with :math:`\mu^*(x) = -2 \Phi^{-1}(e^{-x/2} / 2)` and no smaller
mu; :math:`u \mapsto \mu^*(\sqrt u)^2` is concave, so a clipped step is :math:`\sqrt n \mu^*(\rho / \sqrt n)`-GDP.
Domination of trade-off functions survives Poisson subsampling and composition (docs/guarantee.md), so T steps
cost no more than T subsampled Gaussians with sigma = 1 / mu. For the baselines the pair is the mechanism itself.
Steps without sampling compose exactly, mu adding in squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.routes.pairs import Pair, dominating_pair, gdp_delta, gdp_epsilon, paired, summed_pair
from lightning_lap2.accounting.routes.profile import Profile
from lightning_lap2.accounting.routes.route import NOTHING, WIDTH_DELTA, GridRoute, Sides, profiles


class Domination(GridRoute):
    """Upper bounds from the Gaussian pairs that dominate the steps."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition, dominating_pair)

    def usable(self, delta: float) -> bool:
        """Also for unsampled Gaussian steps of any size, which are known in closed form."""
        return 0.0 < delta < 1.0 and (super().usable(delta) or self._alone() is not None)

    def epsilon(self, delta: float) -> Sides:
        """Upper bounds on epsilon at ``delta``, which :meth:`usable` accepted."""
        alone = self._alone()
        known = NOTHING if alone is None else Sides(*[gdp_epsilon(alone, delta)] * 2)
        return known if self._exact() else known.least(super().epsilon(delta))

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """Upper bounds on delta at ``eps``."""
        alone = self._alone()
        known = NOTHING if alone is None else Sides(*[gdp_delta(alone, eps)] * 2)
        return known if self._exact() else known.least(super().delta(eps, rival))

    def _exact(self) -> bool:
        return self._alone() is not None and len(self._variants) == 1

    def _alone(self) -> float | None:
        """mu where everything is one unsampled Gaussian step."""
        only = list(self._variants[-1])
        return only[0].parameter if len(only) == 1 and only[0].rate == 1.0 and not only[0].laplace else None

    def _epsilon(self, counts: Mapping[Pair, int], delta: float) -> Sides:
        return Sides(*(p.reaches(delta) * (1.0 + 1e-12) + p.drift for p in profiles(counts, delta)))

    def _delta(self, counts: Mapping[Pair, int], eps: float, grid: float) -> Sides:
        return Sides(*(_at(p, eps) for p in profiles(counts, grid, WIDTH_DELTA)))


class SummedDomination(Domination):
    """For l1 clipping: one Laplace coordinate with the summed shift of the blocks, which is exact for one block."""

    def __init__(self, composition: Composition) -> None:
        GridRoute.__init__(self, composition, summed_pair)


def _at(p: Profile, eps: float) -> float:
    return min(1.0, float(p(np.array([max(eps * (1.0 - 1e-12) - p.drift, 0.0)]))[0]))


class Variation:
    """Total variation: epsilon is 0 where the steps' distances add up to no more than delta.

    Args:
        composition: its noisy releases are accounted for.
        pair_of: the pair of a release under a mechanism, which dominates it.
    """

    def __init__(self, composition: Composition, pair_of: Callable[..., Pair] = dominating_pair) -> None:
        self._distance = sum(t * p.total_variation for p, t in paired(composition, pair_of).items())

    def usable(self, delta: float) -> bool:
        """Whether ``delta`` is above the distance."""
        return self._distance <= delta

    def epsilon(self, delta: float) -> Sides:
        """Zero."""
        return Sides(0.0, 0.0)

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """The distance, whatever ``eps``."""
        return Sides(*[min(1.0, self._distance)] * 2)


class SummedVariation(Variation):
    """For l1 clipping, by the pairs of :class:`SummedDomination`."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition, summed_pair)
