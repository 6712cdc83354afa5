"""What every noise source shares: the interface, the checks, and where its randomness comes from."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

NoiseKind = Literal["auto", "aes", "torch"]
Distribution = Literal["laplace", "gaussian"]

# No unit draw of any source exceeds this many scales: the smallest uniform is 2^-128, so 88.8 for Laplace
# and 13.4 for Gaussian noise.
MAX_UNITS = 128.0


class NoiseSource(ABC):
    """Adds independent noise to a flat buffer, once per release.

    Two calls never share noise unless a ``seed`` was given: every call is keyed by fresh entropy of the
    operating system, so forks, copies, pickles and resumed runs differ, and ``seed_everything`` has no hold
    on it. With a ``seed`` the noise is a function of (seed, release, rank, size, dtype, distribution): the
    run can be repeated, and **is not private**, since whoever knows the seed can subtract the noise. A
    second call of the same release then repeats the first one's noise.

    Attributes:
        name: ``"aes"`` or ``"torch"``, what the report prints.
        device: where the buffers to be noised live.
        seed: the seed of a reproducible, not private, run; None otherwise.
        rank: the process this source belongs to; separates the noise of seeded ranks.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device, *, seed: int | None = None, rank: int = 0) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"noise seed must be an int or None, got {seed!r}")
        self.device = device
        self.seed = seed
        self.rank = rank

    def add_(self, values: Tensor, scale: float, distribution: Distribution = "laplace", *, release: int) -> None:
        """Adds i.i.d. noise to ``values`` in place.

        Args:
            values: shape ``[n]``, contiguous, fp32 or fp64, on the source's device.
            scale: in the units of ``values``: b of Laplace noise (standard deviation b sqrt 2), the standard
                deviation of Gaussian noise. 0 adds nothing. The scale used is never below the one given.
            distribution: ``"laplace"`` or ``"gaussian"``.
            release: number of the optimizer step; enters the noise of a seeded source only.

        Raises:
            TypeError: for another dtype: noise in bf16 or fp16 takes a few thousand values and hides nothing.
            ValueError: for another shape, layout, device or distribution; for a scale that is negative, not
                finite, or outside what the dtype can hold.
        """
        used = check_request(values, scale, distribution, self.device)
        if used > 0 and values.numel() > 0:
            self._add(values.detach(), used, distribution, release)

    @abstractmethod
    def _add(self, values: Tensor, scale: float, distribution: Distribution, release: int) -> None:
        """:meth:`add_` after the checks; ``scale`` is positive and exact in the dtype of ``values``."""

    def _secret(self, size: int, release: int) -> bytes:
        """``size`` secret bytes for one call: of the operating system, or hashed from the seed."""
        return secret_bytes(size, f"noise/{self.name}", self.seed, release, self.rank)


def secret_bytes(size: int, purpose: str, seed: int | None, release: int, rank: int) -> bytes:
    """``size`` bytes of OS entropy; with a seed, SHAKE-256 of (purpose, seed, release, rank).

    The fields are decimal numbers behind separators, so no two of them give the same text. Reading the
    operating system at every call, rather than expanding one secret, is what keeps two forks of a process
    (or of a checkpoint) from sharing anything.
    """
    if seed is None:
        return os.urandom(size)
    text = f"lightning-lap2/v1/{purpose}|seed={seed:d}|release={release:d}|rank={rank:d}"
    return hashlib.shake_256(text.encode()).digest(size)


def check_request(values: Tensor, scale: float, distribution: str, device: torch.device) -> float:
    """Validates one request (see :meth:`NoiseSource.add_`); returns the scale rounded *up* to the dtype."""
    if distribution not in ("laplace", "gaussian"):
        raise ValueError(f"distribution must be 'laplace' or 'gaussian', got {distribution!r}")
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"noise needs a float32 or float64 tensor, got {values.dtype}: sum and noise in float32")
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"noise needs a flat contiguous tensor, got shape {tuple(values.shape)} with strides "
            f"{values.stride()}: use one flat buffer, or values.contiguous().view(-1)"
        )
    if values.device.type != device.type:
        raise ValueError(
            f"the tensor is on {values.device}, this noise source serves {device}: "
            "make_noise_source(kind, tensor.device)"
        )
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(f"noise scale must be finite and not negative, got {scale!r}")
    return _rounded_up(scale, values.dtype) if scale > 0 else 0.0


def _rounded_up(scale: float, dtype: torch.dtype) -> float:
    """The least number of ``dtype`` that is >= ``scale``: rounding must not lower the noise charged for."""
    limits = torch.finfo(dtype)
    if not limits.tiny <= scale <= limits.max / MAX_UNITS:
        raise ValueError(
            f"noise scale {scale!r} is outside what {dtype} can hold ({limits.tiny:.3g} to "
            f"{limits.max / MAX_UNITS:.3g}): rescale the loss or use float64"
        )
    if dtype == torch.float64:
        return float(scale)
    nearest = np.float32(scale)
    return float(nearest if float(nearest) >= scale else np.nextafter(nearest, np.float32(np.inf)))
