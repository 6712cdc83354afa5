r"""Noise from torch's generators, on the device that holds the sum.

Two 64-bit words per value are split as in :mod:`lightning_lap2.noise.aes`: a sign, an integer k of 63 bits, and 63
further bits for u, so :math:`t = (k + u)\,2^{-63}` never falls below 2^-127: Laplace noise reaches 88.0 scales,
Gaussian noise 13.2. u is added to every k rather than to the small ones alone: a device has no use for a gather, and
where k fills the mantissa the sum rounds back to k. Gaussian pairs take a third word, the angle.

*Strength.* These generators are statistically good but not cryptographic: CUDA's Philox4x32 has a 64-bit
key, the CPU's Mersenne Twister is linear. Each call takes fresh entropy of the operating system for the
whole state (key *and* counter of Philox; all 19,937 bits of the Twister, whose ``manual_seed`` would use
32). Where a cryptographic stream is wanted on an accelerator ask for ``"aes"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lightning_lap2.noise import grid
from lightning_lap2.noise.base import NoiseSource
from lightning_lap2.noise.quantile import magnitude_of

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # values per round: cache on a CPU, 64 MiB of words on a GPU

_LOW = 2**63 - 1  # all bits but the sign

_TWISTER_WORDS = 624
_TWISTER_START = 24  # bytes before the words in torch's CPU state: seed (8), left (4), seeded (4), next (8)
_PHILOX_OFFSET_BITS = 62  # of the 64-bit counter: room for what one release draws


class TorchNoise(NoiseSource):
    """Noise from a private ``torch.Generator``, re-keyed at every call.

    Raises:
        ValueError: for a device other than ``cpu`` and ``cuda`` (ROCm included), whose generators this code
            does not know how to key; use ``"aes"`` there.
        RuntimeError: if torch's generator state is not laid out as expected.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self, device: torch.device, *, seed: int | None = None, rank: int = 0, cells: int = grid.CELLS
    ) -> None:
        super().__init__(device, seed=seed, rank=rank, cells=cells)
        if device.type not in _CHUNK:
            raise ValueError(
                f"noise_source='torch' knows the generators of cpu and cuda, not of {device.type!r}: "
                "use noise_source='aes'"
            )

    def _add(self, values: Tensor, scale: float, distribution: str, release: int, last_factor: float) -> None:
        generator = torch.Generator(device=values.device)
        if values.device.type == "cpu":
            key_twister(generator, self._secret(4 * _TWISTER_WORDS, release))
        else:
            key_philox(generator, self._secret(16, release))
        unit = unit_draw(distribution)
        chunk = _CHUNK[values.device.type]
        for start in range(0, values.numel(), chunk):
            part = values[start : start + chunk]
            total = part.to(torch.float64, copy=True)
            if start + chunk >= values.numel():
                total[-1] *= last_factor
            total += unit(part.numel(), generator).mul_(scale)
            grid.round_(total, scale, self.cells)
            part.copy_(total)


def key_twister(generator: torch.Generator, secret: bytes) -> None:
    """Fills the whole state of a CPU generator with 2,496 secret bytes.

    ``manual_seed`` keeps 32 bits, so two of 2^16 releases would share their noise. The layout of the state is
    not documented; it is checked against the Twister's own initialisation before it is trusted.
    """
    generator.manual_seed(1)
    state = generator.get_state()
    end = _TWISTER_START + 8 * _TWISTER_WORDS
    words = state[_TWISTER_START:end].view(torch.int64)
    second = (1812433253 * 1 + 1) % 2**32  # x_1 = 1812433253 (x_0 xor (x_0 >> 30)) + 1 with x_0 = seed = 1
    if words.numel() != _TWISTER_WORDS or words[:2].tolist() != [1, second]:
        raise RuntimeError(
            f"torch {torch.__version__} keeps its CPU generator in an unknown form: use noise_source='aes'"
        )
    words.copy_(torch.frombuffer(bytearray(secret), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF)
    generator.set_state(state)


def key_philox(generator: torch.Generator, secret: bytes) -> None:
    """Sets key and counter of a CUDA generator from 16 secret bytes.

    The state is (seed, offset), 8 bytes each, little-endian; the offset counts in fours. A random offset of
    62 bits beside the 64-bit key keeps two releases that happen on one key apart.
    """
    offset = (int.from_bytes(secret[8:], "little") % 2**_PHILOX_OFFSET_BITS) & ~3
    state = torch.frombuffer(bytearray(secret[:8] + offset.to_bytes(8, "little")), dtype=torch.uint8)
    generator.set_state(state)
    if not torch.equal(generator.get_state(), state):
        raise RuntimeError(
            f"torch {torch.__version__} keeps its CUDA generator in an unknown form: use noise_source='aes'"
        )


def unit_draw(distribution: str) -> Callable[[int, torch.Generator], Tensor]:
    """What draws unit noise, float64 ``[size]``.

    Raises:
        ValueError: an unknown distribution.
    """
    match distribution:
        case "laplace":
            return unit_laplace
        case "gaussian":
            return unit_gaussian
        case registered:
            return partial(unit_by_magnitude, magnitude_of(registered))


def unit_by_magnitude(magnitude: Callable[[Tensor], Tensor], size: int, generator: torch.Generator) -> Tensor:
    """Unit noise of a registered mechanism, float64 ``[size]``: |Z| of t with a random sign."""
    k, u, sign = split_words(_words(2, size, generator))
    return magnitude(uniform(k, u)).mul_(sign)


def unit_laplace(size: int, generator: torch.Generator) -> Tensor:
    """Unit Laplace noise, float64 ``[size]``: log t with a random sign."""
    k, u, sign = split_words(_words(2, size, generator))
    return uniform(k, u).log_().mul_(sign)


def unit_gaussian(size: int, generator: torch.Generator) -> Tensor:
    """Unit Gaussian noise, float64 ``[size]``: the cosines of all Box-Muller pairs, then their sines."""
    pairs = (size + 1) // 2
    words = _words(3, pairs, generator)
    k, u, _ = split_words(words[:2])
    # near t = 1 from 1 - t, formed of integers: else the square root would make small radii coarse
    rest = uniform(_LOW - k, u)
    centre = rest.neg().log1p_()
    radius = torch.where(rest < 2.0**-10, centre, uniform(k, u).log_()).mul_(-2).sqrt_()
    angle = words[2].double().mul_(math.pi * 2.0**-63)  # the whole circle
    return torch.cat((angle.cos().mul_(radius), angle.sin_().mul_(radius)))[:size]


def _words(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Uniform bits, int64 ``[rows, size]``."""
    words = torch.empty((rows, size), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator)


def split_words(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k, u, sign) from uniform int64 words ``[2, size]``: bit 63 of the first is the sign (+-1.0), its bits 0..62 are
    k (int64), bits 0..62 of the second are u, float64 in (0, 1]."""
    sign = (words[0] >> 63).mul_(2).add_(1).double()  # the arithmetic shift gives -1 or 0, so -1 or 1
    return words[0] & _LOW, (words[1] & _LOW).double().add_(0.5).mul_(2.0**-63), sign


def uniform(k: Tensor, u: Tensor) -> Tensor:
    """t = (k + u) 2^-63, float64 in (0, 1], rounded to nearest."""
    return k.double().add_(u).mul_(2.0**-63)
