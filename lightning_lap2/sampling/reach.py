"""The train data, as code other than the loader's could reach them.

A record's gradient may depend on that record alone, so user code that works on one record must not look up another: not
while that one is fetched (:class:`FetchWatch`), and not in the step (:class:`DataReach`: a partner for mixup drawn from
``self.trainer.train_dataloader.dataset``, neighbours looked up in a bank of all rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_lap2.errors import IsolationError


class FetchWatch:
    """Notices that fetching one record reads another: some data set asked for two different records, or for one more
    than the unit has that is fetched.

    Data sets are watched by their classes' ``__getitem__``, for as long as a batch is fetched: that of the train data
    and those it wraps (attributes, and lists of them, to any depth).
    """

    def __init__(self, dataset: Any) -> None:
        self._kinds = _homes(_datasets(dataset), "__getitem__")
        self._read: dict[int, list[Any]] | None = None
        self._allowed = 1

    @contextmanager
    def watching(self) -> Iterator[Callable[[int], None]]:
        """Gives what is to be called before each fetch, with the number of records that it is of."""
        originals = {kind: kind.__dict__["__getitem__"] for kind in self._kinds}
        try:
            for kind, original in originals.items():
                kind.__getitem__ = self._watched(original)
            yield self._begin
        finally:
            self._read = None
            for kind, original in originals.items():
                kind.__getitem__ = original

    def _begin(self, records: int) -> None:
        """Of one record, or several of one unit: each data set may be asked for as many."""
        self._read, self._allowed = {}, records

    def _watched(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def getitem(dataset: Any, key: Any) -> Any:
            if self._read is not None:
                keys = self._read.setdefault(id(dataset), [])
                if not any(known is key or _equal(known, key) for known in keys):
                    keys.append(key)
                if len(keys) > self._allowed:
                    one = self._allowed == 1
                    many = "two records while one was" if one else f"{len(keys)} while a unit's {self._allowed} were"
                    raise IsolationError(
                        f"{type(dataset).__name__}.__getitem__ was asked for {many} fetched "
                        "(mixup or pairs in the data set, a retry with another index?): one record would reach "
                        "another's gradient past the clipping. Make each record from what belongs to it, before "
                        "training if need be; leave out unreadable records beforehand"
                    )
            return original(dataset, key)

        return getitem


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False


class DataReach:
    """The ways to the records from outside the loader: fetches, and the memory that holds them.

    Watched are the data set and those it wraps, by their classes' ``__getitem__``, ``__getitems__`` and ``__iter__``.

    Args:
        dataset: the train data.
    """

    def __init__(self, dataset: Any) -> None:
        self._datasets = _datasets(dataset)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, the user's code works on one example: a fetch of any record is refused."""
        global _closed

        def refuse(dataset: Any, name: str) -> None:
            raise _reached(f"{type(dataset).__name__}.{name}")

        with self.watched(refuse):
            before, _closed = _closed, True
            try:
                yield
            finally:
                _closed = before

    @contextmanager
    def watched(self, on_fetch: Callable[[Any, str], None]) -> Iterator[None]:
        """Inside, ``on_fetch(dataset, method)`` is called before each fetch from the data."""
        known = {id(dataset) for dataset in self._datasets}
        originals = [(kind, name, vars(kind)[name]) for name in _FETCHES for kind in _homes(self._datasets, name)]
        try:
            for kind, name, original in originals:
                setattr(kind, name, _preceded(original, name, known, on_fetch))
            yield
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)

    def memory(self, spared: Iterable[Tensor] = ()) -> list[tuple[str, Any]]:
        """What holds the records: tensors, arrays, and containers of those, with at least one entry per record.

        What is smaller holds statistics, computed before training from whatever they were, like all that a module is
        made with.

        Args:
            spared: parameters and buffers of the module. Their values before training are public, whether or not a
                data set shares the memory.
        """
        own = set(map(_address, spared)) - {0}
        found: list[tuple[str, Any]] = []
        for dataset in self._datasets:
            count = _count(dataset)
            for name, value in _held(dataset) if count else ():
                if isinstance(value, Tensor) and _address(value) in own:
                    continue
                if _entries(value) >= count:
                    found.append((f"{type(dataset).__name__}.{name}", value))
        return found


_FETCHES = ("__getitem__", "__getitems__", "__iter__")
_closed = False


def check_not_closed(what: str) -> None:
    """Raises inside :meth:`DataReach.closed`."""
    if _closed:
        raise _reached(what)


def _reached(what: str) -> IsolationError:
    return IsolationError(
        f"training_step reads records from {what}: a step works on one example, and what it looks up of others would "
        "carry them past the clipping. Make partners, neighbours or pairs part of the record, before training; what is "
        "public may be read from a data set of its own"
    )


def _address(tensor: Tensor) -> int:
    """Of its memory; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, on no device
        return 0


def _preceded(original: Any, name: str, known: set[int], on_fetch: Callable[[Any, str], None]) -> Any:
    def fetch(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if id(dataset) in known:
            on_fetch(dataset, name)
        return original(dataset, *args, **kwargs)

    return fetch


def _count(dataset: Any) -> int:
    """Records; 0 where nobody knows."""
    try:
        return len(dataset)
    except TypeError:
        return 0


def _held(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of a data set, and of plain objects and dicts among them (a graph, a dict of columns)."""
    queue = list(getattr(dataset, "__dict__", {}).items())
    seen: set[int] = set()
    while queue and len(seen) < _LOOKED_AT:
        name, value = queue.pop()
        if id(value) in seen or isinstance(value, nn.Module | Dataset):
            continue
        seen.add(id(value))
        yield name, value
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(inside, dict) and not isinstance(value, Tensor | type):
            queue += [(f"{name}.{key}", v) for key, v in list(inside.items())[:_FEW]]
        elif isinstance(value, list | tuple) and len(value) <= _FEW:
            queue += [(f"{name}[{i}]", v) for i, v in enumerate(value)]


def _entries(value: Any) -> int:
    """How many numbers there are in a tensor, an array, or a container of them; 0 of anything else."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return int(value.size)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | np.ndarray | list | tuple | dict):
        return sum(map(_entries, value))
    return 0


def _homes(datasets: Iterable[Any], name: str) -> list[Any]:
    """The classes that define a method of these, where it can be replaced."""
    homes = (next((kind for kind in type(d).__mro__ if name in vars(kind)), None) for d in datasets)
    return [home for home in dict.fromkeys(homes) if home is not None and home.__flags__ & _HEAP]


def _datasets(dataset: Any) -> list[Any]:
    """``dataset`` and every data set it holds in attributes, and lists and dicts of them, to any depth."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = [dataset]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        held = list(getattr(value, "__dict__", {}).values())
        for inner in held:
            inside = list(inner.values()) if isinstance(inner, dict) else inner
            if isinstance(inside, list | tuple) and len(inside) <= _FEW:
                held.extend(inside)
        stack += [inner for inner in held if isinstance(inner, Dataset)]
    return found


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be set
_FEW = 1000  # longer lists hold records, not data sets
_LOOKED_AT = 10_000
