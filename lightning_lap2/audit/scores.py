r"""The strongest attacker's statistic: the log likelihood ratio of every release, with the coin it does not know.

A release is ``others + coin * g + noise``. Who knows the others' sum (their records and coins) is left with
:math:`y = coin \cdot g + noise`, and with coin probability q

.. math::  \log \frac{p(y \mid \text{in})}{p(y \mid \text{out})}
           = \log\big(1 - q + q\, e^{\ell}\big), \qquad
           \ell = \log \frac{p_{noise}(y - g)}{p_{noise}(y)},

summed over the steps (Neyman and Pearson: no other test is better, at any pair of error rates).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting import Noise

Array = npt.NDArray[np.float64]


def log_ratio(y: Array, shift: Array, noise: Noise) -> Array:
    r"""l of one release for noise of unit scale, summed over the last axis.

    Laplace: :math:`|y| - |y - g|` per coordinate, between -\|g\| and \|g\|. Gaussian: :math:`y g - g^2 / 2`.

    Args:
        y: ``[..., d]`` in units of the noise scale.
        shift: g, ``[..., d]``, in the same units.
        noise: its law.
    """
    ratio: Array = (noise.log_density(y - shift) - noise.log_density(y)).sum(-1)
    return ratio


def log_mixture(ratio: Array, q: Array | float) -> Array:
    """log(1 - q + q e^ratio), without overflow; ``ratio`` itself where q = 1, 0 where q = 0."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-np.asarray(q, dtype=np.float64)), np.log(q) + ratio)
