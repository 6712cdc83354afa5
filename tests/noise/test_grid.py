"""Releases on a grid: what comes out, how often, and that float64 noise is as good as real noise up to the stated
shift (docs/guarantee.md, Theorem 8)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.floating_point import FLOATS, OURS, Source, advantage, certain, claimed_advantage
from lightning_lap2.mechanism import GRID_SHIFT
from lightning_lap2.noise import AesNoise, NoiseSource, StagedAesNoise, TorchNoise, device, make_noise_source
from lightning_lap2.noise.aes import CHUNK, REFINED, add_noise, noise_chunks
from lightning_lap2.noise.grid import CELLS, round_, spacing

CPU = torch.device("cpu")
BITS = 2.0**-63
OFF = 2.0**-44
"""By how much noise of scale 1 may be off (docs/guarantee.md, the lemma before Theorem 8)."""
SOURCES: list[Callable[..., NoiseSource]] = [AesNoise, TorchNoise, StagedAesNoise]

every_source = pytest.mark.parametrize("make", SOURCES)
every_distribution = pytest.mark.parametrize("distribution", ["laplace", "gaussian"])


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 0.99, 1.0, 1.01, 7.7, 2.0**40])
def test_spacing_is_a_power_of_two_about_a_hundredth_of_the_scale(scale: float) -> None:
    assert math.frexp(spacing(scale))[0] == 0.5
    assert CELLS <= scale / spacing(scale) < 2 * CELLS
    assert spacing(0.0) == 0.0


def test_rounding_is_to_nearest_and_the_same_on_every_library() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(10_000) * 10.0 ** rng.integers(-6, 9, 10_000)
    values[:4] = np.array([0.5, 1.5, -2.5, -0.0]) * spacing(3.0)  # ties go to even numbers
    rounded, tensor = values.copy(), torch.from_numpy(values.copy())
    round_(rounded, 3.0)
    round_(tensor, 3.0)
    assert np.array_equal(rounded, np.rint(values / spacing(3.0)) * spacing(3.0))
    assert np.array_equal(rounded, tensor.numpy())


@every_source
@every_distribution
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 0.37, 5.0])
def test_released_values_are_grid_points(make, distribution, dtype, scale) -> None:
    values = (3 * scale * torch.randn(CHUNK + 7, dtype=torch.float64)).to(dtype)
    make(CPU).add_(values, scale, distribution, release=0)
    steps = values.double() / spacing(scale)
    assert torch.equal(steps, steps.round())


@every_source
def test_sums_beyond_what_a_float_holds_exactly_are_rounded_as_they_are_stored(make) -> None:
    values = torch.full((1000,), 3e9)
    make(CPU, seed=1).add_(values, 1.0, release=0)
    wide = torch.full((1000,), 3e9, dtype=torch.float64)
    make(CPU, seed=1).add_(wide, 1.0, release=0)
    assert torch.equal(values, wide.float())


@every_source
def test_the_last_value_has_its_factor_in_float64(make) -> None:
    """1000 counts of 12345.5 times 0.1: in float32 the product would be off by up to a thousandth."""
    for size in (1, 2, CHUNK + 3):
        values = torch.zeros(size)
        values[-1] = 12345.5
        make(CPU, seed=1, cells=2**20).add_(values, 1e-6, release=0, last_factor=0.1)
        noise = torch.zeros(size)
        make(CPU, seed=1, cells=2**20).add_(noise, 1e-6, release=0)
        assert float(values[-1]) == pytest.approx(1234.55 + float(noise[-1]), rel=1e-7)
        assert torch.equal(values[:-1], noise[:-1])
    bare = torch.ones(3)
    make(CPU).add_(bare, 0.0, release=0, last_factor=0.25)
    assert bare.tolist() == [1.0, 1.0, 0.25]


def test_a_finer_grid_is_for_seeded_noise_only() -> None:
    with pytest.raises(ValueError, match="cells=1024 needs seeded noise"):
        make_noise_source("aes", CPU, cells=1024)
    for kind in ("aes", "torch"):
        values = torch.zeros(100, dtype=torch.float64)
        make_noise_source(kind, CPU, seed=1, cells=2**30).add_(values, 1.0, release=0)
        assert (values != (values * CELLS).round() / CELLS).any()


# -- real noise, up to OFF --------------------------------------------------------------------------------------------


class Given:
    """Hands out arrays of words, one per call of ``fill``."""

    def __init__(self, *words: np.ndarray) -> None:
        self._words = list(words)

    def fill(self, out: np.ndarray) -> None:
        out[:] = self._words.pop(0)[: len(out)]


def words_of_every_kind(size: int) -> np.ndarray:
    """k from all over, from the tail, from near t = 1, and from both sides of where they are refined."""
    rng = np.random.default_rng(7)
    anywhere = rng.integers(0, 2**63, size, dtype=np.uint64)
    tail = np.array([int(x) for x in 2.0 ** rng.uniform(0, 63, size)], dtype=np.uint64)
    near = np.uint64(2**63 - 1) - np.minimum(tail, np.uint64(2**63 - 1))
    ends = (REFINED, 2**53, 2**63 - 2**53, 2**63 - REFINED)
    edges = np.array([end + d for end in ends for d in range(-20, 20)], dtype=np.uint64)
    return np.concatenate([anywhere, tail, near, edges])


def exact_log(k: int, u: mpmath.mpf) -> mpmath.mpf:
    return mpmath.log((mpmath.mpf(k) + u) / mpmath.mpf(2) ** 63)


@pytest.fixture(scope="module")
def made() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    words = words_of_every_kind(700)
    rng = np.random.default_rng(8)
    signs, further, angles = (rng.integers(0, 2**64, len(words), dtype=np.uint64) for _ in range(3))
    return words, signs & np.uint64(2**63), further, angles


def further_of(words: np.ndarray, further: np.ndarray, small: np.ndarray) -> list[mpmath.mpf]:
    """u of each word: as drawn where it was refined, else anything."""
    with mpmath.workdps(50):
        found = [mpmath.mpf("0.5")] * len(words)
        for at, r in zip(np.flatnonzero(small), further, strict=False):
            found[at] = (mpmath.mpf(int(r)) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 64
        return found


def test_laplace_noise_of_aes_is_real_noise_up_to_off(made) -> None:
    words, signs, further, _ = made
    ((_, noise),) = noise_chunks(len(words), 1.0, "laplace", Given(words | signs, further))
    u = further_of(words, further, words < REFINED)
    with mpmath.workdps(50):
        sign = [1 if s else -1 for s in signs]
        real = [-exact_log(int(k), v) for k, v in zip(words, u, strict=True)]
        off = [abs(mpmath.mpf(float(a)) - (-s * r)) for a, r, s in zip(noise, real, [-x for x in sign], strict=True)]
    assert max(off) < OFF
    assert max(off) > 2.0**-55, "it is not real noise"


def test_gaussian_noise_of_aes_is_real_noise_up_to_off(made) -> None:
    words, _, further, angles = made
    centre = words >= 2**63 - REFINED
    ((_, noise),) = noise_chunks(2 * len(words), 1.0, "gaussian", Given(words, further, further, angles))
    u = further_of(words, further, words < REFINED)
    rest = further_of(words, further, centre)  # of 1 - t
    off = []
    with mpmath.workdps(50):
        for i, k in enumerate(int(k) for k in words):
            value = mpmath.log1p(-(2**63 - 1 - k + rest[i]) / mpmath.mpf(2) ** 63) if centre[i] else exact_log(k, u[i])
            radius = mpmath.sqrt(-2 * value)
            angle = mpmath.pi * (int(angles[i]) - (2**64 if angles[i] >= 2**63 else 0)) / mpmath.mpf(2) ** 63
            pair = (noise[i], noise[len(words) + i])
            off.append(abs(mpmath.mpf(float(pair[0])) - radius * mpmath.cos(angle)))
            off.append(abs(mpmath.mpf(float(pair[1])) - radius * mpmath.sin(angle)))
    assert max(off) < OFF


@every_distribution
def test_noise_of_the_device_is_real_noise_up_to_off(made, distribution, monkeypatch) -> None:
    words, signs, further, angles = made
    given = torch.from_numpy(np.stack([words | signs, further, angles]).view(np.int64).copy())
    monkeypatch.setattr(device, "_words", lambda rows, size, generator: given[:rows].clone())
    size, off = len(words), []
    unit = device.unit_laplace if distribution == "laplace" else device.unit_gaussian
    noise = unit(size if distribution == "laplace" else 2 * size, torch.Generator()).numpy()
    with mpmath.workdps(50):
        for i, k in enumerate(int(k) for k in words):
            u = (mpmath.mpf(int(further[i]) % 2**63) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 63
            if distribution == "laplace":
                real = exact_log(k, u) * (-1 if signs[i] else 1)
                off.append(abs(mpmath.mpf(float(noise[i])) - real))
                continue
            near = mpmath.log1p(-(2**63 - 1 - k + u) / mpmath.mpf(2) ** 63) if k >= 2**63 - 2**53 else exact_log(k, u)
            radius, angle = mpmath.sqrt(-2 * near), mpmath.pi * int(angles.view(np.int64)[i]) / mpmath.mpf(2) ** 63
            off.append(abs(mpmath.mpf(float(noise[i])) - radius * mpmath.cos(angle)))
            off.append(abs(mpmath.mpf(float(noise[size + i])) - radius * mpmath.sin(angle)))
    assert max(off) < OFF


# -- Theorem 8: noise that is off by d costs a shift of 2 eta ----------------------------------------------------------


def laplace_overlap(shift: float, eps: np.ndarray) -> np.ndarray:
    """1 - delta(eps) of Laplace noise and its shift by ``shift`` scales."""
    inside = np.exp((np.clip(eps, -shift, shift) - shift) / 2)
    return np.where(eps > shift, 1.0, np.where(eps < -shift, np.exp(eps), inside))


def gaussian_overlap(shift: float, eps: np.ndarray) -> np.ndarray:
    return 1 - stats.norm.cdf(shift / 2 - eps / shift) + np.exp(eps) * stats.norm.cdf(-shift / 2 - eps / shift)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("law", "overlap", "hazard"),
    [(stats.laplace, laplace_overlap, 1.0), (stats.norm, gaussian_overlap, math.sqrt(2 / math.pi))],
    ids=["laplace", "gaussian"],
)
def test_cells_that_are_off_cost_no_more_than_the_shift(law, overlap, hazard: float, seed: int) -> None:
    """Cells of an eighth of the scale, borders moved at random by up to a tenth of a cell, under both hypotheses."""
    rng = np.random.default_rng(seed)
    shift = (0.0, 1e-3, 0.1, 0.7, 2.0, 4.0)[seed]
    borders = (np.arange(-200, 201) + rng.uniform()) / 8
    cells, eta = [], 0.0
    for centre in (0.0, shift):
        moved = borders + rng.uniform(-0.1, 0.1, len(borders)) / 8
        # from the nearer end, so that far cells keep their digits
        ideal, off = (
            np.abs(np.diff(np.where(at > centre, -law.sf(at - centre), law.cdf(at - centre) - 1)))
            for at in (borders, moved)
        )
        crossing = np.searchsorted(borders, centre) - 1
        for made, at in ((ideal, borders), (off, moved)):
            made[crossing] = law.cdf(at[crossing + 1] - centre) - law.cdf(at[crossing] - centre)
        likely = ideal > 1e-12
        off = np.where(likely, off, ideal)
        off *= ideal.sum() / off.sum()
        eta = max(eta, float(np.abs(off[likely] / ideal[likely] - 1).max()))
        cells.append(off)
    assert 0.05 < eta < 0.5
    moved_by = 2 * eta * (1 + 2 * eta) / hazard
    eps = np.linspace(-6, 6, 241)
    for one, other in itertools.permutations(cells):
        kept = np.minimum(other, np.exp(eps)[:, None] * one).sum(axis=1)
        assert (kept >= overlap(shift + moved_by, eps) * (1 - 1e-9) - 1e-9).all()
    # without the shift the claim would be false
    kept = np.minimum(cells[1], np.exp(eps)[:, None] * cells[0]).sum(axis=1)
    assert seed > 2 or (kept < overlap(max(shift, 1e-12), eps) - 1e-6).any()


def test_the_stated_shift_covers_what_off_and_the_grid_give() -> None:
    """eta of a cell (two borders; four for a Gaussian pair), the density's slope over it, the factor of Theorem 8."""
    width = 0.75 / (2 * CELLS)  # borders of far cells are moved by an eighth of a cell
    laplace = 2 * OFF / width * math.exp(1.25 / CELLS)
    pair = 4 * OFF / width * math.exp(13.4 * math.sqrt(2) * 1.25 / CELLS)
    assert laplace < 2.0**-35.5 and pair < 2.0**-34
    assert 2 * laplace * (1 + 2 * laplace) < GRID_SHIFT
    assert 2 * math.sqrt(math.pi / 2) * pair * (1 + 2 * pair) < GRID_SHIFT


# -- attacks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", OURS, ids=lambda s: s.name)
def test_no_coordinate_of_a_million_is_certain(source: Source) -> None:
    values = (0.1 * np.random.default_rng(0).standard_normal(10**6)).astype(np.float32)
    for shift in (1.0, 1 / 161):
        assert certain(source, values, shift) == (0.0, 0.0)


def test_what_was_released_before_fails_the_same_attack() -> None:
    values = (0.1 * np.random.default_rng(0).standard_normal(10_000)).astype(np.float32)
    assert certain(FLOATS, values, 1 / 161)[0] > 0.3
    assert advantage(FLOATS, rounds=20) == 1.0


@pytest.mark.parametrize("source", OURS, ids=lambda s: s.name)
def test_likelihood_of_cells_tells_no_more_than_is_claimed(source: Source) -> None:
    """200 vectors of each kind; four standard deviations."""
    assert 0.2 < advantage(source, rounds=200) < claimed_advantage() + 4 * math.sqrt(0.5 / 200)


# -- how often each cell comes out ------------------------------------------------------------------------------------


class Narrow:
    """Words whose t lies between two numbers and whose angle lies near 0; chunk after chunk. Where t is below 2^-63,
    k is 0 and the ``bits`` bits of u decide."""

    def __init__(self, low: float, high: float, calls: list[str], *, bits: int) -> None:
        self._rng, self._calls = np.random.default_rng(int(1e6 * low)), itertools.cycle(calls)
        self._k = (int(low / BITS), max(1, int(high / BITS)))
        self._u = (int(low / BITS * 2.0**bits), int(high / BITS * 2.0**bits))
        self._widest = int(WIDEST / math.pi / BITS)

    def draw(self, kind: str, size: int) -> np.ndarray:
        if kind == "k":
            sign = self._rng.integers(0, 2, size, dtype=np.uint64) << np.uint64(63)
            return self._rng.integers(*self._k, size, dtype=np.uint64) | sign
        if kind == "u" and self._k[1] == 1:
            return self._rng.integers(*self._u, size, dtype=np.uint64)
        if kind == "angle":
            return self._rng.integers(-self._widest, self._widest, size).view(np.uint64)
        return self._rng.integers(0, 2**64, size, dtype=np.uint64)

    def fill(self, out: np.ndarray) -> None:
        few = len(out) < 1000  # further bits of some words of a chunk
        out[:] = self.draw("u" if few else next(self._calls), len(out))


PLACES = [(0.0, 0.5), (1.0, 1.5), (10.0, 10.5)]
WIDEST = 0.02


def share_below(x: np.ndarray, distribution: str, low: float, high: float) -> np.ndarray:
    """P(noise <= x) given a magnitude (Laplace), or a radius (Gaussian; the cosine), between ``low`` and ``high``."""
    if distribution == "laplace":
        inside = np.clip(np.abs(x), low, high)
        part = np.expm1(low - inside) / np.expm1(low - high)
        return 0.5 + np.sign(x) * part / 2
    angle = (np.arange(2000) + 0.5) / 2000 * WIDEST
    radius = np.clip(np.maximum(x, 0)[:, None] / np.cos(angle), low, high)
    return (np.expm1((low**2 - radius**2) / 2) / np.expm1((low**2 - high**2) / 2)).mean(axis=1)


@pytest.mark.parametrize("kind", ["aes", "torch"])
@every_distribution
@pytest.mark.parametrize(("low", "high"), PLACES)
def test_cells_come_out_as_often_as_they_should(kind, distribution, low, high, monkeypatch) -> None:
    """Noise confined to half a scale at 0, one and ten scales; sums that lie between grid points."""
    size, scale, middle = 400_000, 1.7, 0.3123
    powers = (1.0, 1.0) if distribution == "laplace" else (2.0, 2.0)
    ends = [math.exp(-(x ** powers[0]) / powers[1]) for x in (high, low)]
    calls = ["k"] + ["u"] * (ends[1] < BITS) + ["angle"] * (distribution == "gaussian")
    words = Narrow(ends[0], ends[1], calls, bits=64 if kind == "aes" else 63)
    values = torch.full((size,), middle, dtype=torch.float64)
    if kind == "aes":
        add_noise(values, scale, distribution, words)
    else:
        rows = ("k", "u", "angle")
        monkeypatch.setattr(
            device,
            "_words",
            lambda number, n, generator: torch.from_numpy(
                np.stack([words.draw(row, n) for row in rows[:number]]).view(np.int64)
            ),
        )
        TorchNoise(CPU).add_(values, scale, distribution, release=0)
    seen = values.numpy()
    if distribution == "gaussian":  # the cosines, which lie where the radius does
        chunk = CHUNK if kind == "aes" else device._CHUNK["cpu"]
        seen = np.concatenate([part[: (len(part) + 1) // 2] for part in np.split(seen, range(chunk, size, chunk))])
    gamma = spacing(scale)
    numbers = np.rint(seen / gamma).astype(int)
    cells = np.arange(numbers.min() - 1, numbers.max() + 2)
    borders = (np.append(cells, cells[-1] + 1) - 0.5) * gamma
    expected = np.diff(share_below((borders - float(np.float64(middle))) / scale, distribution, low, high)) * len(seen)
    counts = np.bincount(numbers - cells[0], minlength=len(cells))
    assert expected.sum() == pytest.approx(len(seen), rel=1e-9)
    rare = expected < 20
    assert counts[rare].sum() < expected[rare].sum() + 6 * math.sqrt(expected[rare].sum() + 1)
    chi2 = ((counts - expected)[~rare] ** 2 / expected[~rare]).sum()
    assert (~rare).sum() > 15
    assert stats.chi2.sf(chi2, (~rare).sum() - 1) > 1e-4
