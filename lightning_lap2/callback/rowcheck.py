"""Row by row: what collate function and batch transfer hooks make of records, seen without the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lap2.gradients import UnsupportedModelError
from lightning_lap2.gradients.batches import take_apart

_SEEDS = range(5)
# records that change places, and seeds, in the search for a collate_fn that sorts or shuffles
_MOVED, _MOVED_SEEDS = 4, 2
# rounds of views looked at before they are called identical: a flip with probability 1/2 leaves two the same as often
_ROUNDS = 4

BatchOf = Callable[[Any], Any]


def refuse_mixed_rows(records: list[Any], batch_of: Callable[[list[Any]], Any]) -> None:
    """A record's row must not change when its batch mates do: under one state of every random generator, the first
    row of two batches that share only their first record must be the same to the bit. Finds mixup, CutMix and
    batch normalisation in ``collate_fn`` and the batch transfer hooks, random or not.

    Batches of unlike shapes (padding) draw unlike random numbers and are left to the preflight.

    Raises:
        UnsupportedModelError: rows mix.
    """
    if len(records) < 5:
        return
    first, others, strangers = records[0], records[1:3], records[3:5]
    for seed in _SEEDS:
        with seeded_generators(seed):
            mine = take_apart(batch_of([first, *others])).tensors
        with seeded_generators(seed):
            theirs = take_apart(batch_of([first, *strangers])).tensors
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            return
        for a, b in zip(mine, theirs, strict=True):
            if not torch.equal(torch.nan_to_num(a[0].float()), torch.nan_to_num(b[0].float())):
                raise UnsupportedModelError(
                    "a record's row of the batch changes with the records it is batched with (mixup, CutMix or batch "
                    "statistics in collate_fn or on_before/after_batch_transfer), so clipping does not bound what one "
                    "record does; transform each record by itself"
                )


def refuse_moved_rows(records: list[Any], batch_of: BatchOf) -> None:
    """Row i of a batch must be that of record i: the views of a record are told by their places, and rows that are
    sorted or shuffled would spread a record over several examples, each clipped by itself.

    Two records change places; under one state of every random generator both their rows must then change. A batch
    that is sorted does not change at all, one that is reordered in any other way changes elsewhere. (The same
    records have the same padding, so shapes agree.) Records that make the same row are passed over, and random
    transforms may hide a difference (a crop of the border) under one seed but not under all.

    Raises:
        UnsupportedModelError: rows move, or are more or fewer than the records.
    """
    if set.intersection(*(_unchanged(records[:_MOVED], batch_of, seed) for seed in range(_MOVED_SEEDS))):
        raise UnsupportedModelError(
            "the rows of a batch do not keep the order of their records (collate_fn or on_before/after_batch_transfer "
            "sorts or shuffles them?): with augmentations above 1 the views of a record must stay side by side, else "
            "clipping does not bound what one record does. Keep the order, sort inside training_step (with "
            "engine='vmap' or 'loop'), or use augmentations=1"
        )


def _unchanged(records: list[Any], batch_of: BatchOf, seed: int) -> set[tuple[int, int, int]]:
    """All (i, j, k), k = i or j, where row k stays what it was when records i and j change places."""

    def rows_of(chosen: list[Any]) -> list[Tensor]:
        with seeded_generators(seed):
            parts = take_apart(batch_of(chosen))
        if parts.count != len(chosen):
            raise UnsupportedModelError(
                f"collate_fn and the batch transfer hooks made {parts.count} rows of {len(chosen)} records; each "
                "record must give exactly one row: repeat or drop records in the data set, before they are sampled"
            )
        return [_comparable(t) for t in parts.tensors]

    alone = [rows_of([record]) for record in records]
    before = rows_of(records)
    found = set()
    for i, j in combinations(range(len(records)), 2):
        if _same(alone[i], alone[j]):
            continue
        exchanged = list(records)
        exchanged[i], exchanged[j] = records[j], records[i]
        after = rows_of(exchanged)
        found |= {(i, j, k) for k in (i, j) if _same([t[k] for t in before], [t[k] for t in after])}
    return found


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Records as a ``DataLoader`` worker hands them to ``collate_fn``: a list, or what ``__getitems__`` makes of it."""
    batched = getattr(dataset, "__getitems__", None)
    return batched(indices) if batched else [dataset[index] for index in indices]


def identical_views(dataset: Any, indices: list[int], views: int, batch_of: BatchOf) -> bool:
    """Whether every record of ``indices``, asked for ``views`` times, gives the same row each time."""
    for _ in range(_ROUNDS):
        for index in indices:
            parts = take_apart(batch_of(fetch(dataset, [index] * views)))
            if parts.count != views:  # the preflight refuses it
                return False
            rows = [[_comparable(t)[view] for t in parts.tensors] for view in range(views)]
            lists: list[Any] = []
            parts.rebuild(parts.tensors, lambda _, values: lists.append(values))  # noqa: B023 (called at once)
            alike = all(values[view] == values[0] for values in lists for view in range(views))
            if not alike or not all(_same(row, rows[0]) for row in rows[1:]):
                return False
    return True


def _comparable(tensor: Tensor) -> Tensor:
    """NaN compares equal to itself after this."""
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global generators at ``seed``, and afterwards as they were."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state users' code draws from)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            # not torch.manual_seed, which queues a call (and a stack trace) for every kind of device there is
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002
