"""What has been released, as the routes to (epsilon, delta) see it: a frozen, mixed ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lightning_lap2 import _validate
from lightning_lap2.accounting.release import Release
from lightning_lap2.choices import Bound


@dataclass(frozen=True)
class Composition:
    """Releases of one mechanism, with the number of times each was made.

    Attributes:
        mechanism: the name of a :class:`~lightning_lap2.accounting.family.Family`.
        bound: ``"tight"``, ``"joint"`` or ``"published"``.
        counts: (release, steps), each release once, in the order of their first charge.
    """

    mechanism: str
    bound: Bound
    counts: tuple[tuple[Release, int], ...] = ()

    @classmethod
    def of(cls, mechanism: str, bound: Bound, counts: Iterable[tuple[Release, int]]) -> Composition:
        """Build from any pairs (release, steps): equal releases are added up.

        Raises:
            ValueError: where there are more than 2**53 steps in total.
        """
        merged: dict[Release, int] = {}
        for release, steps in counts:
            merged[release] = merged.get(release, 0) + steps
        total = sum(merged.values())
        if total > _validate.MAX_STEPS:
            raise ValueError(f"steps must be an integer in [0, 2**53] in total, got {total}")
        return cls(mechanism, bound, tuple((r, t) for r, t in merged.items() if t))

    def adding(self, release: Release, steps: int) -> Composition:
        """This and ``steps`` more of ``release``, which comes last: routes keep what they know of the others."""
        others = tuple((r, t) for r, t in self.counts if r != release)
        before = sum(t for r, t in self.counts if r == release)
        return Composition.of(self.mechanism, self.bound, (*others, (release, before + steps)))

    @cached_property
    def steps(self) -> int:
        """Releases in total, free ones included."""
        return sum(steps for _, steps in self.counts)

    @cached_property
    def noisy(self) -> tuple[tuple[Release, int], ...]:
        """The releases that cost something and carry noise: what the routes account for."""
        return tuple((r, t) for r, t in self.counts if not (r.is_free or r.is_bare))

    @cached_property
    def bare_mass(self) -> float:
        """1 - prod (1 - q)^T over releases without noise: the chance that one of them reveals the example."""
        log_kept = 0.0
        for release, steps in self.counts:
            if release.is_bare:
                if release.sample_rate == 1.0:
                    return 1.0
                log_kept += steps * math.log1p(-release.sample_rate)
        return -math.expm1(log_kept)

    def after_bare(self, delta: float) -> float | None:
        """Delta left for the noisy releases, or None where the bare ones exceed it.

        A release without noise is (0, p)-DP; it composes to delta_total = p + (1 - p) delta_rest.
        """
        bare = self.bare_mass
        if bare == 0.0 or delta == 1.0:
            return delta
        return None if delta < bare else (delta - bare) / (1.0 - bare)
