r"""Noise of a registered mechanism: drawn through its survival function, and what is checked of that.

With t uniform on (0, 1] and a random sign, :math:`\pm |Z|(t)` is a draw, where :math:`P(|Z| > |Z|(t)) = t`
(:attr:`~lightning_lap2.accounting.family.Noise.magnitude`). t comes from the words that Laplace noise is made of, as
fine in the tail as there.

Theorem 8 (docs/guarantee.md, section 11) holds for such noise with its constants where, at scale 1, the density is
log-concave, the logarithm of the density is 1-Lipschitz, the hazard :math:`f / (1 - F)` is at least 1/2 from 0 on, and
``magnitude`` is within 2^-43 in float64. The first three, that density, magnitude and standard deviation belong to each
other, and where the noise ends are checked on a grid of t before the first draw. The last is for whoever registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_lap2.accounting import Noise, noise_of

Array = npt.NDArray[np.float64]

MAX_UNITS = 128.0
"""No unit draw of any source exceeds this many scales: the smallest uniform is 2^-129, so 89.5 for Laplace and 13.4 for
Gaussian noise."""

_SMALLEST_LOG_T = -129 * np.log(2.0)
_LARGEST_LOG_T = -1e-3
_POINTS = 4001
_STEP = 1e-4
_LEAST_HAZARD = 0.5
_DENSITY_TOLERANCE, _SLOPE_TOLERANCE, _DEVIATION_TOLERANCE = 1e-4, 1e-6, 1e-3


@lru_cache(maxsize=64)
def magnitude_of(distribution: str) -> Callable[[Tensor], Tensor]:
    """|Z| of scale 1 as a function of t, checked.

    Raises:
        ValueError: no mechanism has such noise, or it is not what it states; the message says in which point.
    """
    noise = noise_of(distribution)
    if noise.magnitude is None:
        raise ValueError(f"noise {distribution!r} has no magnitude to draw it by: give Noise(magnitude=...)")
    check_noise(noise)
    return noise.magnitude


def check_noise(noise: Noise) -> None:
    """Checks on a grid that the fields of a noise with a ``magnitude`` belong together and that Theorem 8 covers it.

    Raises:
        ValueError: naming the noise, and what it is not.
    """
    if noise.magnitude is None:
        return
    holds = {**_of_magnitude(noise), **_of_density(noise)}
    failed = [what for what, found in holds.items() if not found]
    if failed:
        raise ValueError(
            f"noise {noise.name!r} is refused: at scale 1 {', and '.join(failed)} is not so. Compare its magnitude, "
            "log_density and standard_deviation with each other, and with docs/extending.md"
        )


def _of_magnitude(noise: Noise) -> dict[str, bool]:
    """What must hold of |Z| as a function of t, and whether it does."""
    log_t = np.linspace(_SMALLEST_LOG_T, _LARGEST_LOG_T, _POINTS)
    at, below, above = (_magnitude(noise, log_t + shift) for shift in (0.0, -_STEP, _STEP))
    fine = np.linspace(_SMALLEST_LOG_T, 0.0, 20 * _POINTS)
    second_moment = float(np.sum(_magnitude(noise, fine) ** 2 * np.exp(fine)) * (fine[1] - fine[0]))
    with np.errstate(all="ignore"):
        slope = (below - above) / (2 * _STEP)  # -d|Z| / d log t, which is 1 over the hazard
        offset = noise.log_density(at) - (log_t - np.log(2 * slope))
        deviation = np.sqrt(second_moment) / noise.standard_deviation
    return {
        "|Z| >= 0": bool(np.all(at >= 0)),
        f"|Z| <= {MAX_UNITS:g} where t = 2^-129": bool(at[0] <= MAX_UNITS),
        "|Z| falls with t": bool(np.all(slope > 0)),
        f"hazard >= {_LEAST_HAZARD}": bool(np.all(slope <= (1 + _SLOPE_TOLERANCE) / _LEAST_HAZARD)),
        "log_density is that of |Z|": bool(np.ptp(offset) <= _DENSITY_TOLERANCE),
        "standard_deviation is that of |Z|": bool(abs(deviation - 1) <= _DEVIATION_TOLERANCE),
    }


def _of_density(noise: Noise) -> dict[str, bool]:
    """What must hold of the logarithm of the density, and whether it does."""
    y = np.linspace(-MAX_UNITS, MAX_UNITS, 4 * _POINTS + 1)
    with np.errstate(all="ignore"):
        slope = np.diff(noise.log_density(y)) / np.diff(y)
    return {
        "log_density is even": bool(np.allclose(slope, -slope[::-1], rtol=0.0, atol=_SLOPE_TOLERANCE)),
        "log_density is concave": bool(np.all(np.diff(slope) <= _SLOPE_TOLERANCE)),
        "log_density is 1-Lipschitz": bool(np.all(np.abs(slope) <= 1 + _SLOPE_TOLERANCE)),
    }


def _magnitude(noise: Noise, log_t: Array) -> Array:
    assert noise.magnitude is not None
    found: Array = noise.magnitude(torch.from_numpy(np.exp(log_t))).numpy()
    return found
