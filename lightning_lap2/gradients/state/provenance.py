"""Which tensors were computed from public things alone: parameters, state at fit start, constants, fresh randomness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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
                self._clean[key] = StorageWeakRef(tensor.untyped_storage())
                self._tainted.pop(key, None)
        if len(self._clean) > self._sweep:
            self._clean = {k: ref for k, ref in self._clean.items() if not ref.expired()}
            self._tainted = {k: ref for k, ref in self._tainted.items() if not ref.expired()}
            self._sweep = max(_SWEEP, 2 * len(self._clean))

    def taint(self, tensor: Tensor) -> None:
        """Notes that it was written from something that may hold records."""
        if (key := _key(tensor)) is not None:
            self.taints += 1
            self._clean.pop(key, None)
            self._tainted[key] = StorageWeakRef(tensor.untyped_storage())

    def is_clean(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        if key is None:
            return isinstance(tensor, nn.Parameter)
        if key in self._tainted:
            return False
        return key in self._clean or isinstance(tensor, nn.Parameter)


def _key(tensor: Any) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, of another kind
        return None
