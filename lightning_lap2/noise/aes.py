r"""Cryptographic noise on the CPU: an AES-256-CTR keystream pushed through the inverse CDF, in float64.

From one keystream word of 64 bits come a sign, its top bit, and an integer k, the other 63. With k uniform on
0 .. 2^63 - 1 and u uniform on (0, 1),

.. math::  t = (k + u)\, 2^{-63}

is uniform on (0, 1). Laplace noise of scale b is :math:`\pm b \log t`. Gaussian noise is that of Box and Muller: the
radius :math:`R = \sqrt{-2 \log t}` times the cosine and the sine of an angle that is uniform on the circle, a second
word as a signed integer. Both come from :math:`\tau`, the tangent of half the angle, as
:math:`2 / (1 + \tau^2) - 1` and :math:`2 \tau / (1 + \tau^2)`.

*Tail.* Noise made from w uniform bits ends at w log 2 scales, and that end costs privacy. u therefore consists of 64
further keystream bits wherever leaving it out would be felt (k < 2^46, one word in 130,000): there the tail is as fine
as floats are. u is (r + 1/2) 2^-64 with r the 64 bits, so t > 0 even where every bit is zero, and Laplace noise ends
at 88.7 scales, Gaussian noise at 13.3.

*Centre.* Near t = 1 floats are 2^-53 apart, and so are the values of -log t, in units of the scale: far finer than the
cells of :mod:`~lightning_lap2.noise.grid`. The square root would make them coarse again near a radius of 0, so there
(1 - t below 2^-17) Gaussian noise takes :math:`-\log(1 - v)` with v = 1 - t formed from integers.

*Time.* Which words are refined depends on the noise alone, never on the sum that receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from lightning_lap2.noise import grid
from lightning_lap2.noise.base import NoiseSource
from lightning_lap2.noise.quantile import magnitude_of

Array = npt.NDArray[Any]

CHUNK = 1 << 16  # values per round; words, uniforms and output of a round stay in the L2 cache
_ZEROS = bytes(64 * 1024)  # what the cipher turns into keystream
_BITS = 63  # of k
_MASK = np.uint64(2**_BITS - 1)
REFINED = 1 << 46  # k below this is refined, and as many at the other end: without u, -log t is off by 2^-46


class Words(Protocol):
    """A source of uniform bits."""

    def fill(self, out: Array) -> None:
        """Overwrites the contiguous array ``out`` with uniform bits."""


class Keystream:
    """AES-256 in counter mode: the bits of one release, 2^132 of them before the counter comes round.

    Args:
        key: 32 secret bytes, never used for another stream; the counter can therefore start at zero.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: Array) -> None:
        view = out.view(np.uint8).data
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            self._cipher.update_into(memoryview(_ZEROS)[: len(part)], part)


class _Maker:
    """Makes noise chunk by chunk, in buffers that live for one release.

    Args:
        words: where the bits come from.
        size: the largest chunk asked for.
    """

    def __init__(self, words: Words, size: int) -> None:
        self._words = words
        self._word = np.empty(size, np.uint64)
        self._integer = np.empty(size, np.int64)
        self._real = np.empty(size)
        self._some = np.empty(size, np.bool_)

    def laplace(self, size: int, scale: float) -> Array:
        """``size`` values of Laplace noise, +-scale log t, in a buffer that the next call overwrites."""
        word, noise = self._word[:size], self._real[:size]
        self._words.fill(word)
        self._exponential(noise, self._uniform(word, noise))
        noise *= scale
        self._sign(word, noise)  # log t is never above 0, so the other way round for half of them
        return noise

    def by_magnitude(self, magnitude: Callable[[Tensor], Tensor], size: int, scale: float) -> Array:
        """``size`` values of noise of a registered mechanism, +-scale |Z|(t)."""
        word, noise = self._word[:size], self._real[:size]
        self._words.fill(word)
        self._refine(noise, self._uniform(word, noise))
        np.multiply(magnitude(torch.from_numpy(noise)).numpy(), scale, out=noise)
        self._sign(word, noise)
        return noise

    def _sign(self, word: Array, noise: Array) -> None:
        """``noise`` takes the sign bit of the word, by exclusive or; spends ``word``."""
        np.bitwise_and(word, ~_MASK, out=word)
        bits = noise.view(np.uint64)
        np.bitwise_xor(bits, word, out=bits)

    def gaussian(self, size: int, scale: float) -> Array:
        """``size`` values of Gaussian noise: the cosines of all pairs, then their sines."""
        pairs = (size + 1) // 2
        word, radius, tangent = self._word[:pairs], self._real[:pairs], self._real[pairs : 2 * pairs]
        self._words.fill(word)
        k = self._uniform(word, radius)
        self._exponential(radius, k)
        self._centre(k, radius)
        radius *= -2.0 * scale * scale
        np.sqrt(radius, out=radius)
        self._words.fill(word)
        np.copyto(tangent, word.view(np.int64))
        tangent *= np.pi / 2 * 2.0**-_BITS  # half an angle of the whole circle
        np.tan(tangent, out=tangent)
        share = self._integer[:pairs].view(np.float64)  # becomes 2 R / (1 + tangent^2)
        np.multiply(tangent, tangent, out=share)
        share += 1.0
        np.divide(radius, share, out=share)
        share += share
        tangent *= share
        np.subtract(share, radius, out=radius)
        return self._real[:size]

    def _uniform(self, word: Array, out: Array) -> Array:
        """The k of ``word``; ``out`` becomes k 2^-63, rounded to nearest."""
        k = self._integer[: len(word)]
        np.bitwise_and(word, _MASK, out=k.view(np.uint64))
        np.copyto(out, k)
        out *= 2.0**-_BITS
        return k

    def _refine(self, t: Array, k: Array) -> None:
        """``t`` becomes (k + u) 2^-63 where k is small."""
        where = np.flatnonzero(np.less(k, REFINED, out=self._some[: len(k)]))
        if len(where):
            t[where] = (k[where] + self._fractions(len(where))) * 2.0**-_BITS

    def _exponential(self, t: Array, k: Array) -> None:
        """``t`` becomes the logarithm of what it is when refined."""
        self._refine(t, k)
        np.log(t, out=t)

    def _centre(self, k: Array, log_t: Array) -> None:
        """Replaces log t by log(1 - v), v = 1 - t, where t is nearly 1."""
        where = np.flatnonzero(np.greater_equal(k, 2**_BITS - REFINED, out=self._some[: len(k)]))
        if not len(where):
            return
        v = ((2**_BITS - 1 - k[where]) + self._fractions(len(where))) * 2.0**-_BITS
        log_t[where] = np.log1p(-v)

    def _fractions(self, size: int) -> Array:
        """``size`` values of u."""
        further = np.empty(size, np.uint64)
        self._words.fill(further)
        return (further.astype(np.float64) + 0.5) * 2.0**-64


def noise_chunks(size: int, scale: float, distribution: str, words: Words) -> Iterator[tuple[slice, Array]]:
    """Noise for ``size`` values, float64, piece by piece; a piece is valid until the next is asked for."""
    # One more than the chunk: an odd number of Gaussian values takes a whole last pair.
    maker = _Maker(words, min(CHUNK, size) + 1)
    match distribution:
        case "laplace":
            draw = maker.laplace
        case "gaussian":
            draw = maker.gaussian
        case registered:
            draw = partial(maker.by_magnitude, magnitude_of(registered))
    for start in range(0, size, CHUNK):
        where = slice(start, min(start + CHUNK, size))
        yield where, draw(where.stop - start, scale)


def add_noise(
    values: Tensor,
    scale: float,
    distribution: str,
    words: Words,
    *,
    last_factor: float = 1.0,
    cells: int = grid.CELLS,
) -> None:
    """Adds noise made from ``words`` to a flat fp32 or fp64 CPU tensor, in place, and rounds to the grid of ``scale``;
    see :meth:`NoiseSource.add_`."""
    out: Array = values.numpy()
    for where, noise in noise_chunks(len(out), scale, distribution, words):
        part = out[where]
        last = noise[-1] + last_factor * float(part[-1])
        noise += part
        if where.stop == len(out):
            noise[-1] = last
        grid.round_(noise, scale, cells)
        np.copyto(part, noise, casting="same_kind")


class AesNoise(NoiseSource):
    """AES-256-CTR noise for CPU tensors; a fresh 256-bit key at every call."""

    name: ClassVar[str] = "aes"

    def _add(self, values: Tensor, scale: float, distribution: str, release: int, last_factor: float) -> None:
        stream = self._stream(release)
        add_noise(values, scale, distribution, stream, last_factor=last_factor, cells=self.cells)

    def fill_(self, out: Tensor, distribution: str, *, release: int) -> None:
        """Overwrites the float64 CPU tensor ``out`` (``[n]``) with noise of scale 1, not rounded."""
        made: Array = out.numpy()
        for where, noise in noise_chunks(len(made), 1.0, distribution, self._stream(release)):
            made[where] = noise

    def _stream(self, release: int) -> Keystream:
        return Keystream(self._secret(32, release))
