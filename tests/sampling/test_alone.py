"""Records are read one at a time, where plain training reads them, and come out as they went in."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from lightning_lap2.errors import IsolationError
from lightning_lap2.sampling import ExampleLoader, PoissonBatchSampler, peek
from lightning_lap2.sampling.alone import Collator
from lightning_lap2.sampling.parts import Indices

N = 12


class Logged(Dataset[Any]):
    """Notes how it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return N

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(list(indices))
        return [(torch.tensor(float(i)), i) for i in indices]


def batches(loader: DataLoader[Any], sampler: Any, views: int = 1) -> list[Any]:
    return list(ExampleLoader(loader, sampler, views=views))


def test_every_record_is_fetched_and_collated_by_itself() -> None:
    data, collated = Logged(), []

    def collate(records: list[Any]) -> Any:
        collated.append(len(records))
        return default_collate(records)

    (found,) = batches(DataLoader(data, collate_fn=collate), [[3, 1, 7]])
    assert data.asked == [[3], [1], [7]]
    assert collated == [1, 1, 1]
    assert [found.example(k)[0].tolist() for k in range(3)] == [[3.0], [1.0], [7.0]]


def test_views_of_one_record_are_fetched_together() -> None:
    data = Logged()
    (found,) = batches(DataLoader(data), [[3, 3, 5, 5]], views=2)
    assert data.asked == [[3, 3], [5, 5]]
    assert found.groups[0].tensors[0].tolist() == [[3.0, 3.0], [5.0, 5.0]]


def test_default_collate_runs_once_for_tensors_and_numbers_and_agrees_with_one_by_one() -> None:
    records = [{"x": torch.randn(2, 3), "y": k, "z": (np.float32(k), np.ones(2) * k)} for k in range(5)]
    fetched = [[record] for record in records]
    fast = Collator(default_collate)(fetched)
    slow = Collator(lambda found: default_collate(found))(fetched)
    assert len(fast.groups) == len(slow.groups) == 1
    for a, b in zip(fast.groups[0].tensors, slow.groups[0].tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "records",
    [
        [(torch.zeros(k + 1), k) for k in range(3)],  # unlike shapes
        [("a", "b"), ("c", "d")],  # two strings each, and two records
        [{"x": torch.zeros(2), "name": f"n{k}"} for k in range(3)],
    ],
)
def test_what_default_collate_would_not_make_rows_of_goes_one_by_one(records: list[Any]) -> None:
    found = Collator(default_collate)([[record] for record in records])
    assert found.count == len(records)
    for k, record in enumerate(records):
        flat = str(found.example(k))
        assert flat == str(default_collate([record]))


def test_a_subset_of_a_ready_made_batch_is_read_by_its_own_collate_fn() -> None:
    """``__getitems__`` may give a batch, not a list, where ``collate_fn`` expects one."""

    class Ready(Logged):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices), torch.tensor(indices) * 2

    (found,) = batches(DataLoader(Ready(), collate_fn=lambda batch: batch), [[4, 2]])
    assert [tuple(t.item() for t in found.example(k)) for k in range(2)] == [(4, 8), (2, 4)]


def test_random_transforms_do_not_follow_seed_everything_and_follow_a_key() -> None:
    class Random(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return (*super().__getitem__(index), torch.rand(2))

    data = Random(torch.arange(N))

    def draw(key: bytes | None) -> list[Any]:
        torch.manual_seed(0)
        indices = Indices([1, 2])
        indices.key = key
        (found,) = batches(DataLoader(data), [indices])
        return found.groups[0].tensors[1].tolist()

    assert draw(None) != draw(None)
    assert draw(b"a") == draw(b"a") != draw(b"b")


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.pid = os.getpid()


class OpenedInWorkers(Dataset[Any]):
    """Its file is opened by ``worker_init_fn``, on the data set that ``get_worker_info`` gives."""

    pid = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        assert self.pid == os.getpid(), "read where no worker opened it"
        return torch.tensor(index)


def test_records_are_read_in_workers_and_nowhere_else() -> None:
    data = OpenedInWorkers()
    loader = DataLoader(data, batch_size=3, num_workers=2, worker_init_fn=_open)
    found = batches(loader, [[0, 1], [2]])
    assert [batch.groups[0].tensors[0].flatten().tolist() for batch in found] == [[0, 1], [2]]
    looked = peek(loader, 4)
    assert looked is not None
    assert looked[0].count == 4
    assert data.pid == 0


def test_a_loader_looks_like_the_users() -> None:
    data = TensorDataset(torch.arange(N))
    loader = ExampleLoader(DataLoader(data, batch_size=3, collate_fn=list), PoissonBatchSampler(N, 3, 4, seed=1))
    assert loader.dataset is data
    assert loader.collate_fn is list
    assert len(loader) == 4


def test_peek_gives_the_examples_and_the_plain_batch_of_the_same_fetch() -> None:
    class Jittered(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return (*super().__getitem__(index), torch.rand(2))

    found = peek(DataLoader(Jittered(torch.arange(N)), batch_size=3), 4)
    assert found is not None
    examples, plain = found
    assert torch.equal(examples.joined()[1], plain[1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter((torch.tensor(k), torch.rand(())) for k in range(5))


def test_a_stream_is_collated_one_by_one_and_not_peeked_at() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    found = batches(loader, None)
    assert [batch.count for batch in found] == [2, 2, 1]
    assert [int(t) for batch in found for t in batch.groups[0].tensors[0]] == list(range(5))
    assert peek(loader, 4) is None
    torch.manual_seed(0)
    one = [float(t) for batch in batches(loader, None) for t in batch.groups[0].tensors[1]]
    torch.manual_seed(0)
    assert one != [float(t) for batch in batches(loader, None) for t in batch.groups[0].tensors[1]]


class Nested(Dataset[Any]):
    """Reads through lists and dicts of data sets."""

    def __init__(self, *, both: bool) -> None:
        self.parts = {"a": [TensorDataset(torch.arange(N))]}
        self.both = both

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        base = self.parts["a"][0]
        return base[index][0] + (base[(index + 1) % N][0] if self.both else base[index][0])


def test_a_fetch_inside_a_fetch_is_seen_through_containers_and_the_classes_are_left_as_they_were() -> None:
    before = TensorDataset.__getitem__
    assert len(batches(DataLoader(Nested(both=False)), [[1, 2]])) == 1
    with pytest.raises(IsolationError, match="asked for two records while one was fetched"):
        batches(DataLoader(Nested(both=True)), [[1, 2]])
    assert TensorDataset.__getitem__ is before


class Padding:
    """A padding collator as Hugging Face writes them."""

    def __init__(self, pad_to_multiple_of: int | None = None, model_max_length: int | None = None) -> None:
        self.pad_to_multiple_of = pad_to_multiple_of
        if model_max_length is not None:
            self.tokenizer = SimpleNamespace(model_max_length=model_max_length)

    def __call__(self, records: list[list[int]]) -> torch.Tensor:
        longest, multiple = max(map(len, records)), self.pad_to_multiple_of or 1
        longest = -(-longest // multiple) * multiple
        return torch.tensor([record + [0] * (longest - len(record)) for record in records])


@pytest.mark.parametrize(
    ("collate", "lengths"),
    [
        (Padding(), {16, 32}),
        (Padding(model_max_length=512), {16, 32}),
        (Padding(model_max_length=10**30), {16, 32}),
        (Padding(4), {4, 8, 16, 20}),  # the user's own
        (Padding(model_max_length=20), {3, 5, 13, 17, 16}),  # 32 would be beyond what the model takes
    ],
)
def test_padding_collators_pad_to_multiples_of_a_length(collate: Padding, lengths: set[int]) -> None:
    records = [list(range(1, length + 1)) for length in (3, 5, 13, 17, 16)]
    before = collate.pad_to_multiple_of
    batch = Collator(collate).of_stream(records)
    assert {group.tensors[0].shape[-1] for group in batch.groups} == lengths
    for place, record in enumerate(records):
        row = batch.example(place)[0].tolist()
        assert row[: len(record)] == record
        assert not any(row[len(record) :])
    assert collate.pad_to_multiple_of == before


def test_a_records_padding_is_the_same_in_every_company() -> None:
    short, long = [1, 2, 3], list(range(40))
    alone = Collator(Padding()).of_stream([short])
    among = Collator(Padding()).of_stream([long, short, long])
    assert torch.equal(alone.example(0), among.example(1))
