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
    Distribution,
    NoiseSource,
    StagedAesNoise,
    TorchNoise,
    make_noise_source,
)
from lightning_lap2.noise.aes import CHUNK

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
    distribution: Distribution = "laplace",
    release: int = 0,
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """``size`` values of noise, in fp64."""
    values = torch.zeros(size, dtype=dtype)
    source.add_(values, scale, distribution, release=release)
    return values.numpy().astype(np.float64)


@every_source
@every_distribution
@every_dtype
def test_distribution_and_scale(make, distribution, dtype):
    noise = draw(make(CPU, seed=7), 400_000, 2.5, distribution, dtype=dtype)
    assert stats.kstest(noise / 2.5, EXACT[distribution].cdf).pvalue > 1e-3
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
    noise = draw(make(CPU, seed=3), size, distribution=distribution, dtype=dtype)
    assert np.isfinite(noise).all()
    # 0 has probability 2^-25 under fp32 Laplace noise; the seed is fixed.
    assert (noise != 0).all()


@every_source
@every_distribution
def test_chunks_and_releases_are_uncorrelated(make, distribution):
    source = make(CPU, seed=2)
    first = draw(source, 2 * CHUNK, distribution=distribution, release=0)
    second = draw(source, 2 * CHUNK, distribution=distribution, release=1)
    bound = 5 / math.sqrt(CHUNK)
    assert abs(np.corrcoef(first[:CHUNK], first[CHUNK:])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound


@every_source
def test_values_do_not_repeat_beyond_chance(make):
    """Doubles: 2^-53 steps, so 10^5 draws hold no equal pair (chance about 10^-6)."""
    noise = draw(make(CPU, seed=1), 100_000, dtype=torch.float64)
    assert len(np.unique(noise)) == len(noise)


@every_source
def test_fp32_has_no_visible_grid(make):
    noise = draw(make(CPU, seed=1), 200_000)
    tail = noise[np.abs(noise) > 8]  # k below 2^31 e^-8 = 720,000: 1 word in 3,000
    assert len(np.unique(np.abs(tail))) > 0.99 * len(tail)
    # 2 * 10^5 draws from about 2^25 values per sign near the centre: few coincide.
    assert len(np.unique(noise)) > 0.98 * len(noise)


@every_source
def test_fp64_centre_is_finer_than_fp32(make):
    noise = draw(make(CPU, seed=9), 1_000_000, dtype=torch.float64)
    small = np.sort(np.abs(noise))[:1000]
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
    assert not np.isin(draws[0], draws[1]).any()


@every_source
def test_default_noise_does_not_depend_on_release(make):
    source = make(CPU)
    assert not np.array_equal(draw(source, 100, release=4), draw(source, 100, release=4))


@every_source
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_do_not_share_noise(make, duplicate):
    source = make(CPU)
    draw(source, 100, dtype=torch.float64)  # a staged source now has noise prepared
    other = draw(duplicate(source), 100, dtype=torch.float64)
    assert not np.isin(other, draw(source, 100, dtype=torch.float64)).any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@every_source
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_do_not_share_noise(make):
    source = make(CPU)
    draw(source, 100, dtype=torch.float64)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (the other process)
        try:
            torch.set_num_threads(1)
            os.write(write, draw(source, 100, dtype=torch.float64).tobytes())
        finally:
            os._exit(0)
    other = os.read(read, 1 << 16)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    assert len(other) == 800
    assert not np.isin(np.frombuffer(other), draw(source, 100, dtype=torch.float64)).any()


@every_source
def test_seed_release_and_rank_key_the_noise(make):
    def of(seed, release, rank):
        return draw(make(CPU, seed=seed, rank=rank), 500, release=release, dtype=torch.float64)

    base = of(1, 2, 3)
    assert np.array_equal(base, of(1, 2, 3))
    for other in (of(2, 2, 3), of(1, 3, 3), of(1, 2, 0), of(12, 2, 3), of(1, 23, 0), of(-1, 2, 3)):
        assert not np.isin(base, other).any()


@every_source
def test_seeded_noise_scales_exactly(make):
    assert np.array_equal(2 * draw(make(CPU, seed=1), 500, 0.5), draw(make(CPU, seed=1), 500, 1.0))


@every_source
def test_noise_is_added_to_what_is_there(make):
    values = torch.arange(1000, dtype=torch.float64)
    make(CPU, seed=1).add_(values, 0.5, release=0)
    expected = draw(make(CPU, seed=1), 1000, 0.5, dtype=torch.float64)
    assert torch.allclose(values, torch.arange(1000, dtype=torch.float64) + torch.from_numpy(expected), atol=1e-9)


@every_source
def test_a_slice_is_noised_alone(make):
    values = torch.zeros(1000)
    make(CPU).add_(values[200:300], 1.0, release=0)
    assert (values[200:300] != 0).all()
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


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1e-20, 1.0, 7.7])
def test_scale_is_never_rounded_down(scale):
    from lightning_lap2.noise.base import check_request

    used = check_request(torch.zeros(1), scale, "laplace", CPU)
    assert scale <= used <= scale * (1 + 2**-23)
    assert used == float(np.float32(used))
    assert check_request(torch.zeros(1, dtype=torch.float64), scale, "laplace", CPU) == scale


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
