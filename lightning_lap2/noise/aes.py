r"""Cryptographic noise on the CPU: an AES-256-CTR keystream pushed through the inverse CDF.

From one keystream word of w bits (32 for fp32, 64 for fp64) come a sign, its top bit, and an integer k, the
other w - 1. With k uniform on 0 .. 2^{w-1} - 1 and u uniform on (0, 1),

.. math::  t = (k + u)\, 2^{-(w-1)}

is uniform on (0, 1). Laplace noise of scale b is :math:`\pm b \log t`. Gaussian noise uses the same t for the
radius of Box and Muller, :math:`R = \sqrt{-2 \log t}`, and :math:`(R \cos\theta, R \sin\theta)` with
:math:`\theta` uniform on (0, pi/2) and a sign bit each.

*Tail.* Noise made from w uniform bits ends at w log 2 scales, and that end costs privacy. u therefore
consists of 64 further keystream bits wherever k does not fill the mantissa by itself (k < 2^24, one word in
128; k < 2^53, one word in 1,024): every float in the tail can occur, and the smallest t is 2^-96 (fp32) or
2^-128 (fp64). Laplace noise reaches 66.5 and 88.7 scales, Gaussian noise 11.5 and 13.3. u is (r + 1/2)
2^-64 with r the 64 bits, so t > 0 even where every bit is zero: there is no infinity.

*Centre.* Where k fills the mantissa u cannot change t and is left out. Near t = 1 floats are 2^-24 (2^-53)
apart, and so are the values of the noise around 0, in units of the scale. The sum that receives the noise
is rounded more coarsely as soon as it exceeds the scale; that the released number is a float, not a real,
is a limit of every such mechanism and belongs to the guarantee's text, not to this module.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from lightning_lap2.noise.base import Distribution, NoiseSource

Array = npt.NDArray[Any]

CHUNK = 1 << 17  # values per round; words, uniforms and output of a round stay in the L2 cache
_ZEROS = bytes(16 * 1024)  # what the cipher turns into keystream


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


class _Format(NamedTuple):
    """How a float type is made from keystream words of the same width."""

    word: type[np.unsignedinteger[Any]]
    signed: type[np.signedinteger[Any]]
    real: type[np.floating[Any]]
    bits: int  # of k
    mantissa: int  # of the float type; a k below 2^mantissa is refined


_FORMATS = {
    torch.float32: _Format(np.uint32, np.int32, np.float32, 31, 24),
    torch.float64: _Format(np.uint64, np.int64, np.float64, 63, 53),
}


class _Maker:
    """Makes unit noise chunk by chunk, in buffers that live for one release.

    Args:
        words: where the bits come from.
        form: fp32 or fp64.
        size: the largest chunk asked for.
    """

    def __init__(self, words: Words, form: _Format, size: int) -> None:
        self._words = words
        self._form = form
        self._word = np.empty(size, form.word)
        self._integer = np.empty(size, form.signed)
        self._real = np.empty(size, form.real)
        self._small = np.empty(size, np.bool_)
        self._sign = form.word(1 << form.bits)

    def laplace(self, size: int) -> Array:
        """``size`` values of unit Laplace noise, +-log t, in a buffer that the next call overwrites."""
        word, k, t = self._next(slice(0, size))
        self._refine(k, t)
        np.log(t, out=t)
        self._flip(t, word)
        return t

    def gaussian(self, size: int) -> Array:
        """``size`` values of unit Gaussian noise: the cosines of all pairs, then their sines."""
        pairs = (size + 1) // 2
        word_r, k, radius = self._next(slice(0, pairs))
        self._refine(k, radius)
        np.log(radius, out=radius)
        np.multiply(radius, self._form.real(-2), out=radius)
        np.sqrt(radius, out=radius)
        word_a, _, angle = self._next(slice(pairs, 2 * pairs))
        np.multiply(angle, self._form.real(np.pi / 2), out=angle)
        sine = np.sin(angle)
        np.cos(angle, out=angle)
        np.multiply(sine, radius, out=sine)
        np.multiply(angle, radius, out=radius)
        angle[:] = sine
        self._flip(radius, word_r)
        self._flip(angle, word_a)
        return self._real[:size]

    def _next(self, where: slice) -> tuple[Array, Array, Array]:
        """Fresh words, their k, and k 2^-bits as a float, rounded to nearest: all views of the buffers."""
        word, k, t = self._word[where], self._integer[where], self._real[where]
        self._words.fill(word)
        np.bitwise_and(word, ~self._sign, out=k.view(self._form.word))
        np.copyto(t, k, casting="unsafe")
        np.multiply(t, self._form.real(2.0**-self._form.bits), out=t)
        return word, k, t

    def _refine(self, k: Array, t: Array) -> None:
        """Replaces t by (k + u) 2^-bits where k < 2^mantissa."""
        np.less(k, 1 << self._form.mantissa, out=self._small[: len(k)])
        where = np.flatnonzero(self._small[: len(k)])
        further = np.empty(len(where), np.uint64)
        self._words.fill(further)
        u = (further.astype(np.float64) + 0.5) * 2.0**-64
        t[where] = (k[where] + u) * 2.0**-self._form.bits

    def _flip(self, values: Array, word: Array) -> None:
        """Gives each value the sign bit of its word by exclusive or, whatever its own sign."""
        np.bitwise_and(word, self._sign, out=word)
        bits = values.view(self._form.word)
        np.bitwise_xor(bits, word, out=bits)


def add_noise(values: Tensor, scale: float, distribution: Distribution, words: Words) -> None:
    """Adds ``scale`` times unit noise made from ``words`` to a flat fp32 or fp64 CPU tensor, in place."""
    out: Array = values.numpy()
    form = _FORMATS[values.dtype]
    factor = form.real(scale)
    # One more than the chunk: an odd number of Gaussian values takes a whole last pair.
    maker = _Maker(words, form, min(CHUNK, len(out)) + 1)
    draw = maker.laplace if distribution == "laplace" else maker.gaussian
    for start in range(0, len(out), CHUNK):
        part = out[start : start + CHUNK]
        noise = draw(len(part))
        np.multiply(noise, factor, out=noise)
        np.add(part, noise, out=part)


class AesNoise(NoiseSource):
    """AES-256-CTR noise for CPU tensors; a fresh 256-bit key at every call."""

    name: ClassVar[str] = "aes"

    def _add(self, values: Tensor, scale: float, distribution: Distribution, release: int) -> None:
        add_noise(values, scale, distribution, Keystream(self._secret(32, release)))
