"""Which ways lead to the records, and that they are closed while a step runs, and open again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_lap2.errors import IsolationError
from lightning_lap2.sampling import ExampleLoader
from lightning_lap2.sampling.reach import DataReach


class Table(Dataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.x = torch.randn(n, 3)
        self.columns = {"a": np.zeros(n), "note": "text"}
        self.rows = [torch.randn(2) for _ in range(n)]
        self.classes = torch.arange(5)
        self.words = {str(i): i for i in range(100)}
        self.encoder = nn.Linear(30, 30)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, [1, 2]), lambda d: ConcatDataset([d, d])])
def test_a_fetch_is_refused_while_closed(wrap: Any) -> None:
    table = Table()
    reach = DataReach(wrap(table))
    with reach.closed():
        for fetch in (lambda: table[0], lambda: wrap(table)[0], lambda: next(iter(DataLoader(table)))):
            with pytest.raises(IsolationError, match=r"reads records from Table.__getitem__"):
                fetch()
        assert len(table) == 20
        assert Table()[0].shape == (3,)  # another data set of the class
    assert table[0].shape == (3,)
    assert next(iter(DataLoader(table))).shape == (1, 3)


def test_a_stream_is_closed_too() -> None:
    stream = Stream()
    with DataReach(stream).closed(), pytest.raises(IsolationError, match=r"Stream.__iter__"):
        next(iter(stream))
    assert next(iter(stream)) == 0


def test_the_train_loader_is_closed_too() -> None:
    table = Table()
    loader = ExampleLoader(DataLoader(table), [[0]])
    with DataReach(table).closed(), pytest.raises(IsolationError, match="the train loader"):
        iter(loader)
    assert next(iter(loader)).count == 1


def test_closing_nests() -> None:
    table = Table()
    reach = DataReach(table)
    original = Table.__getitem__
    with reach.closed():
        with reach.closed(), pytest.raises(IsolationError):
            table[0]
        with pytest.raises(IsolationError):
            table[0]
    assert Table.__getitem__ is original


def test_fetches_are_noticed() -> None:
    table, found = Table(), []
    with DataReach(Subset(table, [3])).watched(lambda dataset, name: found.append((type(dataset).__name__, name))):
        table[0]
    assert found == [("Table", "__getitem__")]


def test_memory_is_what_has_an_entry_per_record() -> None:
    table = Table()
    holders = {"Table.x", "Table.columns", "Table.columns.a", "Table.rows"}
    assert {name for name, _ in DataReach(table).memory()} == holders
    assert {name for name, _ in DataReach(Subset(table, range(20))).memory()} == holders
    x = torch.zeros(4, 2)
    assert next(value for _, value in DataReach(TensorDataset(x)).memory())[0] is x


def test_parameters_and_buffers_are_the_modules_own() -> None:
    table = Table()
    module = nn.Module()
    module.register_buffer("table", table.x[2:])
    assert "Table.x" not in {name for name, _ in DataReach(table).memory(module.buffers())}


@pytest.mark.parametrize("dataset", [None, [1, 2], Stream()])
def test_nothing_to_hold(dataset: Any) -> None:
    assert DataReach(dataset).memory() == []
