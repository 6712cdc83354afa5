"""Records that are in a data set more than once, as far as torch's own containers tell.

Sampling and accounting count rows. A record that sits in two rows of the train data is drawn twice as often and moves
a sum by up to 2 C, so the guarantee for it is that of a group of two. torch's containers (``Subset``, which
``random_split`` returns, ``ConcatDataset``, ``StackDataset``, ``ChainDataset``) say where their rows come from; what
other classes do with their records cannot be seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset

Rows = npt.NDArray[np.int64]
"""Of each row the record that it holds, as (number of the innermost data set) * _SPAN + index; -1 for none."""

_SPAN = 2**40
_LOOKED_AT = 100  # stages of a pipeline; a list of records is no place to look
_CONTAINERS = (Subset, ConcatDataset, StackDataset)


def check_repeats(dataset: object) -> None:
    """
    Raises:
        ValueError: a record is in several rows of the data set, see :func:`repeated_records`.
    """
    if reason := repeated_records(dataset):
        raise ValueError(
            f"the train data set holds a record several times: {reason}. Epsilon is for one row, and such a record has "
            "several; list each index once (for a Subset, sorted(set(indices))), and each data set once"
        )


def repeated_records(dataset: object) -> str | None:
    """Which record of a map-style data set is in several of its rows; ``None`` where torch's containers show none.

    A ``StackDataset`` puts several records into one row: the same record at the same row is there once.
    """
    if not isinstance(dataset, _CONTAINERS):
        return None
    places = _Places()
    columns = places.columns(dataset)
    if places.repeated is not None:
        return places.repeated
    found = _in_several_rows(columns)
    if found is None:
        return None
    key, count = found
    innermost = places.innermost[key // _SPAN]
    return f"record {key % _SPAN} of its {_name(innermost)} is in {count} rows of the {_name(dataset)}"


def index_digest(dataset: object) -> str:
    """What torch's containers pick of the data sets in them, in short: equal on two ranks that train on the same rows,
    different where each has a shard, or a ``random_split``, of its own. Empty for a data set that is no container."""
    if not isinstance(dataset, _CONTAINERS):
        return ""
    digest = hashlib.sha256()
    for column in _Places().columns(dataset):
        digest.update(column.tobytes())
    return digest.hexdigest()[:16]


class _Places:
    """Where the rows of nested containers come from.

    Attributes:
        innermost: the data sets that are no containers, by number.
        repeated: a sentence on indices that are no numbers and repeat, which no array can hold.
    """

    def __init__(self) -> None:
        self.innermost: list[Any] = []
        self.repeated: str | None = None

    def columns(self, dataset: Any) -> list[Rows]:
        """One array of the data set's length for each record that a row can hold."""
        if isinstance(dataset, Subset):
            return self._subset(dataset)
        if isinstance(dataset, ConcatDataset):
            return _joined([self.columns(part) for part in dataset.datasets])
        if isinstance(dataset, StackDataset):
            parts = dataset.datasets
            return [c for part in (parts.values() if isinstance(parts, dict) else parts) for c in self.columns(part)]
        return [self._number(dataset) * _SPAN + np.arange(len(dataset), dtype=np.int64)]

    def _subset(self, dataset: Subset[Any]) -> list[Rows]:
        inner: Any = dataset.dataset
        indices = np.asarray(dataset.indices)
        if not len(indices):
            return [np.empty(0, dtype=np.int64)]
        if not np.issubdtype(indices.dtype, np.integer):
            return [self._named(dataset)]
        if isinstance(inner, _CONTAINERS):
            return [column[indices] for column in self.columns(inner)]
        if indices.min() < 0:
            indices = np.where(indices < 0, indices + len(inner), indices)
        return [self._number(inner) * _SPAN + indices.astype(np.int64)]

    def _named(self, dataset: Subset[Any]) -> Rows:
        """Of a data set that is indexed by names: each name is a record."""
        numbers: dict[Any, int] = {}
        rows = np.array([numbers.setdefault(name, len(numbers)) for name in dataset.indices], dtype=np.int64)
        if len(numbers) < len(rows):
            self.repeated = f"a {_name(dataset)} was given {len(rows)} indices, {len(numbers)} of them different"
        return self._number(dataset) * _SPAN + rows

    def _number(self, dataset: object) -> int:
        for number, known in enumerate(self.innermost):
            if known is dataset:
                return number
        self.innermost.append(dataset)
        return len(self.innermost) - 1


def _joined(parts: Sequence[list[Rows]]) -> list[Rows]:
    """Columns of data sets one after the other; where one has fewer, its rows hold fewer records."""
    width = max(len(part) for part in parts)
    filled = [part + [np.full(len(part[0]), -1, dtype=np.int64)] * (width - len(part)) for part in parts]
    return [np.concatenate([part[number] for part in filled]) for number in range(width)]


def _in_several_rows(columns: list[Rows]) -> tuple[int, int] | None:
    """A record that is in several rows, and in how many."""
    keys = np.concatenate(columns)
    rows = np.concatenate([np.arange(len(column)) for column in columns])
    keys, rows = keys[keys >= 0], rows[keys >= 0]
    if len(columns) > 1:
        # one row that holds a record twice holds it once
        order = np.lexsort((rows, keys))
        keys, rows = keys[order], rows[order]
        first = np.ones(len(keys), dtype=bool)
        first[1:] = (keys[1:] != keys[:-1]) | (rows[1:] != rows[:-1])
        keys = keys[first]
    records, counts = np.unique(keys, return_counts=True)
    if not len(counts) or counts.max() == 1:
        return None
    number = int(np.argmax(counts > 1))
    return int(records[number]), int(counts[number])


# -- streams ----------------------------------------------------------------------------------------------------------


def check_stream(loader: DataLoader[Any]) -> None:
    """
    Raises:
        ValueError: the stream gives a record several times in a pass, see :func:`repeating_stream`.
    """
    if reason := repeating_stream(loader):
        raise ValueError(
            f"the train loader may give a record several times in a pass: {reason}. Each would be charged once; use "
            "num_workers=1 (which reads ahead as well), or share the stream out in __iter__ by "
            "torch.utils.data.get_worker_info()"
        )


def repeating_stream(loader: DataLoader[Any]) -> str | None:
    """Why a loader over an ``IterableDataset`` gives records several times; ``None`` where nothing shows that.

    Every worker iterates a copy of its own. Whether the workers share the records out is known only to the data set's
    code: what asks for the worker's number (``get_worker_info``) in its methods, or in functions and objects that it is
    made of, is taken to; so is what comes with a ``worker_init_fn``.
    """
    streams = list(_streams(loader.dataset))
    for number, stream in enumerate(streams):
        if any(stream is other for other in streams[:number]):
            return f"a ChainDataset holds the same {_name(stream)} twice"
    if loader.num_workers < 2 or loader.worker_init_fn is not None:
        return None
    for stream in streams:
        if not _asks_for_its_worker(stream):
            return (
                f"each of the num_workers={loader.num_workers} workers iterates the whole {_name(stream)}, which does "
                "not ask which of them it is in"
            )
    return None


def _streams(dataset: Dataset[Any]) -> Iterator[Any]:
    if isinstance(dataset, ChainDataset):
        for part in dataset.datasets:
            yield from _streams(part)
    else:
        yield dataset


def _asks_for_its_worker(thing: Any, depth: int = 3) -> bool:
    """Whether a function in ``thing`` mentions the worker's number: in a method of its class, or in what it is made of
    (pipelines keep their stages in a list)."""
    code = getattr(getattr(thing, "__func__", thing), "__code__", None)
    if code is not None:
        return any("worker_info" in name for name in _names(code))
    if isinstance(thing, dict | list | tuple):
        parts = list(thing.values() if isinstance(thing, dict) else thing)[:_LOOKED_AT]
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType):
        own = [base for base in type(thing).__mro__ if base not in (IterableDataset, Dataset, object)]
        if any(_asks_for_its_worker(value, 0) for base in own for value in vars(base).values() if callable(value)):
            return True
        parts = list(vars(thing).values())
    else:
        return False
    return depth > 0 and any(_asks_for_its_worker(part, depth - 1) for part in parts)


def _names(code: CodeType) -> set[str]:
    """Global names and attributes in a function, those nested in it included."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, nested))


def _name(thing: object) -> str:
    return type(thing).__name__
