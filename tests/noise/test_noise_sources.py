"""What every noise source promises: distribution, scale, independence, secrecy, refusals."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_lap2.noise import (
    AesNoise,
    NoiseSource,
    StagedAesNoise,
    TorchNoise,
    make_noise_source,
)
from lightning_lap2.noise.aes import CHUNK
from lightning_lap2.noise.grid import spacing

CPU = torch.device("cpu")
SOURCES = [AesNoise, TorchNoise, StagedAesNoise]
EXACT = {"laplace": stats.laplace, "gaussian": stats.norm}
STD = {"laplace": math.sqrt(2), "gaussian": 1.0}

every_source = pytest.mark.parametrize("make", SOURCES)
every_distribution = pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def draw(
    source: NoiseSource,
    size: int,
    scale: float = 1.0,
    distribution: str = "laplace",
    release: int = 0,
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """``size`` values of noise, multiples of the grid's spacing, in fp64."""
    values = torch.zeros(size, dtype=dtype)
    source.add_(values, scale, distribution, release=release)
    return values.numpy().astype(np.float64)


def spread(noise: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Rounded noise, spread over its cells again, so that it can be compared with a density."""
    return noise + spacing(scale) * (np.random.default_rng(0).random(len(noise)) - 0.5)


def unrelated(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal values are as rare as between independent draws: one in 250 or less."""
    return bool((one == other).mean() < 0.02)


@every_source
@every_distribution
@every_dtype
def test_distribution_and_scale(make, distribution, dtype):
    noise = draw(make(CPU, seed=7), 400_000, 2.5, distribution, dtype=dtype)
    assert stats.kstest(spread(noise, 2.5) / 2.5, EXACT[distribution].cdf).pvalue > 1e-3
    assert noise.std() == pytest.approx(2.5 * STD[distribution], rel=0.01)
    assert abs(noise.mean()) < 5 * 2.5 * STD[distribution] / math.sqrt(len(noise))


@every_source
@every_distribution
def test_tail_frequencies(make, distribution):
    """Counts beyond x for x far out agree with the survival function (5 standard deviations)."""
    size = 2_000_000
    noise = np.abs(draw(make(CPU, seed=11), size, distribution=distribution))
    for expected in (20_000, 200, 20):
        x = EXACT[distribution].isf(expected / size / 2)
        assert abs((noise > x).sum() - expected) < 5 * math.sqrt(expected)


@every_source
@every_distribution
def test_sign_is_independent_of_magnitude(make, distribution):
    noise = draw(make(CPU, seed=5), 400_000, distribution=distribution)
    order = np.argsort(np.abs(noise))
    for part in np.array_split(np.sign(noise[order]), 8):
        assert abs(part.sum()) < 5 * math.sqrt(len(part))
    # Gaussian pairs share a radius, so neighbours of any lag must be checked by value and by square.
    half = len(noise) // 2
    for lag in (1, 2, CHUNK // 2, half):
        first, second = noise[:-lag], noise[lag:]
        bound = 5 / math.sqrt(len(first))
        assert abs(np.corrcoef(first, second)[0, 1]) < bound
        assert abs(np.corrcoef(np.exp(-(first**2)), np.exp(-(second**2)))[0, 1]) < bound


@every_source
@every_distribution
@every_dtype
@pytest.mark.parametrize("size", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_every_coordinate_is_noised_at_chunk_boundaries(make, distribution, dtype, size):
    """0 is a grid point like any other: what is 0 in each of four releases had no noise (chance 1e-4 in all cases)."""
    noise = [draw(make(CPU, seed=3), size, distribution=distribution, dtype=dtype, release=r) for r in range(4)]
    assert np.isfinite(noise).all()
    assert np.any(noise, axis=0).all()


@every_source
@every_distribution
def test_chunks_and_releases_are_uncorrelated(make, distribution):
    source = make(CPU, seed=2)
    first = draw(source, 2 * CHUNK, distribution=distribution, release=0)
    second = draw(source, 2 * CHUNK, distribution=distribution, release=1)
    bound = 5 / math.sqrt(CHUNK)
    assert abs(np.corrcoef(first[:CHUNK], first[CHUNK:])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound


@every_distribution
def test_noise_is_finer_than_any_grid_before_it_is_rounded(distribution):
    """Steps of 2^-53: 10^5 draws hold no equal pair (chance about 10^-6), and the smallest are spread evenly."""
    noise = torch.empty(1_000_000, dtype=torch.float64)
    AesNoise(CPU, seed=9).fill_(noise, distribution, release=0)
    assert len(noise[:100_000].unique()) == 100_000
    small = noise.abs().sort().values[:1000].numpy()
    assert np.all(np.diff(small) > 0)
    assert stats.kstest(small / small[-1], "uniform").pvalue > 1e-3


@every_source
def test_default_noise_is_fresh_and_deaf_to_global_seeds(make):
    draws = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)  # noqa: NPY002 (what seed_everything does)
        before = torch.get_rng_state()
        draws.append(draw(make(CPU), 1000, dtype=torch.float64))
        assert torch.equal(torch.get_rng_state(), before)
    assert unrelated(*draws)


@every_source
def test_default_noise_does_not_depend_on_release(make):
    source = make(CPU)
    assert unrelated(draw(source, 1000, release=4), draw(source, 1000, release=4))


@every_source
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_do_not_share_noise(make, duplicate):
    source = make(CPU)
    draw(source, 1000)  # a staged source now has noise prepared
    other = draw(duplicate(source), 1000)
    assert unrelated(other, draw(source, 1000))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@every_source
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_do_not_share_noise(make):
    source = make(CPU)
    draw(source, 1000)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (the other process)
        try:
            torch.set_num_threads(1)
            os.write(write, draw(source, 1000).tobytes())
        finally:
            os._exit(0)
    other = os.read(read, 1 << 16)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    assert len(other) == 8000
    assert unrelated(np.frombuffer(other), draw(source, 1000))


@every_source
def test_seed_release_and_rank_key_the_noise(make):
    def of(seed, release, rank):
        return draw(make(CPU, seed=seed, rank=rank), 500, release=release, dtype=torch.float64)

    base = of(1, 2, 3)
    assert np.array_equal(base, of(1, 2, 3))
    for other in (of(2, 2, 3), of(1, 3, 3), of(1, 2, 0), of(12, 2, 3), of(1, 23, 0), of(-1, 2, 3)):
        assert unrelated(base, other)


@every_source
def test_seeded_noise_scales_exactly(make):
    assert np.array_equal(2 * draw(make(CPU, seed=1), 500, 0.5), draw(make(CPU, seed=1), 500, 1.0))


@every_source
def test_noise_is_added_to_what_is_there(make):
    values = torch.arange(1000, dtype=torch.float64)
    make(CPU, seed=1).add_(values, 0.5, release=0)
    expected = draw(make(CPU, seed=1), 1000, 0.5, dtype=torch.float64)
    # whole numbers are points of the grid, so they change nothing about how the noise is rounded
    assert torch.equal(values, torch.arange(1000, dtype=torch.float64) + torch.from_numpy(expected))


@every_source
def test_a_slice_is_noised_alone(make):
    values = torch.zeros(1000)
    make(CPU).add_(values[200:300], 1.0, release=0)
    assert values[200:300].count_nonzero() > 90
    assert not values[:200].any()
    assert not values[300:].any()


@every_source
def test_zero_scale_and_zero_size(make):
    assert not draw(make(CPU), 100, 0.0).any()
    assert draw(make(CPU), 0).size == 0


@every_source
@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, -math.inf, 1e38, 1e-39])
def test_refuses_scales(make, scale):
    with pytest.raises(ValueError, match=f"noise scale.*{re.escape(str(scale))}"):
        draw(make(CPU), 3, scale)


@every_source
def test_refuses_tensors(make):
    source = make(CPU)
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        with pytest.raises(TypeError, match=f"float32.*{dtype}"):
            source.add_(torch.zeros(3, dtype=dtype), 1.0, release=0)
    for values in (torch.zeros(3, 4), torch.zeros(6)[::2], torch.zeros(())):
        with pytest.raises(ValueError, match="flat contiguous"):
            source.add_(values, 1.0, release=0)
    with pytest.raises(ValueError, match="meta"):
        source.add_(torch.zeros(3, device="meta"), 1.0, release=0)
    with pytest.raises(ValueError, match="'cauchy'"):
        source.add_(torch.zeros(3), 1.0, "cauchy", release=0)


def test_factory():
    assert type(make_noise_source("auto", CPU)) is AesNoise
    assert type(make_noise_source("aes", CPU)) is AesNoise
    assert type(make_noise_source("torch", CPU)) is TorchNoise
    assert type(make_noise_source("auto", torch.device("cuda"))) is TorchNoise
    assert type(make_noise_source("aes", torch.device("cuda"))) is StagedAesNoise
    assert type(make_noise_source("auto", torch.device("mps"))) is StagedAesNoise
    assert [make_noise_source(kind, CPU).name for kind in ("auto", "aes", "torch")] == ["aes", "aes", "torch"]
    with pytest.raises(ValueError, match=r"mps.*aes"):
        make_noise_source("torch", torch.device("mps"))
    with pytest.raises(ValueError, match="'cpu'"):
        make_noise_source("cpu", CPU)
    with pytest.raises(TypeError, match=r"1\.5"):
        make_noise_source("aes", CPU, seed=1.5)
