"""Whether a tensor or array was written, by what it holds.

Counting writes (``tensor._version``) misses ``.data``, numpy views and kernels that do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_lap2.gradients.physical import held_here

# elements up to which a copy is kept
_SMALL = 2**16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Content:
    """What a tensor or array held.

    A small one is copied. Of a large one the sum of its bits is kept, taken as whole numbers modulo 2^64, which one
    changed entry always changes, and its count of writes; a permutation of its entries through ``.data`` would go
    unnoticed.
    """

    __slots__ = ("_kept", "_value", "_version")

    def __init__(self, value: Tensor | np.ndarray) -> None:
        value = held_here(value) if isinstance(value, Tensor) else value
        self._value = value
        self._version = version(value)
        self._kept = _kept(value)

    def written(self) -> bool:
        """Whether it holds something else now."""
        return self.counted() or not _equal(self._kept, _kept(self._value, copy=False))

    def counted(self) -> bool:
        """Whether a write was counted: the quick look."""
        return version(self._value) != self._version

    def restore(self) -> None:
        """Puts a small tensor's or array's values back."""
        if isinstance(self._kept, np.ndarray) and isinstance(self._value, np.ndarray):
            self._value[...] = self._kept
        elif isinstance(self._kept, Tensor) and isinstance(self._value, Tensor):
            with torch.no_grad():
                self._value.copy_(self._kept)


def version(value: Any) -> int:
    """How many writes torch has counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _kept(value: Tensor | np.ndarray, *, copy: bool = True) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy() if copy else value
    if nn.parameter.is_lazy(value) or value.layout is not torch.strided or value.is_meta:
        return None
    plain = value.detach()
    if value.numel() <= _SMALL:
        return plain.clone() if copy else plain
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    bits = plain.contiguous().view(-1)
    if bits.numel() * bits.element_size() % 8 == 0 and bits.storage_offset() * bits.element_size() % 8 == 0:
        return bits.view(torch.int64).sum()  # six times as fast as by shorter words
    return bits.view(_BITS[bits.element_size()]).sum()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(_equal, a, b))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # entries that are not a number equal themselves here
        return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))
    return bool(a == b)
