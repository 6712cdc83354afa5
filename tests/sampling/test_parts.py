"""Window numbers over passes: start, resume, abandoned passes, and the order of delivery."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_lap2.sampling import PoissonBatchSampler, RecordedBatchSampler, rebuild_loader


def shape(sampler, walk=None):
    """(release, index, of) of every batch of one pass."""
    out = []
    for _ in sampler if walk is None else walk:
        part = sampler.next_part()
        out.append((part.release, part.index, part.of))
    return out


def poisson(batches=7, accumulate=3):
    return PoissonBatchSampler(100, 2, batches, accumulate=accumulate, seed=1)


def recorded(batches=7, accumulate=3):
    return RecordedBatchSampler(BatchSampler(range(2 * batches), 2, False), accumulate=accumulate)


both = pytest.mark.parametrize("make", [poisson, recorded])
EPOCH = [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 3), (1, 1, 3), (1, 2, 3), (2, 0, 1)]


def later(epoch, by):
    return [(release + by, index, of) for release, index, of in epoch]


@both
def test_numbers_go_on_over_passes(make):
    sampler = make()
    assert shape(sampler) == EPOCH
    assert shape(sampler) == later(EPOCH, 3)


@both
def test_numbers_go_on_without_anyone_asking_for_parts(make):
    sampler = make()
    assert len(list(sampler)) == 7
    assert shape(sampler) == later(EPOCH, 3)


@both
def test_start_sets_release_and_position(make):
    sampler = make()
    sampler.start(release=40, batch_idx=3)
    assert shape(sampler) == [(40, 0, 3), (40, 1, 3), (40, 2, 3), (41, 0, 1)]
    assert shape(sampler) == later(EPOCH, 42)


@both
def test_start_inside_a_window_leaves_the_rest_of_it(make):
    sampler = make()
    sampler.start(release=5, batch_idx=2)
    assert shape(sampler)[:2] == [(5, 2, 3), (6, 0, 3)]


def test_the_rest_of_a_window_draws_at_its_own_rate():
    counts = []
    for release in range(2000):
        sampler = PoissonBatchSampler(100, 10, 3, accumulate=3, seed=2)
        sampler.start(release=release, batch_idx=1)
        list(sampler)
        counts.append(sampler.next_part().count + sampler.next_part().count)
    assert sum(counts) / 2000 == pytest.approx(20, abs=5 * 4 / 2000**0.5)


@both
def test_start_lowers_the_epoch(make):
    sampler = make()
    sampler.start(release=0, batch_idx=0, num_batches=5)
    short = [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 2), (1, 1, 2)]
    assert shape(sampler) == short
    assert shape(sampler) == later(short, 2)
    assert len(sampler) == 7
    sampler.start(release=0, batch_idx=0)
    assert shape(sampler) == EPOCH


@both
def test_start_at_the_end_of_an_epoch(make):
    sampler = make()
    sampler.start(release=9, batch_idx=7)
    assert shape(sampler) == []
    assert shape(sampler) == later(EPOCH, 9)


@both
def test_an_unused_iterator_does_not_count(make):
    """Workers draw ahead, and Lightning makes an iterator twice when it reloads."""
    sampler = make()
    sampler.start(release=4, batch_idx=3)
    ahead = iter(sampler)
    next(ahead), next(ahead)
    assert shape(sampler) == [(4, 0, 3), (4, 1, 3), (4, 2, 3), (5, 0, 1)]


@both
def test_an_abandoned_pass_counts_what_was_taken(make):
    sampler = make()
    walk = iter(sampler)
    for _ in range(6):
        next(walk)
    for _ in range(4):
        sampler.next_part()
    assert shape(sampler) == later(EPOCH, 2)


@both
def test_a_new_pass_does_not_hear_the_old_one(make):
    sampler = make()
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    with pytest.raises(RuntimeError, match="without a batch"):
        sampler.next_part()
    next(old)
    assert shape(sampler, new) == EPOCH


@both
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"release": -1, "batch_idx": 0}, "release must not be negative, got -1"),
        ({"release": 0, "batch_idx": 8}, "batch_idx=8 lies outside an epoch of 7"),
        ({"release": 0, "batch_idx": -1}, "batch_idx=-1"),
        ({"release": 0, "batch_idx": 3, "num_batches": 2}, "batch_idx=3 lies outside an epoch of 2"),
        ({"release": 0, "batch_idx": 0, "num_batches": 8}, "num_batches=8 is more than the epoch's 7"),
        ({"release": 0, "batch_idx": 0, "num_batches": 0}, "num_batches must be at least 1, got 0"),
    ],
)
def test_start_refuses(make, keywords, message):
    with pytest.raises(ValueError, match=message):
        make().start(**keywords)


@both
def test_next_part_needs_a_batch(make):
    sampler = make()
    with pytest.raises(RuntimeError, match=r"next_part\(\) was called without a batch"):
        sampler.next_part()


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_arrive_in_the_order_of_delivery(workers):
    data = torch.arange(50)
    loader = DataLoader(data, batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    sampler = PoissonBatchSampler(50, 2, 25, accumulate=2, seed=3)
    mirror = PoissonBatchSampler(50, 2, 25, accumulate=2, seed=3)
    rebuilt = rebuild_loader(loader, sampler)
    assert len(rebuilt) == 25
    for _ in range(2):
        expected = list(mirror)
        for batch, indices in zip(rebuilt, expected, strict=True):
            part = sampler.next_part()
            assert part == mirror.next_part()
            assert batch.tolist() == indices
            assert part.count in (0, len(batch))


def test_recorded_yields_the_lists_unchanged():
    inner = [[3, 1], [2], [], [0, 4]]
    sampler = RecordedBatchSampler(inner, accumulate=2)
    out = list(sampler)
    assert out == inner
    assert [sampler.next_part().count for _ in inner] == [2, 1, 0, 2]
    assert len(list(sampler)) == 4  # examples may come again in the next pass


@pytest.mark.parametrize("inner", [[[1, 2], [3, 1]], [[5, 5]], [[0], [100_000], [7, 100_000]]])
def test_recorded_refuses_repeats(inner):
    with pytest.raises(RuntimeError, match="list gave an example twice in one pass"):
        list(RecordedBatchSampler(inner))


def test_recorded_names_the_sampler_that_repeats():
    sampler = torch.utils.data.RandomSampler(range(5), replacement=True, num_samples=20)
    with pytest.raises(RuntimeError, match="RandomSampler gave an example twice"):
        list(RecordedBatchSampler(BatchSampler(sampler, 4, False)))


def test_recorded_refuses_what_is_not_an_index():
    with pytest.raises(ValueError, match="negative index -1"):
        list(RecordedBatchSampler([[0, -1]]))
    with pytest.raises(TypeError):
        list(RecordedBatchSampler([["a"]]))
    with pytest.raises(TypeError, match="generator has no length: give num_batches"):
        RecordedBatchSampler(b for b in [[0]])


def test_recorded_takes_a_length_where_there_is_none():
    sampler = RecordedBatchSampler(([i] for i in range(3)), num_batches=3, accumulate=2)
    assert shape(sampler) == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]


def test_recorded_ends_early_with_the_wrapped_sampler():
    sampler = RecordedBatchSampler([[0], [1], [2]], num_batches=6, accumulate=2)
    assert shape(sampler) == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    assert sampler._pass.follower() == (2, 0)


def test_recorded_shows_lightning_the_inner_sampler():
    inner = SequentialSampler(range(4))
    sampler = RecordedBatchSampler(BatchSampler(inner, 2, False))
    assert sampler.sampler is inner
    assert sampler.batch_size == 2
