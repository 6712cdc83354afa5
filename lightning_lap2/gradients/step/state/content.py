"""Whether a tensor or array was written, by what it holds.

Counting writes (``tensor._version``) misses ``.data``, numpy views and kernels that do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from lightning_lap2.gradients.physical import held_here
from lightning_lap2.gradients.step.state.walk import Node, kind

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
        """Puts a small tensor's or array's values back; of a large tensor nothing is kept that could be."""
        if isinstance(self._kept, np.ndarray) and isinstance(self._value, np.ndarray):
            self._value[...] = self._kept
        elif isinstance(self._kept, Tensor) and isinstance(self._value, Tensor) and self._value.numel() <= _SMALL:
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


Place = tuple[int, Any]
"""Number of a node, and a key of its entries."""


class Contents:
    """What the tensors and arrays among the entries of ``nodes`` held at the last :meth:`look`.

    Small tensors are copied, and compared, by one operation for all of one type on one device. How they are put
    together depends on their shapes, types and devices alone, and is worked out anew where one of these is another.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._places: dict[int, Place] = {}
        self._values: list[Any] = []
        for number, node in enumerate(nodes):
            for key, value in node.items.items():
                if kind(value) in ("tensor", "array") and id(value) not in self._places:
                    self._places[id(value)] = (number, key)
                    self._values.append(value)
        self._counting = [v for v in self._values if isinstance(v, Tensor) and not v.is_inference()]
        self._versions: list[int] = []
        self._forms: list[Any] = []
        self._groups: list[_Group] = []
        self._others: list[Any] = []
        self._contents: list[Content] = []

    def look(self) -> None:
        """Remembers what they hold now."""
        forms = self._forms_now()
        if forms != self._forms:
            self._forms = forms
            together: dict[Any, list[Tensor]] = {}
            self._others = []
            for value in self._values:
                if _is_simple(value):
                    together.setdefault((value.dtype, value.device), []).append(value)
                else:
                    self._others.append(value)
            self._groups = [_Group(tensors) for tensors in together.values()]
        for group in self._groups:
            group.look()
        self._contents = [Content(value) for value in self._others]
        self._versions = [value._version for value in self._counting]

    def counted(self) -> Place | None:
        """Where a write was counted, the first such place: the quick look."""
        versions = [value._version for value in self._counting]
        if versions == self._versions:
            return None
        pairs = zip(self._counting, versions, self._versions, strict=True)
        return next(self._places[id(value)] for value, now, before in pairs if now != before)

    def restore(self) -> Place | None:
        """Puts back what small tensors and arrays held; returns the first place that held something else."""
        forms = self._forms_now()  # other shapes may hold the same values
        written = [v for v, now, before in zip(self._values, forms, self._forms, strict=True) if now != before]
        for group in self._groups:
            written += group.restore()
        for value, content in zip(self._others, self._contents, strict=True):
            if content.written():
                content.restore()
                written.append(value)
        counted = self.counted()
        return min([self._places[id(value)] for value in written], key=lambda place: place[0], default=counted)

    def _forms_now(self) -> list[Any]:
        return [(value.shape, value.dtype, getattr(value, "device", None)) for value in self._values]


def _is_simple(value: Any) -> bool:
    """Whether it is one of those small tensors that can be put one behind the other."""
    return (
        type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.numel() <= _SMALL
        and value.layout is torch.strided
        and not (value.is_meta or value.is_complex() or value.is_quantized)
    )


class _Group:
    """Small tensors of one type on one device, kept as one vector of their bits: a NaN then equals itself."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._shapes = tensors, [t.shape for t in tensors]
        self._dtype = tensors[0].dtype
        self._bits = _BITS[self._dtype.itemsize]
        self._kept = torch.empty(0)

    @torch.no_grad()
    def look(self) -> None:
        flat: Tensor = _flatten_dense_tensors(self._tensors)
        self._kept = flat.clone() if len(self._tensors) == 1 else flat  # of a single one it is a view

    @torch.no_grad()
    def restore(self) -> list[Tensor]:
        """Puts back what they held, where their shapes are what they were; returns those that were written."""
        now: Tensor = _flatten_dense_tensors(self._tensors)
        if self._same(now, self._kept):
            return []
        before = self._kept.split([shape.numel() for shape in self._shapes])
        written = []
        for tensor, kept, shape in zip(self._tensors, before, self._shapes, strict=True):
            if not self._same(tensor.reshape(-1), kept):
                written.append(tensor)
                if tensor.shape == shape:
                    tensor.copy_(kept.view(shape))
        return written

    def _same(self, a: Tensor, b: Tensor) -> bool:
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.view(self._bits), b.view(self._bits))
