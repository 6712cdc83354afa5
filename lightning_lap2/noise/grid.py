r"""The grid that releases lie on: a power of two, about a hundredth of the scale of the noise.

What is released of a sum S with noise Z is

.. math::  \gamma \cdot \mathrm{round}\big((S + Z) / \gamma\big),

with S + Z in float64. Which grid point comes out is a function of S + Z, so with a real Z every bound on S + Z holds
for it as it stands. What float64 adds is that Z moves by a little: each cell's probability is within a factor 1 +- eta
of the ideal one, and that costs no more than a shift of 2^-32 scales in each coordinate (docs/guarantee.md, Theorem 8).
The mechanism's margin pays for it (:meth:`lightning_lap2.mechanism.Mechanism.for_sum`).

*Why a hundredth.* eta falls with the width of the cells, the variance that rounding adds grows with its square:
gamma^2 / 12, at most 2e-5 of the variance of the noise. Rounding to a power of two is exact, in float32 too up to
2^24 cells; a value beyond is rounded once more when it is stored, which is a function of what was released.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

CELLS = 64
"""Cells in one scale, at least; below twice as many."""

LARGEST_SUM = 2.0**50
"""In cells; up to twice as much :func:`round_` knows one grid. What the noise can add is far less."""

Values = TypeVar("Values", npt.NDArray[np.float64], Tensor)


def spacing(scale: float, cells: int = CELLS) -> float:
    """gamma: the largest power of two that is at most ``scale / cells``; 0 without noise."""
    return 0.0 if scale == 0 else math.ldexp(1.0, math.frexp(scale / cells)[1] - 1)


def round_(values: Values, scale: float, cells: int = CELLS) -> None:
    """Rounds float64 ``values`` in place to multiples of :func:`spacing`, ties to even.

    Adding 1.5 * 2^52 gamma leaves no bits below gamma, for values within 2^51 gamma.
    """
    shifter: Any = 1.5 * 2.0**52 * spacing(scale, cells)
    values += shifter
    values -= shifter
