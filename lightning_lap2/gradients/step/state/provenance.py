"""Which tensors were computed from public things alone: parameters, state at fit start, constants, fresh randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lap2.gradients.marks import RECORDS, UNKNOWN, holds_examples, mark_outside, unmark
from lightning_lap2.gradients.physical import held_here

_SWEEP = 4096


class Provenance:
    """Storages that are known to be clean; one that is not known is not.

    A parameter is clean unless it was tainted: besides the optimizer only users' hooks write it.

    Attributes:
        taints: how often something was tainted.
    """

    def __init__(self) -> None:
        self.taints = 0
        # by address of the storage's memory block, which its weak reference keeps from being given to another
        self._clean: dict[int, StorageWeakRef] = {}
        self._tainted: dict[int, StorageWeakRef] = {}
        self._sweep = _SWEEP

    def clean(self, tensors: Iterable[Tensor]) -> None:
        """Notes that these hold nothing of the records."""
        for tensor in tensors:
            if (key := _key(tensor)) is not None:
                self._clean[key] = StorageWeakRef(held_here(tensor).untyped_storage())
                self._tainted.pop(key, None)
                unmark(tensor)
        if len(self._clean) > self._sweep:
            self._clean = {k: ref for k, ref in self._clean.items() if not ref.expired()}
            self._tainted = {k: ref for k, ref in self._tainted.items() if not ref.expired()}
            self._sweep = max(_SWEEP, 2 * len(self._clean))

    def taint(self, tensor: Tensor, mark: int = UNKNOWN) -> None:
        """Notes that it was written from something that may hold records, or is the data's (``mark=DATA``)."""
        if (key := _key(tensor)) is not None:
            self.taints += 1
            self._clean.pop(key, None)
            self._tainted[key] = StorageWeakRef(held_here(tensor).untyped_storage())
            mark_outside([tensor], mark)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether it was noted as clean."""
        key = _key(tensor)
        return key in self._clean and key not in self._tainted

    def is_clean(self, tensor: Tensor) -> bool:
        """The same, and parameters too: libraries move them to other storages."""
        if isinstance(tensor, nn.Parameter):
            return _key(tensor) not in self._tainted
        return self.is_known(tensor)

    def is_tainted(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._tainted


def _key(tensor: Any) -> int | None:
    try:
        return int(held_here(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, of another kind
        return None


_READ = torch.ops.aten._local_scalar_dense.default
# made from Python numbers: these are watched by themselves, see callback.hooks
_FROM_NUMBERS = torch.ops.aten.lift_fresh.default
_OVERWRITING = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"})
_READERS = frozenset({"numpy", "tolist", "__array__"})


class Following(TorchDispatchMode):
    """While active, what is computed from clean tensors alone is clean, and clean memory that anything else is
    written into is tainted. What is not clean is marked, so that no step can read it wherever it is kept.

    Args:
        on_read: called where a number is read of a tensor that may hold records.

    Attributes:
        written: storages that were written.
    """

    def __init__(self, provenance: Provenance, on_read: Callable[[], None]) -> None:
        super().__init__()
        self._provenance, self._on_read = provenance, on_read
        self.written: set[int | None] = set()

    def saw_written(self, tensor: Tensor) -> bool:
        """Whether some operation wrote it."""
        return _key(tensor) in self.written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = list(_tensors(_written(func, args, kwargs)))
        overwrites = func._schema.name in _OVERWRITING and all(map(_whole, targets))
        read = [t for t in _tensors([*args, *kwargs.values()]) if not (overwrites and any(t is w for w in targets))]
        clean = func is _FROM_NUMBERS or all(map(self._provenance.is_known, read))
        out = func(*args, **kwargs)
        if func is _READ:
            if not clean:
                self._on_read()
            return out
        self.written.update(map(_key, targets))
        if clean:
            self._provenance.clean([*_tensors([out]), *targets])
        else:
            for target in targets:
                self._provenance.taint(target)
            mark_outside(_tensors([out, targets]), RECORDS if any(map(holds_examples, read)) else UNKNOWN)
        return out


class Reading(TorchFunctionMode):
    """While active, notices tensors that leave for numpy or lists."""

    def __init__(self, provenance: Provenance, on_read: Callable[[], None]) -> None:
        super().__init__()
        self._provenance, self._on_read = provenance, on_read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READERS and not all(map(self._provenance.is_known, _tensors(args))):
            self._on_read()
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that the operation writes into."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _whole(tensor: Tensor) -> bool:
    """Whether it covers its storage."""
    tensor = held_here(tensor)
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
