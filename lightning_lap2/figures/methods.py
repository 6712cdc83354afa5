"""What is compared: a mechanism with the bound its epsilon comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_lap2.accounting import NoFiniteNoiseError, calibrate_noise_multiplier, family_of


@dataclass(frozen=True)
class Method:
    """One curve or one row.

    Attributes:
        label: for people.
        mechanism, bound: as in :class:`~lightning_lap2.accounting.MajorizedAccountant`.
        scaled: factor on the noise multiplier that the others are given.
    """

    label: str
    mechanism: str
    bound: str
    scaled: float = 1.0

    @property
    def valid(self) -> bool:
        """Whether what the bound says is an upper bound on the privacy loss."""
        return self.bound != "published"


LAP2 = (
    Method("Lap2 tight", "laplace", "tight"),
    Method("Lap2 joint", "laplace", "joint"),
    Method("Lap2 published (not a valid bound)", "laplace", "published"),
)
GAUSSIAN = Method("Gaussian", "gaussian", "tight")
LAPLACE_L1 = Method("Laplace l1 clipping", "laplace_l1", "tight")


def smallest_multiplier(method: Method, *, eps: float, **plan: Any) -> float:
    """Calibrated noise multiplier; ``inf`` where no finite noise meets ``eps``."""
    try:
        return calibrate_noise_multiplier(eps=eps, mechanism=method.mechanism, bound=method.bound, **plan)
    except NoFiniteNoiseError:
        return math.inf


def deviation(mechanism: str, scale: float) -> float:
    """Standard deviation of noise of that scale: sigma itself, sqrt(2) b of Laplace noise."""
    return family_of(mechanism).noise.standard_deviation * scale


def signal_to_noise(multiplier: float) -> float:
    """C / scale."""
    return 1.0 / multiplier if multiplier > 0.0 else math.inf
