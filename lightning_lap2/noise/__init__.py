"""Noise for the private sum: cryptographic on the CPU, from the device's generator on an accelerator."""

from __future__ import annotations

import torch

from lightning_lap2.noise.aes import AesNoise
from lightning_lap2.noise.base import Distribution, NoiseKind, NoiseSource
from lightning_lap2.noise.device import TorchNoise
from lightning_lap2.noise.grid import CELLS
from lightning_lap2.noise.staged import StagedAesNoise

__all__ = [
    "AesNoise",
    "Distribution",
    "NoiseKind",
    "NoiseSource",
    "StagedAesNoise",
    "TorchNoise",
    "make_noise_source",
]


def make_noise_source(
    kind: NoiseKind, device: torch.device, *, seed: int | None = None, rank: int = 0, cells: int = CELLS
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
    if kind not in ("auto", "aes", "torch"):
        raise ValueError(f"noise_source must be 'auto', 'aes' or 'torch', got {kind!r}")
    if kind == "torch" or (kind == "auto" and device.type == "cuda"):
        return TorchNoise(device, seed=seed, rank=rank, cells=cells)
    if device.type == "cpu":
        return AesNoise(device, seed=seed, rank=rank, cells=cells)
    return StagedAesNoise(device, seed=seed, rank=rank, cells=cells)
