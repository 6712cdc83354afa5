"""The draws: inclusion, independence, counts, shards, windows, seeds, cost."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_lap2.sampling import Part, PoissonBatchSampler


def windows(sampler: PoissonBatchSampler) -> list[tuple[int, list[int]]]:
    """(release, drawn indices) of each window of one pass, template records left out."""
    gathered: dict[int, list[int]] = {}
    for batch in sampler:
        part = sampler.next_part()
        gathered.setdefault(part.release, []).extend(batch[: part.count])
    return list(gathered.items())


def inclusion(sampler: PoissonBatchSampler) -> np.ndarray:
    """Boolean [windows, N]: which example is in which draw."""
    drawn = windows(sampler)
    table = np.zeros((len(drawn), sampler.num_examples), bool)
    for row, (_, indices) in enumerate(drawn):
        assert len(set(indices)) == len(indices)
        table[row, indices] = True
    return table


def test_every_example_at_rate_q():
    """100 examples, q = 0.1: each frequency within its binomial interval (1e-5 two-sided, 100 of them)."""
    steps = 20_000
    table = inclusion(PoissonBatchSampler(100, 10, steps, seed=1))
    low, high = stats.binom.interval(1 - 1e-5, steps, 0.1)
    frequency = table.sum(axis=0)
    assert low <= frequency.min()
    assert frequency.max() <= high
    assert abs(frequency.sum() - 200_000) < 5 * math.sqrt(200_000 * 0.9)  # q within 1 %


def test_inclusions_are_independent_pairwise_and_over_time():
    steps = 20_000
    table = inclusion(PoissonBatchSampler(40, 10, steps, seed=2)).astype(float)
    # The sum of squared correlations of independent coins is chi squared with one degree for each pair.
    correlation = np.corrcoef(table, rowvar=False)[np.triu_indices(40, 1)]
    assert 1e-4 < stats.chi2.sf(steps * (correlation**2).sum(), len(correlation)) < 1 - 1e-4
    shifted = np.array([np.corrcoef(table[:-1, i], table[1:, i])[0, 1] for i in range(40)])
    assert 1e-4 < stats.chi2.sf(steps * (shifted**2).sum(), 40) < 1 - 1e-4


@pytest.mark.parametrize(
    ("num", "batch", "accumulate"), [(20, 1, 1), (30, 10, 2), (1000, 30, 1), (10**9, 2, 1), (10**7, 500, 4)]
)
def test_counts_are_binomial(num, batch, accumulate):
    draws = 4000
    sampler = PoissonBatchSampler(num, batch, draws * accumulate, accumulate=accumulate, seed=3)
    counts = np.zeros(draws, int)
    for _ in sampler:
        part = sampler.next_part()
        counts[part.release] += part.count
    law = stats.binom(num, batch * accumulate / num)
    edges = np.unique(law.ppf(np.linspace(0.05, 0.95, 12)))
    observed = np.histogram(counts, np.concatenate(([-1], edges, [num])) + 0.5)[0]
    expected = draws * np.diff(np.concatenate(([0], law.cdf(edges), [1])))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_order_within_a_window_is_random():
    """Which of the drawn examples comes first, and in which part, does not depend on its index."""
    sampler = PoissonBatchSampler(10, 10, 8000, accumulate=1, seed=4)
    first = np.bincount([batch[0] for batch in sampler], minlength=10)
    assert stats.chisquare(first).pvalue > 1e-4
    halves = PoissonBatchSampler(10, 5, 8000, accumulate=2, seed=5)
    seen = np.zeros(10, int)
    for batch in halves:
        if halves.next_part().index == 0:
            np.add.at(seen, batch, 1)
    assert stats.chisquare(seen).pvalue > 1e-4


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_are_disjoint_and_cover(world):
    """q = 1: every rank draws its whole shard, together every example once."""
    num = 12
    drawn = []
    for rank in range(world):
        sampler = PoissonBatchSampler(num, num // world, 1, rank=rank, world_size=world)
        assert sampler.sample_rate == 1.0
        (batch,) = sampler
        assert sampler.next_part().count == len(batch)
        assert all(index % world == rank for index in batch)
        drawn += batch
    assert sorted(drawn) == list(range(num))


def test_ranks_of_uneven_shards_draw_at_one_rate():
    """13 examples on 4 ranks: shards of 4, 3, 3, 3, and each example at q = 8 / 13."""
    steps = 6000
    total = np.zeros(13, int)
    for rank in range(4):
        sampler = PoissonBatchSampler(13, 2, steps, rank=rank, world_size=4, seed=6)
        assert sampler.sample_rate == 8 / 13
        assert sampler.expected_batch_size == 8
        total += inclusion(sampler).sum(axis=0)
    low, high = stats.binom.interval(1 - 1e-5, steps, 8 / 13)
    assert low <= total.min()
    assert total.max() <= high


def test_ranks_draw_independently():
    tables = [inclusion(PoissonBatchSampler(40, 5, 5000, rank=r, world_size=2, seed=7)) for r in (0, 1)]
    counts = [table.sum(axis=1) for table in tables]
    assert abs(np.corrcoef(*counts)[0, 1]) < 5 / math.sqrt(5000)


def test_more_ranks_than_examples():
    sampler = PoissonBatchSampler(3, 1, 5, rank=2, world_size=3)
    assert [batch for batch in sampler] == [[2]] * 5
    with pytest.raises(ValueError, match="above 1"):
        PoissonBatchSampler(3, 1, 5, rank=3, world_size=4)


def test_accumulation_with_a_ragged_end():
    """16 loader batches, accumulate 5: windows of 5, 5, 5 and 1 parts, no index twice in a window."""
    sampler = PoissonBatchSampler(200, 4, 16, accumulate=5, seed=8)
    assert sampler.expected_batch_size == 20
    assert sampler.sample_rate == 0.1
    assert len(sampler) == 16
    for epoch in range(3):
        parts = []
        batches: dict[int, list[int]] = {}
        for batch in sampler:
            part = sampler.next_part()
            parts.append(part)
            batches.setdefault(part.release, []).extend(batch[: part.count])
        shape = [(p.release - 4 * epoch, p.index, p.of) for p in parts]
        assert shape == [(w, i, 5) for w in range(3) for i in range(5)] + [(3, 0, 1)]
        for indices in batches.values():
            assert len(set(indices)) == len(indices)
        for release in range(4 * epoch, 4 * epoch + 3):
            assert len({p.index for p in parts if p.release == release}) == 5


def test_each_example_chooses_its_part_by_itself():
    """Which other examples are drawn does not matter to it: dealt out by position, one more would move the others.
    The part of an example is uniform, and independent of the number drawn."""
    sampler = PoissonBatchSampler(40, 10, 2, accumulate=2, seed=5)
    first, sizes = np.zeros(40), []
    times = 800
    for _ in range(times):
        one, two = list(sampler)
        a, b = sampler.next_part().count, sampler.next_part().count
        first[one[:a]] += 1
        first[two[:b]] -= 1
        sizes.append((a - b) / max(1.0, (a + b) ** 0.5))
    assert np.abs(first).max() < 5 * (times / 2) ** 0.5  # signs of times/2 draws on average
    assert 0.8 < np.std(sizes) < 1.2  # of a binomial with one half


def test_a_short_last_window_draws_at_its_own_rate():
    """1 part of 5: 4 expected examples of 200, charged at the q of 20."""
    sampler = PoissonBatchSampler(200, 4, 6, accumulate=5, seed=9)
    counts = []
    for _ in range(3000):
        drawn = windows(sampler)
        counts.append([len(indices) for _, indices in drawn])
    means = np.mean(counts, axis=0)
    assert means == pytest.approx([20, 4], abs=5 * math.sqrt(20 / 3000))


def test_empty_draws_show_a_template():
    """20 records, batch 1: empty with probability (19/20)^20 = 0.358."""
    sampler = PoissonBatchSampler(20, 1, 5000, seed=10)
    empty = 0
    for batch in sampler:
        part = sampler.next_part()
        assert len(batch) == max(part.count, 1)
        assert all(0 <= index < 20 for index in batch)
        empty += part.count == 0
    assert empty / 5000 == pytest.approx(0.95**20, abs=5 * 0.48 / math.sqrt(5000))


@pytest.mark.parametrize("world", [1, 3])
def test_template_is_a_valid_index_on_every_rank(world):
    for rank in range(world):
        sampler = PoissonBatchSampler(10**6, 1, 200, accumulate=1, rank=rank, world_size=world, seed=1)
        templates = {batch[0] for batch in sampler if sampler.next_part().count == 0}
        assert templates == {rank}


def test_batch_of_the_whole_data():
    sampler = PoissonBatchSampler(7, 7, 50)
    assert sampler.sample_rate == 1.0
    orders = {tuple(batch) for batch in sampler}
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(orders) > 1


def test_seed_release_and_rank_key_the_draw():
    def of(seed, release, rank):
        sampler = PoissonBatchSampler(10_000, 500, 10, rank=rank, world_size=2, seed=seed)
        sampler.start(release=release, batch_idx=0)
        return next(iter(sampler))

    assert of(1, 2, 0) == of(1, 2, 0)
    assert len({tuple(of(*key)) for key in ((1, 2, 0), (2, 2, 0), (1, 3, 0), (12, 3, 0), (1, 23, 0))}) == 5
    assert [i // 2 for i in of(1, 2, 0)] != [i // 2 for i in of(1, 2, 1)]


def test_a_seeded_run_resumes_where_it_stopped():
    whole = PoissonBatchSampler(1000, 20, 10, accumulate=2, seed=11)
    epochs = windows(whole) + windows(whole)
    assert [release for release, _ in epochs] == list(range(10))
    assert len({tuple(indices) for _, indices in epochs}) == 10
    resumed = PoissonBatchSampler(1000, 20, 10, accumulate=2, seed=11)
    resumed.start(release=3, batch_idx=6)
    assert windows(resumed) + windows(resumed) == epochs[3:]


def test_default_draws_are_fresh_and_deaf_to_global_seeds():
    drawn = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)  # noqa: NPY002 (what seed_everything does)
        sampler = PoissonBatchSampler(10**6, 100, 3)
        sampler.start(release=5, batch_idx=0)
        drawn += [tuple(batch) for batch in sampler]
    assert len(set(drawn)) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_do_not_share_draws():
    walk = iter(PoissonBatchSampler(10**6, 100, 3))
    next(walk)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (the other process)
        try:
            os.write(write, repr(next(walk)).encode())
        finally:
            os._exit(0)
    other = os.read(read, 1 << 16).decode()
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    assert other.startswith("[")
    assert other != repr(next(walk))


def test_a_draw_costs_what_is_drawn():
    """10^9 examples, about 1,000 drawn: no array of the data set's size, nor a fiftieth of it."""
    walk = iter(PoissonBatchSampler(10**9, 1000, 100))
    next(walk)
    tracemalloc.start()
    try:
        for batch in itertools.islice(walk, 5):
            assert 700 < len(batch) < 1300
            assert max(batch) < 10**9
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def test_tiny_rate_is_not_inflated():
    """q = 1e-8 on 10^9 examples: 10 expected, over 4,000 draws within 5 standard deviations (0.8 %)."""
    sampler = PoissonBatchSampler(10**9, 10, 4000, seed=12)
    total = 0
    for _ in sampler:
        total += sampler.next_part().count
    assert abs(total - 40_000) < 5 * 200


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((10, 11, 1), {}, r"batch_size=11 .* num_examples=10"),
        (
            (10, 2, 1),
            {"accumulate": 3, "world_size": 2},
            r"batch_size=2 \* accumulate_grad_batches=3 \* world_size=2 = 12",
        ),
        ((0, 1, 1), {}, "num_examples must be at least 1, got 0"),
        ((10, 0, 1), {}, "batch_size must be at least 1, got 0"),
        ((10, 1, 0), {}, "num_batches must be at least 1, got 0"),
        ((10, 1, 1), {"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ((10, 1, 1), {"world_size": 0}, "world_size must be at least 1, got 0"),
        ((10, 1, 1), {"rank": 1}, "rank must lie in .* got 1"),
        ((10, 1, 1), {"rank": -1}, "rank must lie in .* got -1"),
    ],
)
def test_refuses_numbers(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        PoissonBatchSampler(*arguments, **keywords)


def test_refuses_types():
    with pytest.raises(TypeError, match=r"batch_size must be an int, got 2\.0"):
        PoissonBatchSampler(10, 2.0, 1)
    with pytest.raises(TypeError, match="seed must be an int or None, got 'a'"):
        PoissonBatchSampler(10, 2, 1, seed="a")


def test_noise_and_sampling_do_not_load_lightning():
    code = (
        "import sys, lightning_lap2.noise, lightning_lap2.sampling; "
        "print([m for m in sys.modules if m.split('.')[0] in ('lightning', 'pytorch_lightning')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_part_of_a_batch():
    sampler = PoissonBatchSampler(4, 4, 1)
    list(sampler)
    part = sampler.next_part()
    assert part == Part(release=0, index=0, of=1, count=4, records=part.records)
    assert sorted(part.records) == [0, 1, 2, 3]


def test_absent_records_are_drawn_and_dropped():
    """The draws, and so everything that the other records see, are those of the whole data."""
    whole, without = (PoissonBatchSampler(12, 3, 40, accumulate=2, seed=5) for _ in range(2))
    without.absent = frozenset({2, 7})
    for batch, rest in zip(whole, without, strict=True):
        part, other = whole.next_part(), without.next_part()
        kept = [index for index in part.records if index not in (2, 7)]
        assert other.records == tuple(kept)
        assert other.count == len(kept)
        assert sorted(other.left_out) == sorted(set(part.records) - set(kept))
        assert rest == (kept or batch[:1])
        assert (other.release, other.index, other.of) == (part.release, part.index, part.of)
