r"""The pure route: where the likelihood ratio is bounded, a step is (epsilon_0, 0)-DP."""

from __future__ import annotations

import math

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.family import family_of
from lightning_lap2.accounting.routes.route import Sides


class Pure:
    """Upper bounds on epsilon and delta from the largest possible likelihood ratio.

    Args:
        composition: its noisy releases are accounted for.
    """

    def __init__(self, composition: Composition) -> None:
        self._pure = _largest_loss(composition)

    def usable(self, delta: float) -> bool:
        """Whether the ratio is bounded at all."""
        return self._pure < math.inf

    def epsilon(self, delta: float) -> Sides:
        """Upper bound on epsilon at ``delta``, the same in both directions."""
        return Sides(*[pure_epsilon(self._pure, delta)] * 2)

    def delta(self, eps: float, rival: float = 1.0) -> Sides:
        """Upper bound on delta at ``eps``."""
        return Sides(*[pure_delta(self._pure, eps)] * 2)


def _largest_loss(composition: Composition) -> float:
    """Pure epsilon of the composition, rounded up."""
    largest_loss = family_of(composition.mechanism).largest_loss
    total = 0.0
    for release, steps in composition.noisy:
        loss = sum(largest_loss(n, rho) for n, rho in release.blocks)
        total += steps * pure_step(release.sample_rate, loss) * (1.0 + 4e-15)
    return total


def pure_step(rate: float, loss: float) -> float:
    r"""log(1 + q (e^x - 1)), the pure epsilon of a sampled release whose l1 sensitivity is x noise scales."""
    if loss < 1.0:
        return math.log1p(rate * math.expm1(loss))
    return loss + math.log(rate + (1.0 - rate) * math.exp(-loss))


def pure_epsilon(pure: float, delta: float) -> float:
    r"""Smallest epsilon at ``delta`` that follows from (pure, 0)-DP.

    Randomised response with this parameter dominates, whose profile is
    delta(eps) = (e^pure - e^eps) / (1 + e^pure), so eps = pure + log(1 - delta (1 + e^-pure)).
    """
    if delta == 0.0 or math.isinf(pure):
        return pure
    kept = 1.0 - delta * (1.0 + math.exp(-pure))
    eps = pure + math.log(kept) if kept > 0.0 else 0.0
    return min(pure, max(0.0, eps * (1.0 + 4e-16)))  # rounded up


def pure_delta(pure: float, eps: float) -> float:
    """Smallest delta at ``eps`` that follows from (pure, 0)-DP; see :func:`pure_epsilon`."""
    if math.isinf(pure):
        return 1.0
    return -math.expm1(eps - pure) / (1.0 + math.exp(-pure)) if eps < pure else 0.0
