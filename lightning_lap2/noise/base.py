"""What every noise source shares: the interface, the checks, and where its randomness comes from."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_lap2.accounting import noise_of
from lightning_lap2.noise.grid import CELLS
from lightning_lap2.noise.quantile import MAX_UNITS

# Scales of noise beside which float64 has room for the arithmetic of :mod:`~lightning_lap2.noise.grid`.
_SMALLEST, _LARGEST = 2.0**-480, 2.0**480


class NoiseSource(ABC):
    """Adds independent noise to a flat buffer and rounds to a grid, once per release.

    Two calls never share noise unless a ``seed`` was given: every call is keyed by fresh entropy of the
    operating system, so forks, copies, pickles and resumed runs differ, and ``seed_everything`` has no hold
    on it. With a ``seed`` the noise is a function of (seed, release, rank, size, dtype, distribution): the
    run can be repeated, and **is not private**, since whoever knows the seed can subtract the noise. A
    second call of the same release then repeats the first one's noise.

    Args:
        device: where the buffers to be noised live.
        seed: see above.
        rank: see below.
        cells: of the grid in one scale. Another number than the proven one is for seeded noise, which is not private
            anyhow: two releases that differ by less than a cell can then be compared.

    Attributes:
        name: ``"aes"`` or ``"torch"``, what the report prints.
        device: where the buffers to be noised live.
        seed: the seed of a reproducible, not private, run; None otherwise.
        rank: the process this source belongs to; separates the noise of seeded ranks.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device, *, seed: int | None = None, rank: int = 0, cells: int = CELLS) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"noise seed must be an int or None, got {seed!r}")
        if cells != CELLS and seed is None:
            raise ValueError(f"cells={cells!r} needs seeded noise: releases are proven private with {CELLS}")
        self.device = device
        self.seed = seed
        self.rank = rank
        self.cells = cells

    def add_(
        self,
        values: Tensor,
        scale: float,
        distribution: str = "laplace",
        *,
        release: int,
        last_factor: float = 1.0,
    ) -> None:
        """Adds i.i.d. noise to ``values`` in place: ``gamma * round((values + noise) / gamma)``.

        Sum and noise are float64, rounded once, whatever the type that ``values`` keeps the result in; gamma is
        :func:`lightning_lap2.noise.grid.spacing` of ``scale``. One call per release: a sum that had its noise must not
        be added to anything but a public number.

        Args:
            values: shape ``[n]``, contiguous, fp32 or fp64, on the source's device.
            scale: in the units of ``values``: b of Laplace noise (standard deviation b sqrt 2), the standard
                deviation of Gaussian noise. 0 adds nothing and rounds nothing.
            distribution: ``"laplace"``, ``"gaussian"``, or the noise of a registered mechanism.
            release: number of the optimizer step; enters the noise of a seeded source only.
            last_factor: what the last value is multiplied by, in float64, before its noise is added.

        Raises:
            TypeError: for another dtype: in bf16 or fp16 a sum is rounded by what the records are.
            ValueError: for another shape, layout, device or distribution; for a scale that is negative, not
                finite, or outside what the dtype can hold.
        """
        check_request(values, scale, distribution, self.device)
        if values.numel() == 0:
            return
        if scale > 0:
            self._add(values.detach(), float(scale), distribution, release, last_factor)
        else:
            values[-1] *= last_factor

    @abstractmethod
    def _add(self, values: Tensor, scale: float, distribution: str, release: int, last_factor: float) -> None:
        """:meth:`add_` after the checks, for a positive scale and at least one value."""

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


def check_request(values: Tensor, scale: float, distribution: str, device: torch.device) -> None:
    """Validates one request; see :meth:`NoiseSource.add_`."""
    noise_of(distribution)
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"noise needs a float32 or float64 tensor, got {values.dtype}: sum in float32")
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
    low, high = scale_range(values.dtype)
    if scale > 0 and not low <= scale <= high:
        raise ValueError(
            f"noise scale {scale!r} is outside what {values.dtype} can hold ({low:.3g} to {high:.3g}): rescale the "
            "loss or use float64"
        )


def scale_range(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest scale of noise on a sum of this type."""
    limits = torch.finfo(dtype)
    return max(limits.tiny, _SMALLEST), min(limits.max / MAX_UNITS, _LARGEST)
