"""What hooks do to the data: the data set, its sampler's weights, the collate function, the data module.

A record's path starts there, so what a hook writes into them from the batch or the outputs (the loss of each record as
its difficulty, a running mean to subtract) would reach other records' gradients in later draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lightning_lap2.gradients.marks import holds_examples
from lightning_lap2.gradients.step.state.content import Content, version
from lightning_lap2.gradients.step.state.walk import is_same, kind

_ENTRIES = 4096  # of a container of numbers that are compared one by one
_LARGE = 2**20  # elements up to which what an array or tensor holds is compared at every hook
_LINKS = ("dataset", "datasets", "sampler", "transform", "transforms", "target_transform", "collate_fn")


class DataState:
    """Attributes of the data's objects, as they were.

    Looked at: the objects themselves and what they link to (``.dataset``, ``.datasets``, ``.transform``, ...), each
    attribute; of lists and dicts of up to 4,096 entries each entry, of arrays and tensors of up to 2^20 elements what
    they hold. Larger tensors are written where torch counts a write; what is inside longer lists and larger arrays (the
    records themselves, as a rule) is not looked at: that would cost more than a step.

    Args:
        roots: the objects, by the names that an error gives them.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        self._held = dict(_attributes(roots))
        self._roots = roots
        self._contents: dict[str, Content] = {}
        self._writes: dict[str, int] = {}
        self._copies: dict[str, Any] = {}
        for name, value in self._held.items():
            if isinstance(value, Tensor) and value.numel() > _LARGE:
                self._writes[name] = version(value)
            elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.size <= _LARGE):
                self._contents[name] = Content(value)
            elif isinstance(value, list | dict) and len(value) <= _ENTRIES:
                self._copies[name] = value.copy()

    def changes(self) -> Iterator[tuple[str, Literal["records", "number"]]]:
        """Attributes that hold something else now: ``"records"`` where values of examples are known to have gone into
        a tensor, ``"number"`` for what cannot be followed."""
        for name, value in _attributes(self._roots):
            before = self._held.get(name)
            replaced = not is_same(before, value)
            if isinstance(value, Tensor):
                if replaced or self._written(name, value):
                    yield name, "records" if holds_examples(value) else "number"
            elif kind(value) in ("leaf", "array"):
                if replaced or self._written(name, value):
                    yield name, "number"
            elif isinstance(value, list | dict) and (replaced or not _same(self._copies.get(name, value), value)):
                inside = value.values() if isinstance(value, dict) else value
                known = any(isinstance(item, Tensor) and holds_examples(item) for item in inside)
                yield name, "records" if known else "number"

    def _written(self, name: str, value: Any) -> bool:
        if name in self._writes:
            return version(value) != self._writes[name]
        return name in self._contents and self._contents[name].written()


def _same(before: Any, now: Any) -> bool:
    if len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(key in before and is_same(before[key], value) for key, value in now.items())
    return all(map(is_same, before, now))


def _attributes(roots: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    queue, seen = list(roots), set()
    while queue:
        name, value = queue.pop()
        if id(value) in seen or not hasattr(value, "__dict__") or isinstance(value, type):
            continue
        seen.add(id(value))
        for key, held in vars(value).items():
            if key.startswith("__") or key in ("trainer", "_trainer"):
                continue
            path = f"{name}.{key}"
            yield path, held
            if key in _LINKS:
                several = held if isinstance(held, list | tuple) else [held]
                queue += [(path if v is held else f"{path}[{i}]", v) for i, v in enumerate(several[:64])]
