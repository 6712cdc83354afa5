"""Fetch and collate: every record on its own, in the worker.

What a record adds to a release may depend on that record alone. The user's code on the way from the data set to a batch
(``__getitem__``, ``__getitems__``, ``collate_fn``, random transforms) could mix records in ways that no check of a few
of them finds: now and then, from some epoch on, where a rare record is among them. So it gets one record at a time:

* ``dataset.__getitems__([i])`` where there is one, else ``dataset[i]``; K times the same i with K views per example;
  where an example is a unit with several records, those;
* ``collate_fn`` of what that gave;
* under random generators with secret seeds, see :mod:`~lightning_lap2.batches.generators`.

Then examples of one shape are stacked, by code of ours. Torch's own ``default_collate`` on tensors and numbers is the
one function that gets the whole draw: its code is known to make row i of record i.

What this cannot see is a data set that remembers: one that keeps earlier records in a cache and mixes them in later.
A fetch *inside* a fetch (``self[j]`` in ``__getitem__``) is seen, and refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_lap2.batches import ExampleBatch, split_rows
from lightning_lap2.batches.generators import Entropy, OwnGenerators, private_generators
from lightning_lap2.errors import IsolationError
from lightning_lap2.sampling.loaders import worker_settings
from lightning_lap2.sampling.reach import FetchWatch, check_not_closed
from lightning_lap2.sampling.units import UnitBatchSampler

_DEFAULT_MAP = dict(default_collate_fn_map)


class Collator:
    """``collate_fn`` on what was fetched for one example at a time, and the examples stacked.

    Args:
        collate_fn: the user's.
        views: fetches per example.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], views: int = 1) -> None:
        self.collate_fn, self.views = padding_to_multiples(collate_fn), views

    def __call__(self, fetched: Sequence[Any]) -> ExampleBatch:
        """The examples, each from what was fetched for it: a list of ``views`` records, or whatever the data set's
        ``__getitems__`` gives for one index."""
        records = self._plain_records(fetched)
        if records is not None:
            try:
                group = split_rows(default_collate(records), self.views)
            except RuntimeError:  # unlike shapes
                pass
            else:
                return ExampleBatch([group], [range(group.count)])
        return ExampleBatch.of(self.collate_fn(found) for found in fetched)

    def of_stream(self, records: list[Any]) -> ExampleBatch:
        """The examples of a stream's records."""
        return self([[record] for record in records])

    def _plain_records(self, fetched: Sequence[Any]) -> list[Any] | None:
        """All records, where ``default_collate`` makes row i of record i and nothing else."""
        if self.collate_fn is not default_collate or default_collate_fn_map != _DEFAULT_MAP:
            return None
        if not all(type(found) is list and len(found) == self.views for found in fetched):
            return None
        records = [record for found in fetched for record in found]
        return records if all(map(_plain, records)) else None


MULTIPLE = 16
"""Of which a record's padded length is a multiple, where the collator can do that."""


def padding_to_multiples(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``collate_fn``, padding to a multiple of 16 where it has that option and its user left it open.

    Hugging Face's padding collators pad to the longest record of a batch, so to the record's own length when they are
    given one record; almost every length would then be a shape of its own, and run by itself. ``pad_to_multiple_of``
    makes the padded length a function of the record's own length that few others have. Nothing is done where a
    tokenizer's ``model_max_length`` is no such multiple, since padding could go beyond it.
    """
    if getattr(collate_fn, "pad_to_multiple_of", MULTIPLE) is not None:
        return collate_fn
    longest = getattr(getattr(collate_fn, "tokenizer", None), "model_max_length", MULTIPLE)
    if longest % MULTIPLE and longest < _UNLIMITED:
        return collate_fn
    padding = copy.copy(collate_fn)
    padding.pad_to_multiple_of = MULTIPLE  # type: ignore[attr-defined]
    return padding


_UNLIMITED = 10**9  # tokenizers without a limit say 10**30


def _plain(record: Any) -> bool:
    """Whether ``default_collate`` makes tensors of such records: tensors and numbers in plain containers."""
    kind = type(record)
    if kind is torch.Tensor:
        return bool(record.layout is torch.strided and not record.is_nested)
    if kind is tuple:
        for value in record:
            if not _plain(value):
                return False
        return bool(record)
    if isinstance(record, np.ndarray):
        return bool(record.dtype.kind in "biuf")
    if kind in (bool, int, float) or isinstance(record, np.generic):
        return True
    if kind is dict:
        return bool(record) and all(map(_plain, record.values()))
    if kind in (tuple, list) or hasattr(kind, "_fields"):
        return bool(record) and all(map(_plain, record))
    return False


def _tensors_of(dataset: Any, indices: list[int]) -> list[torch.Tensor] | None:
    """What ``default_collate`` makes of the records at ``indices`` of a ``TensorDataset`` (or torch's ``Subset`` of
    one), by one indexing operation for each tensor: this code is known too. ``None`` for other data sets."""
    chosen: Any = indices
    while type(dataset) is Subset:
        chosen = [dataset.indices[i] for i in chosen]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(type(t) is torch.Tensor for t in dataset.tensors):
        return None
    index = torch.tensor([int(i) for i in chosen])
    return [tensor[index] for tensor in dataset.tensors]


class RecordByRecord(Dataset[Any]):
    """A map-style data set whose batches are fetched and collated record by record.

    Args:
        dataset: the user's.
        collate_fn: the user's.
        views: indices of each example, in a row: one that repeats, or some of a unit's records.
        skip_errors: a record (a unit) whose fetch or collation raises is lost, instead of ending the fit.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], views: int = 1, *, skip_errors: bool = False
    ) -> None:
        self.dataset, self._skip_errors = dataset, skip_errors
        self._collate = Collator(collate_fn, views)
        self._watch: FetchWatch | None = None
        self._own = OwnGenerators(dataset, collate_fn)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> ExampleBatch:
        """The examples of one loader batch; runs where the loader reads, in a worker or the main process."""
        if self._collate.collate_fn is default_collate and (known := _tensors_of(self.dataset, indices)) is not None:
            group = split_rows(known, self._collate.views)
            return ExampleBatch([group], [range(group.count)])
        with private_generators(Entropy(getattr(indices, "key", None)), own=self._own):
            return self._each(indices) if self._skip_errors else self._collate(self._fetch(indices))

    def _each(self, indices: list[int]) -> ExampleBatch:
        """The same, for one example after the other where one cannot be read."""
        try:
            return self._collate(self._fetch(indices))
        except IsolationError:
            raise
        except Exception:
            views = self._collate.views
            found: list[Any] = []
            places, lost = [], []
            for place in range(len(indices) // views):
                try:
                    alone = self._collate(self._fetch(indices[place * views : (place + 1) * views])).example(0)
                except IsolationError:
                    raise
                except Exception:
                    lost.append(place)
                else:
                    found.append(alone)
                    places.append(place)
            return ExampleBatch.of(found).placed(places, lost)

    def _fetch(self, indices: list[int]) -> list[Any]:
        """What the data set gives for each example, each by a call of its own."""
        if self._watch is None:
            self._watch = FetchWatch(self.dataset)
        together, views = getattr(self.dataset, "__getitems__", None), self._collate.views
        fetched = []
        with self._watch.watching() as begin:
            for start in range(0, len(indices), views):
                own = indices[start : start + views]
                if callable(together):
                    begin(len(set(own)))
                    fetched.append(together(own))
                else:
                    found = []
                    for index in own:
                        begin(1)
                        found.append(self.dataset[index])
                    fetched.append(found)
        return fetched

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watch": None, "_own": OwnGenerators(self.dataset, self._collate.collate_fn)}


class StreamByRecord(IterableDataset[Any]):
    """An ``IterableDataset`` whose random numbers are secret; its order and its memory are its own."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        entropy, own, records = Entropy(None), OwnGenerators(self.dataset), iter(self.dataset)
        while True:
            with private_generators(entropy, own=own):
                try:
                    record = next(records)
                except StopIteration:
                    return
            yield record

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class ExampleLoader(DataLoader[Any]):
    """A ``DataLoader`` like the user's, that gives an :class:`ExampleBatch` for each list of indices.

    Its attributes are those of the user's loader, ``dataset`` and ``collate_fn`` included, for code that looks at them;
    it is iterated by another loader inside, which reads record by record.

    Args:
        loader: the user's, for its settings.
        batch_sampler: what draws; ``None`` keeps a stream's own order.
        views: how many indices the sampler gives for each example, in a row.
        skip_errors: see :class:`RecordByRecord`; a stream's errors end the fit.
    """

    def __init__(
        self, loader: DataLoader[Any], batch_sampler: Any, *, views: int = 1, skip_errors: bool = False
    ) -> None:
        dataset, settings = loader.dataset, worker_settings(loader)
        stream = isinstance(dataset, IterableDataset)
        settings |= (
            {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            if stream
            else {"batch_sampler": batch_sampler}
        )
        super().__init__(dataset, collate_fn=loader.collate_fn, worker_init_fn=loader.worker_init_fn, **settings)
        self._inner: DataLoader[Any] = DataLoader(
            StreamByRecord(dataset)  # type: ignore[arg-type]
            if stream
            else RecordByRecord(dataset, loader.collate_fn, views, skip_errors=skip_errors),
            collate_fn=Collator(loader.collate_fn).of_stream if stream else _handed_on,
            worker_init_fn=_WorkerInit(loader.worker_init_fn),
            **settings,
        )

    def __iter__(self) -> Any:
        check_not_closed("the train loader")
        return iter(self._inner)


def _handed_on(batch: Any) -> Any:
    return batch


class _WorkerInit:
    """The user's ``worker_init_fn``, which finds its own data set in ``get_worker_info()``."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            inside: Any = info.dataset
            object.__setattr__(info, "dataset", inside.dataset)  # WorkerInfo refuses to be assigned to
        if self._init is not None:
            self._init(worker)


class _Peek(RecordByRecord):
    """Both at once: the examples, and the batch that plain training would make of them."""

    def __getitems__(self, indices: list[int]) -> tuple[ExampleBatch, Any]:  # type: ignore[override]
        with private_generators(Entropy(None), own=self._own):
            if self._skip_errors:
                return self._each(indices), None
            fetched = self._fetch(indices)
            try:
                plain = self._collate.collate_fn([record for found in fetched for record in found])
            except Exception:
                plain = None
            return self._collate(fetched), plain


def peek(
    loader: DataLoader[Any],
    count: int,
    views: int = 1,
    *,
    skip_errors: bool = False,
    units: UnitBatchSampler | None = None,
) -> tuple[ExampleBatch, Any] | None:
    """A few records spread over the data, read as training will read them (in a worker, if there are workers): the
    examples, and one batch of them all as plain training would make it, ``None`` where that fails.

    ``None`` for a stream, whose records cannot be read twice.

    Args:
        units: what draws units, where those are the examples.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return None
    size = len(dataset) if units is None else units.num_examples  # type: ignore[arg-type]
    count = min(count, size)
    # spread by the golden ratio: even spacing falls in step with data that repeat in a pattern
    chosen = range(size) if count == size else [int(size * ((k * 0.6180339887498949) % 1.0)) for k in range(count)]
    examples = list(dict.fromkeys(chosen))
    indices = [index for index in examples for _ in range(views)] if units is None else units.shown(examples)
    settings = worker_settings(loader) | {"persistent_workers": False, "pin_memory": False}
    settings["num_workers"] = min(1, loader.num_workers)
    settings["generator"] = torch.Generator()  # the user's is not drawn from
    inside = DataLoader(
        _Peek(dataset, loader.collate_fn, views, skip_errors=skip_errors),
        batch_sampler=[indices],
        collate_fn=_handed_on,
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        **settings,
    )
    found: tuple[ExampleBatch, Any] = next(iter(inside))
    return found
