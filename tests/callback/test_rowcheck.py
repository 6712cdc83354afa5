"""What collate functions do with the rows of a batch: moved rows, identical views."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lightning_lap2.callback.rowcheck import fetch, identical_views, refuse_moved_rows
from lightning_lap2.gradients import UnsupportedModelError

Collate = Callable[[list[Any]], Any]


def sequences() -> list[Any]:
    """Of lengths 3, 7, 5, 4, 6."""
    return [torch.arange(1.0, n + 1) * (i + 1) for i, n in enumerate((3, 7, 5, 4, 6))]


def padded(records: list[Any]) -> Any:
    return pad_sequence(records, batch_first=True), torch.tensor([len(r) for r in records])


def by_length(records: list[Any]) -> Any:
    return padded(sorted(records, key=len, reverse=True))


def by_last(records: list[Any]) -> Any:
    return padded(sorted(records, key=lambda r: float(r[-1])))


def shuffled(records: list[Any]) -> Any:
    return padded([records[i] for i in torch.randperm(len(records))])


def shuffled_by_python(records: list[Any]) -> Any:
    return padded(random.sample(records, len(records)))


def backwards(records: list[Any]) -> Any:
    return padded(records[::-1])


def even_then_odd(records: list[Any]) -> Any:
    """As if the first views of all records were stacked before the second ones."""
    return padded(records[::2] + records[1::2])


def jittered(records: list[Any]) -> Any:
    x, lengths = padded(records)
    return x + torch.randn_like(x), lengths


def jittered_by_numpy(records: list[Any]) -> Any:
    return padded([r * float(np.random.uniform(0.5, 1.5)) for r in records])  # noqa: NPY002 (global)


@pytest.mark.parametrize(
    "collate", [by_length, by_last, shuffled, shuffled_by_python, backwards, even_then_odd], ids=lambda c: c.__name__
)
def test_rows_that_move_are_refused(collate: Collate) -> None:
    with pytest.raises(UnsupportedModelError, match="do not keep the order of their records"):
        refuse_moved_rows(sequences(), collate)


def mostly_blank(records: list[Any]) -> Any:
    """A harsh random transform: under one seed rows of unlike records may look alike."""
    x = torch.stack([r[:3] for r in records])
    return x * (torch.rand(len(x), 1) < 0.6)


@pytest.mark.parametrize("collate", [padded, jittered, jittered_by_numpy, mostly_blank], ids=lambda c: c.__name__)
def test_rows_that_stay_pass(collate: Collate) -> None:
    refuse_moved_rows(sequences(), collate)
    # alike, so that nothing tells them apart
    refuse_moved_rows([torch.ones(3)] * 4, collate)
    refuse_moved_rows(sequences()[:1], collate)
    refuse_moved_rows([torch.tensor([1.0, float("nan")]), torch.tensor([2.0, float("nan")])], collate)


def test_the_check_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002 (global)
    refuse_moved_rows(sequences(), jittered_by_numpy)
    refuse_moved_rows(sequences(), jittered)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # noqa: NPY002 (global)


class Records:
    """Item i of ``make(i)``, afresh at each fetch."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Fetched(Records):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(float(place), index) for place, index in enumerate(indices)]


class Ready(Records):
    """``__getitems__`` gives the batch itself, which ``collate_fn`` hands on."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.rand(len(indices), 2), torch.tensor(indices)


def handed_on(batch: Any) -> Any:
    return default_collate(batch) if isinstance(batch, list) else batch


def test_records_are_fetched_as_a_loader_does() -> None:
    assert fetch(Records(lambda i: 10 * i), [2, 2, 1]) == [20, 20, 10]
    assert fetch(Fetched(lambda i: None), [2, 2]) == [(0.0, 2), (1.0, 2)]


@pytest.mark.parametrize(
    ("data", "collate", "identical"),
    [
        (Records(lambda i: (torch.full((2,), float(i)), i)), default_collate, True),
        (Records(lambda i: {"x": torch.tensor([float("nan"), i]), "name": "a"}), default_collate, True),
        (Records(lambda i: (torch.rand(2), i)), default_collate, False),
        (Records(lambda i: (torch.zeros(2), random.random())), default_collate, False),
        (Records(lambda i: {"x": torch.zeros(2), "text": random.choice("abcdefgh")}), default_collate, False),
        (Records(lambda i: torch.arange(1.0, i + 3)), jittered, False),
        (Fetched(lambda i: None), default_collate, False),
        (Ready(lambda i: (torch.zeros(2), i)), handed_on, False),
        # two views are alike half of the time
        (Records(lambda i: torch.full((2,), float(random.random() < 0.5))), default_collate, False),
    ],
    ids=["tensors", "nan", "random", "label", "text", "collate", "getitems", "ready", "flip"],
)
def test_identical_views(data: Any, collate: Collate, identical: bool) -> None:
    torch.manual_seed(0)
    random.seed(0)
    assert identical_views(data, [0, 2, 5], 2, collate) is identical
