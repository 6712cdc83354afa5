"""Every drawn index K times in a row: the draws, parts and counts of K = 1, whatever fetches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_lap2.sampling import PoissonBatchSampler, RecordedBatchSampler, rebuild_loader


def poisson(views: int, **options: Any) -> PoissonBatchSampler:
    return PoissonBatchSampler(40, 3, 12, accumulate=2, seed=5, views=views, **options)


def recorded(views: int) -> RecordedBatchSampler:
    return RecordedBatchSampler(BatchSampler(SequentialSampler(range(31)), 3, False), accumulate=2, views=views)


def walked(sampler: Any) -> list[Any]:
    """Every batch with its part."""
    return [(batch, sampler.next_part()) for batch in sampler]


@pytest.mark.parametrize("make", [poisson, recorded])
@pytest.mark.parametrize("views", [2, 5])
def test_each_index_comes_k_times_in_a_row(make: Any, views: int) -> None:
    once, several = walked(make(1)), walked(make(views))
    assert len(once) == len(several) > 0
    for (batch, part), (repeated, same) in zip(once, several, strict=True):
        assert same == part
        assert repeated == [index for index in batch for _ in range(views)]
        assert len(batch) == max(part.count, 1)


def test_the_template_of_an_empty_draw_has_k_rows() -> None:
    batches = walked(PoissonBatchSampler(50, 1, 50, seed=2, views=3))
    empty = [batch for batch, part in batches if part.count == 0]
    assert empty
    assert all(batch == [0, 0, 0] for batch in empty)


def test_rates_do_not_depend_on_views() -> None:
    one, several = poisson(1), poisson(4)
    assert (several.sample_rate, several.expected_batch_size) == (one.sample_rate, one.expected_batch_size)
    assert len(several) == len(one)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_views_are_on_the_rank_of_their_example(rank: int) -> None:
    for batch, _ in walked(poisson(3, rank=rank, world_size=2)):
        assert {index % 2 for index in batch} == {rank}


@pytest.mark.parametrize("views", [0, -1, 2.0, True])
def test_views_must_be_a_positive_int(views: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="views must be"):
        poisson(views)


def test_no_example_twice_is_still_watched_under_views() -> None:
    repeats = RecordedBatchSampler(BatchSampler([4, 1, 4], 3, False), views=2)
    with pytest.raises(RuntimeError, match="gave an example twice"):
        list(repeats)


class Noisy(Dataset[Any]):
    """(index, a random number): a transform that draws afresh at each fetch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(())


class Batched(Noisy):
    """Fetched by lists of indices only."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        raise AssertionError("the batched fetch was not used")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Tensor]]:
        return [(index, torch.rand(())) for index in indices]


@pytest.mark.parametrize("data", [Noisy(), Batched()], ids=["getitem", "getitems"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["main", "workers"])
def test_views_differ_and_stay_side_by_side(data: Dataset[Any], options: dict[str, Any]) -> None:
    sampler = poisson(3)
    loader = rebuild_loader(DataLoader(data, batch_size=3, **options), sampler)
    expected = [batch for batch in poisson(3)]
    drawn: list[float] = []
    for _ in range(2):  # a second pass over the same workers gives other views
        sampler.start(release=0, batch_idx=0)
        for (indices, numbers), wanted in zip(loader, expected, strict=True):
            assert indices.tolist() == wanted
            drawn += numbers.tolist()
    assert len(set(drawn)) == len(drawn)
