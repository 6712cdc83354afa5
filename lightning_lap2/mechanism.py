"""What one release is: a frozen specification from which both the noise and the charge are made.

The noise that is drawn and the event that is charged come from the same object, so they cannot disagree.

================  =============  ==============  =====================================================
``mechanism``     clipping norm  noise           noise multiplier m (a scale over max_grad_norm C)
================  =============  ==============  =====================================================
``"laplace"``     l2             Laplace(0, b)   b / C; the standard deviation is sqrt(2) b
``"gaussian"``    l2             N(0, sigma^2)   sigma / C
``"laplace_l1"``  l1             Laplace(0, b)   b / C with C an l1 bound
================  =============  ==============  =====================================================

Two refinements change what is charged, not how it is noised: one scale for every coordinate that is released.

* *Layers.* The gradient is clipped in L parts, each to ``layer_norm``: C / sqrt(L) in l2, C / L in l1, so the whole is
  within C. The charge is that of L blocks (docs/guarantee.md, "Composite releases").
* *A count.* One more coordinate holds a sum to which each example adds at most 1/2 in absolute value. It is multiplied
  by ``count_factor`` before the noise and divided by it after, so noise of the common scale becomes noise of scale
  ``count_noise_scale`` on the count.

*Floating point.* C is charged, and gradients are clipped to a little less: ``clip_norm``. What is left of C pays for
the rounding of the sum and of the noise (docs/guarantee.md, section 11). All clippers take their bound from here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from lightning_lap2 import _validate
from lightning_lap2.accounting import Family, Noise, family_of
from lightning_lap2.accounting.release import Release
from lightning_lap2.choices import Norm

COUNT_SENSITIVITY = 0.5
"""What one example adds to the count at most: +1/2 below the threshold, -1/2 above (Andrew et al. 2021)."""

MARGIN = 2.0**-10
"""The least share of C that is kept for rounding: half for the sum, half for the noise of ordinary n and m."""

GRID_SHIFT = 2.0**-32
"""By how many scales the float64 noise on a coordinate is off at most, as a shift (docs/guarantee.md, Theorem 8)."""

LARGEST_COUNT_NOISE = 2.0**29
"""In examples; :data:`GRID_SHIFT` would make half of the count's own sensitivity at twice as much."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Noise and clipping of one release: ``sum of clipped gradients + noise(scale)``.

    Args:
        name: see the table above, or a registered one (:func:`~lightning_lap2.accounting.register_mechanism`).
        max_grad_norm: C > 0, the norm each example's gradient is clipped to. ``inf`` only without noise.
        noise_multiplier: m >= 0, scale / C. 0 means no noise and no guarantee.
        layer_sizes: coordinates of each separately clipped part; empty: the gradient is one part.
        count_noise_scale: noise on the count, in examples (b of Laplace, sigma of Gaussian noise); ``None``: no count
            is released. 0 only where ``noise_multiplier`` is 0.
        margin: share of C that gradients are kept away from it; see :meth:`for_sum`.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.
    """

    name: str
    max_grad_norm: float
    noise_multiplier: float
    layer_sizes: tuple[int, ...] = ()
    count_noise_scale: float | None = None
    margin: float = MARGIN

    def __post_init__(self) -> None:
        family_of(self.name)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.non_negative("noise_multiplier", self.noise_multiplier)
        if math.isinf(self.max_grad_norm) and self.noise_multiplier > 0:
            raise ValueError(
                f"max_grad_norm=inf leaves the noise without a scale (noise_multiplier={self.noise_multiplier!r}); "
                "give a finite max_grad_norm, or noise_multiplier=0.0 with eps=inf for a run without privacy"
            )
        if self.count_noise_scale is not None:
            _validate.non_negative("count_noise_scale", self.count_noise_scale)
            if (self.count_noise_scale == 0) != (self.noise_multiplier == 0):
                raise ValueError(
                    f"count_noise_scale={self.count_noise_scale!r} with noise_multiplier={self.noise_multiplier!r}: "
                    "either both add noise or neither does"
                )
            if self.count_noise_scale > LARGEST_COUNT_NOISE:
                raise ValueError(
                    f"count_noise_scale={self.count_noise_scale!r} is more than {LARGEST_COUNT_NOISE:g} examples, "
                    "beside which float64 noise cannot hide one: give a smaller one"
                )

    @property
    def scale(self) -> float:
        """b of the Laplace noise, or sigma of the Gaussian, in units of the gradient: m * C."""
        return self.noise_multiplier * self.max_grad_norm if self.noise_multiplier > 0 else 0.0

    @property
    def family(self) -> Family:
        """What is known of every mechanism of this name."""
        return family_of(self.name)

    @property
    def noise(self) -> Noise:
        """The law of the noise at scale 1."""
        return self.family.noise

    @property
    def distribution(self) -> str:
        """What noise sources call the noise."""
        return self.noise.name

    @property
    def norm(self) -> Norm:
        return self.family.norm

    @property
    def layer_share(self) -> float:
        """``layer_norm / C``."""
        parts = max(1, len(self.layer_sizes))
        match self.norm:
            case "l1":
                return 1 / parts
            case "l2":
                return 1 / math.sqrt(parts)
            case _:
                assert_never(self.norm)

    @property
    def layer_norm(self) -> float:
        """The norm that each separately clipped part is clipped to."""
        return self.clip_norm * self.layer_share

    @property
    def clip_norm(self) -> float:
        """The norm that a whole gradient is clipped to: C less the margin. C itself without noise, where nothing is
        charged and a sum may be compared with plain training."""
        return self.max_grad_norm * (1 - self.margin) if self.noise_multiplier > 0 else self.max_grad_norm

    def for_sum(self, *, dimension: int, examples: int, unit: float) -> Mechanism:
        r"""This release with the margin that a sum of so many gradients needs (docs/guarantee.md, section 11):

        .. math::  2^{-11} + 4\,u\,E + 2^{-32}\,\frac{b}{C_l}\,n^{1/p}

        The first two terms are for the sum of about E gradients in arithmetic of unit roundoff u: without one of them
        it moves by that one's gradient and by up to 1.1 u E C more (measured; gradients that all point one way), which
        is left room three times over and more. The last is for the noise, with p of the norm and C_l of a layer. It
        counts as 2^-11 at least.

        Args:
            dimension: n, coordinates that are clipped and summed.
            examples: E, expected in one sum, over all ranks.
            unit: u of the type that the sum is kept in, 2^-24 for fp32.
        """
        match self.norm:
            case "l1":
                spread = float(dimension)
            case "l2":
                spread = math.sqrt(dimension)
            case _:
                assert_never(self.norm)
        noise = GRID_SHIFT * self.noise_multiplier / self.layer_share * spread
        return replace(self, margin=MARGIN / 2 + 4 * unit * examples + max(MARGIN / 2, noise))

    @property
    def count_factor(self) -> float:
        """What the count is multiplied by in the released vector: scale / count_noise_scale, 1 without noise.

        Less by what rounding may do: a millionth for the product, and the shift that stands for the noise's own,
        beside a count that one example moves by 1/2.
        """
        if not self.count_noise_scale:
            return 1.0
        own = GRID_SHIFT * self.count_noise_scale / COUNT_SENSITIVITY
        return self.scale / self.count_noise_scale * (1 - 2**-20 - own)

    def release(self, *, sample_rate: float, dimension: int) -> Release:
        """The event that one such release is to the accountant.

        Layers are named where they cost (``Family.layers_cost``): under Gaussian noise the parts' squared norms add up
        to C^2 and cost what the whole does. The event does not depend on C, so it stays the same while C follows
        released values.

        Args:
            sample_rate: q.
            dimension: n, without the count.

        Raises:
            ValueError: the layers hold another number of coordinates than the gradient.
        """
        if self.layer_sizes and sum(self.layer_sizes) != dimension:
            raise ValueError(f"layer_sizes hold {sum(self.layer_sizes)} coordinates, the gradient {dimension}")
        apart = Counter(self.layer_sizes) if self.family.layers_cost else {}
        beside = [] if self.count_noise_scale is None else [(1, self.count_noise_scale / COUNT_SENSITIVITY)]
        return Release(
            self.noise_multiplier,
            sample_rate,
            dimension,
            extra_blocks=beside,
            layers=[(n, self.layer_share, count) for n, count in apart.items()],
        )
