"""Noise for the private sum: cryptographic on the CPU, from the device's generator on an accelerator."""

from __future__ import annotations

import torch
from typing_extensions import assert_never

from lightning_lap2 import _validate
from lightning_lap2.choices import NOISE_SOURCES, NoiseSourceName
from lightning_lap2.noise.aes import AesNoise
from lightning_lap2.noise.base import NoiseSource
from lightning_lap2.noise.device import TorchNoise
from lightning_lap2.noise.grid import CELLS
from lightning_lap2.noise.quantile import check_noise
from lightning_lap2.noise.staged import StagedAesNoise

__all__ = [
    "AesNoise",
    "NoiseSource",
    "StagedAesNoise",
    "TorchNoise",
    "check_noise",
    "make_noise_source",
]


def make_noise_source(
    kind: NoiseSourceName, device: torch.device, *, seed: int | None = None, rank: int = 0, cells: int = CELLS
) -> NoiseSource:
    """The noise source for buffers on ``device``.

    Args:
        kind: ``"aes"`` is a cryptographic keystream, made on the CPU (for an accelerator by a background
            thread, one release ahead). ``"torch"`` is a private generator of the device. ``"auto"`` is
            ``"torch"`` on CUDA devices and ``"aes"`` everywhere else.
        device: where the sum lives.
        seed: makes the noise reproducible and the run **not private**; None (the default) draws every
            release from the operating system's entropy.
        rank: the process; seeded processes of different rank draw independent noise.
        cells: see :class:`NoiseSource`.

    Raises:
        ValueError: for an unknown kind, or ``"torch"`` on a device whose generator is not known.
    """
    source: type[NoiseSource]
    match _validate.choice("noise_source", kind, NOISE_SOURCES):
        case "torch":
            source = TorchNoise
        case "aes":
            source = _aes(device)
        case "auto":
            source = TorchNoise if device.type == "cuda" else _aes(device)
        case unknown:
            assert_never(unknown)
    return source(device, seed=seed, rank=rank, cells=cells)


def _aes(device: torch.device) -> type[NoiseSource]:
    return AesNoise if device.type == "cpu" else StagedAesNoise
