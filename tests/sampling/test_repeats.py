"""Records that torch's containers give several times, against a plain count; and streams."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from lightning_lap2.sampling.repeats import index_digest, repeated_records, repeating_stream
from tests.helpers import LIGHTNING, classifier, quiet_trainer, records

pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2


class Labelled(Dataset[Any]):
    """Each record says whose it is."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> frozenset[tuple[str, int]]:
        return frozenset({(self.name, range(self.size)[index])})


def held(row: Any) -> set[tuple[str, int]]:
    """All records in a row, which containers nest."""
    if isinstance(row, frozenset):
        return set(row)
    return set().union(*map(held, row.values() if isinstance(row, dict) else row))


def by_hand(dataset: Any) -> bool:
    """Whether a record is in several rows, by reading them all."""
    rows: defaultdict[Any, set[int]] = defaultdict(set)
    for number in range(len(dataset)):
        for record in held(dataset[number]):
            rows[record].add(number)
    return any(len(where) > 1 for where in rows.values())


LEAVES = [Labelled("a", 4), Labelled("b", 3), Labelled("c", 5)]


@st.composite
def datasets(draw: st.DrawFn, depth: int = 3) -> Any:
    kind = draw(st.sampled_from(["leaf", "subset", "concat", "stack"] if depth else ["leaf"]))
    if kind == "leaf":
        return draw(st.sampled_from(LEAVES))
    inner = draw(datasets(depth=depth - 1))
    if kind == "subset":
        size = len(inner)
        # most draws without repeats, so that the answer is not always the same
        if draw(st.booleans()):
            return Subset(inner, draw(st.permutations(range(size)))[: draw(st.integers(0, size))])
        lowest = -size if isinstance(inner, Labelled) else 0
        return Subset(inner, draw(st.lists(st.integers(lowest, size - 1), max_size=4)) if size else [])
    if kind == "concat":
        return ConcatDataset([inner, draw(datasets(depth=depth - 1))])
    other = draw(datasets(depth=depth - 1))
    size = min(len(inner), len(other))
    pair = [Subset(inner, range(size)), Subset(other, range(size))]
    return StackDataset(*pair) if draw(st.booleans()) else StackDataset(x=pair[0], y=pair[1])


@given(dataset=datasets())
def test_agrees_with_reading_every_row(dataset: Any) -> None:
    assert (repeated_records(dataset) is not None) == by_hand(dataset)


D = records(20)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Subset(D, [3, 4, 3]), "record 3 of its TensorDataset is in 2 rows of the Subset"),
        (Subset(D, [3, -17]), "record 3 of its TensorDataset"),
        (Subset(D, np.array([5, 5, 5])), "record 5 of its TensorDataset is in 3 rows"),
        (Subset(D, torch.tensor([5, 5])), "record 5"),
        (ConcatDataset([D, D]), "record 0 of its TensorDataset is in 2 rows of the ConcatDataset"),
        (ConcatDataset([Subset(D, range(8)), Subset(D, range(7, 12))]), "record 7"),
        (Subset(Subset(D, [1, 2, 3]), [0, 1, 0]), "record 1"),
        (StackDataset(D, Subset(D, [1, 0, *range(2, 20)])), "record 0"),
        (Subset({"x": 1, "y": 2}, ["x", "y", "x"]), "3 indices, 2 of them different"),  # type: ignore[arg-type]
    ],
)
def test_repeats_are_named(dataset: Any, words: str) -> None:
    assert words in str(repeated_records(dataset))
    if isinstance(dataset, StackDataset):
        return
    with pytest.raises(ValueError, match="the train data set holds a record several times: .* list each index once"):
        fit(DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize(
    "dataset",
    [
        D,
        Subset(D, range(20)),
        ConcatDataset([Subset(D, range(8)), Subset(D, range(8, 20)), records(5)]),
        ConcatDataset(random_split(D, [7, 13])),
        StackDataset(D, D),
        Subset({"x": 1, "y": 2}, ["x", "y"]),  # type: ignore[arg-type]
        Subset(D, []),
        ConcatDataset([StackDataset(D, records(20, seed=1)), records(3)]),
    ],
)
def test_what_holds_each_record_once(dataset: Any) -> None:
    assert repeated_records(dataset) is None


def fit(loader: Any, **arguments: Any) -> Any:
    callback = Lap2Privacy(eps=20.0, noise_multiplier=1.5, bound="joint", **arguments)
    quiet_trainer(pl, callback, max_epochs=1).fit(classifier(pl), loader)
    return callback


@pytest.mark.parametrize("sampling", ["poisson", "none"])
def test_remedy_runs_and_the_repeats_do_not(sampling: str) -> None:
    indices = [*range(12), 4, 5]
    with pytest.raises(ValueError, match="record 4 of its TensorDataset"):
        fit(DataLoader(Subset(D, indices), batch_size=4), sampling=sampling)
    assert fit(DataLoader(Subset(D, sorted(set(indices))), batch_size=4), sampling=sampling).steps == 3


def test_index_digest_tells_shards_apart() -> None:
    shards = [Subset(D, range(rank, 20, 2)) for rank in range(2)]
    assert index_digest(shards[0]) != index_digest(shards[1])
    splits = [random_split(D, [10, 10])[0] for _ in range(2)]
    assert index_digest(splits[0]) != index_digest(splits[1]), "a split of its own on every rank"
    same = [random_split(D, [10, 10], generator=torch.Generator().manual_seed(3))[0] for _ in range(2)]
    assert index_digest(same[0]) == index_digest(same[1])
    assert index_digest(D) == ""


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Every worker reads it all."""

    def __iter__(self) -> Iterator[Any]:
        return iter(D)


class Shared(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        step, start = (1, 0) if info is None else (info.num_workers, info.id)
        return iter([D[i] for i in range(start, len(D), step)])


class Helped(Stream):
    def _mine(self) -> list[int]:
        return [i for i in range(len(D)) for info in [torch.utils.data.get_worker_info()] if i % 2 == info.id]

    def __iter__(self) -> Iterator[Any]:
        return iter([D[i] for i in self._mine()])


def split_by_worker(indices: Any) -> Iterator[int]:
    info = get_worker_info()
    return iter([i for i in indices if i % info.num_workers == info.id])


class Pipeline(IterableDataset[Any]):
    """Its stages share out, itself it does not know."""

    def __init__(self, *stages: Any) -> None:
        self.options = {"stages": list(stages)}

    def __iter__(self) -> Iterator[Any]:
        indices: Any = range(len(D))
        for stage in self.options["stages"]:
            indices = stage(indices)
        return iter([D[i] for i in indices])


def counts(loader: DataLoader[Any]) -> Counter[Any]:
    return Counter(tuple(x.tolist()) for batch in loader for x in batch[0])


@pytest.mark.parametrize(
    "stream", [Shared(), Helped(), Pipeline(list, split_by_worker), ChainDataset([Shared(), Helped()])]
)
def test_streams_that_share_out_are_taken(stream: Any) -> None:
    loader = DataLoader(stream, batch_size=4, num_workers=2)
    assert repeating_stream(loader) is None
    if not isinstance(stream, ChainDataset):
        assert set(counts(loader).values()) == {1}, "as the real workers give them"


def test_streams_that_repeat_are_named() -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=2)
    assert set(counts(loader).values()) == {2}, "as the real workers give them"
    assert "each of the num_workers=2 workers iterates the whole Stream" in str(repeating_stream(loader))
    with pytest.raises(ValueError, match="each of the num_workers=2 workers.*num_workers=1"):
        fit(loader, sampling="none")
    assert fit(DataLoader(Stream(), batch_size=4, num_workers=1), sampling="none").steps == 5
    assert "whole Pipeline" in str(repeating_stream(DataLoader(Pipeline(list, sorted), num_workers=2)))
    stream = Shared()
    assert "holds the same Shared twice" in str(repeating_stream(DataLoader(ChainDataset([stream, stream]))))
    assert "whole Stream" in str(repeating_stream(DataLoader(ChainDataset([stream, Stream()]), num_workers=2)))


def test_plain_data_sets_cost_nothing() -> None:
    """No array of the data's length where there is no container."""

    class Huge(TensorDataset):
        def __len__(self) -> int:
            return 2**60

    assert repeated_records(Huge(torch.zeros(1))) is None
