"""What one release is: a frozen specification from which both the noise and the charge are made.

The noise that is drawn and the event that is charged come from the same object, so they cannot disagree.

================  =============  ==============  =====================================================
``mechanism``     clipping norm  noise           noise multiplier m (a scale over max_grad_norm C)
================  =============  ==============  =====================================================
``"laplace"``     l2             Laplace(0, b)   b / C; the standard deviation is sqrt(2) b
``"gaussian"``    l2             N(0, sigma^2)   sigma / C
``"laplace_l1"``  l1             Laplace(0, b)   b / C with C an l1 bound
================  =============  ==============  =====================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_lap2 import _validate

MechanismName = Literal["laplace", "gaussian", "laplace_l1"]
Norm = Literal["l1", "l2"]
Distribution = Literal["laplace", "gaussian"]

MECHANISMS: tuple[str, ...] = ("laplace", "gaussian", "laplace_l1")


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Noise and clipping of one release: ``sum of clipped gradients + noise(scale)``.

    Args:
        name: see the table above.
        max_grad_norm: C > 0, the norm each example's gradient is clipped to. ``inf`` only without noise.
        noise_multiplier: m >= 0, scale / C. 0 means no noise and no guarantee.
    """

    name: MechanismName
    max_grad_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _validate.choice("mechanism", self.name, MECHANISMS)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.non_negative("noise_multiplier", self.noise_multiplier)
        if math.isinf(self.max_grad_norm) and self.noise_multiplier > 0:
            raise ValueError(
                f"max_grad_norm=inf leaves the noise without a scale (noise_multiplier={self.noise_multiplier!r}); "
                "give a finite max_grad_norm, or noise_multiplier=0.0 with eps=inf for a run without privacy"
            )

    @property
    def scale(self) -> float:
        """b of the Laplace noise, or sigma of the Gaussian, in units of the gradient: m * C."""
        return self.noise_multiplier * self.max_grad_norm if self.noise_multiplier > 0 else 0.0

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise on one coordinate of the sum."""
        return self.scale if self.distribution == "gaussian" else math.sqrt(2) * self.scale

    @property
    def distribution(self) -> Distribution:
        return "gaussian" if self.name == "gaussian" else "laplace"

    @property
    def norm(self) -> Norm:
        return "l1" if self.name == "laplace_l1" else "l2"
