"""Tails and extremes, by crafted bits instead of by waiting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_lap2.noise import device
from lightning_lap2.noise.aes import REFINED, Keystream, add_noise, noise_chunks
from lightning_lap2.noise.device import key_philox, key_twister, split_words, uniform, unit_gaussian, unit_laplace

LOG2 = math.log(2)


class Crafted:
    """Hands out given words, one array per call of ``fill``, repeated to the length asked for: the words themselves,
    then u of the small ones; for Gaussian pairs u near t = 1 and the angles as well."""

    def __init__(self, *words: int) -> None:
        self._words = list(words)
        self.asked: list[int] = []

    def fill(self, out: np.ndarray) -> None:
        self.asked.append(len(out))
        out[:] = self._words.pop(0) if self._words else 0


def made(distribution: str, *words: int, size: int = 2) -> np.ndarray:
    """Noise of scale 1 before it is rounded."""
    ((_, noise),) = noise_chunks(size, 1.0, distribution, Crafted(*words))
    return noise.copy()


def test_scenario_17_all_zero_keystream_is_the_far_end():
    """k = 0 and r = 0: t = 2^-128, so 128 log 2 scales (Laplace), sqrt(2 128 log 2) (Gaussian)."""
    end = 128 * LOG2
    assert np.abs(made("laplace")) == pytest.approx(end, rel=1e-12)
    assert end > 36
    values = made("gaussian")  # angle 0: the whole radius in the cosine
    assert values[0] == pytest.approx(math.sqrt(2 * end), rel=1e-12)
    assert values[1] == 0


def test_all_one_keystream_is_finite():
    top = 2**64 - 1
    for distribution in ("laplace", "gaussian"):
        values = made(distribution, top, top, top, top)
        assert np.isfinite(values).all()
        assert (np.abs(values) < 1e-3).all()


@pytest.mark.parametrize("further", [2**63, 2**40, 2**11, 1, 0])
def test_refinement_reaches_between_the_words(further):
    """k = 0 and 64 further bits r: |noise| = -log((r + 1/2) 2^-64 2^-63)."""
    expected = (64 + 63) * LOG2 - math.log(further + 0.5)
    assert np.abs(made("laplace", 0, further)) == pytest.approx(expected, rel=1e-14)


def test_small_words_are_refined():
    for k, asked in ((REFINED - 1, [2, 2]), (REFINED, [2])):
        words = Crafted(k)
        add_noise(torch.zeros(2), 1.0, "laplace", words)
        assert words.asked == asked


def test_radius_near_zero_is_as_fine_as_any_other():
    """k = 2^63 - 1 and 64 further bits: 1 - t = (r + 1/2) 2^-127; the square root of -2 log t alone would be 0."""
    for further in (2**63, 2**40, 1):
        values = made("gaussian", 2**63 - 1, further, 0)
        assert values[0] == pytest.approx(math.sqrt(2 * (further + 0.5) * 2.0**-127), rel=1e-14)


def test_gaussian_angles_go_round_the_whole_circle():
    for eighth in range(-4, 4):
        angle = eighth / 4 * math.pi
        values = made("gaussian", 2**62, (eighth % 8) << 61)
        radius = math.sqrt(2 * LOG2)
        assert values == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], abs=1e-15)


def test_sign_is_the_top_bit():
    low, high = (made("laplace", (bit << 63) + 2**30)[0] for bit in (0, 1))
    assert low == -high != 0


@pytest.mark.parametrize("rank", [2.0**-20, 2.0**-30, 2.0**-53, 2.0**-60])
def test_gaussian_tail_mass(rank):
    """Mass beyond x, by the law of radius and angle: P(|X| > x) = E_theta t(x / cos theta)."""
    x = stats.norm.isf(rank / 2)
    theta = (np.arange(200_000) + 0.5) / 200_000 * math.pi / 2
    t = np.exp(-((x / np.cos(theta)) ** 2) / 2)
    assert np.where(t >= 2.0**-128, t, 0).mean() == pytest.approx(rank, rel=1e-4)


def test_keystream_is_aes_256_in_counter_mode():
    """AES-256 of the zero block under the zero key (NIST's known-answer tests)."""
    out = np.zeros(16, np.uint8)
    Keystream(bytes(32)).fill(out)
    assert out.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_keystream_goes_on_over_calls_and_blocks():
    whole, parts = np.empty(100_000, np.uint8), np.empty(100_000, np.uint8)
    Keystream(b"k" * 32).fill(whole)
    stream = Keystream(b"k" * 32)
    for start, end in ((0, 5), (5, 40_000), (40_000, 100_000)):
        stream.fill(parts[start:end])
    assert np.array_equal(whole, parts)


# Device generators: the transform is the same code on every device.


def test_device_words_at_the_ends():
    k, u, sign = split_words(torch.zeros(2, 3, dtype=torch.int64))
    assert torch.allclose(-uniform(k, u).log(), torch.full((3,), 127 * LOG2, dtype=torch.float64), rtol=1e-12)
    assert (sign == 1).all()
    k, u, sign = split_words(torch.full((2, 3), -1, dtype=torch.int64))
    assert (uniform(k, u) == 1).all()
    assert (sign == -1).all()
    k, u, sign = split_words(torch.full((2, 3), -(2**63), dtype=torch.int64))
    assert (-uniform(k, u).log()).min() > 88
    assert (sign == -1).all()


def test_device_words_use_every_bit():
    k, u, _ = split_words(torch.tensor([[5, 5, 6], [0, 1 << 62, 0]]))
    assert torch.allclose(uniform(k, u) * 2**63, torch.tensor([5.0, 5.5, 6.0], dtype=torch.float64))


def test_device_extremes_stay_finite(monkeypatch):
    for word in (0, -1, -(2**63), 2**63 - 1):

        def constant(self, *_, word=word, **__):
            return self.fill_(word)

        monkeypatch.setattr(torch.Tensor, "random_", constant)
        for unit in (unit_laplace, unit_gaussian):
            values = unit(5, torch.Generator())
            assert values.isfinite().all() and values.dtype == torch.float64


def test_device_radius_near_zero_is_fine(monkeypatch):
    """k = 2^63 - 1 and u = (r + 1/2) 2^-63: 1 - t = u 2^-63."""
    monkeypatch.setattr(
        device, "_words", lambda rows, size, generator: torch.tensor([[2**63 - 1], [1 << 30], [0]]).expand(3, size)
    )
    expected = math.sqrt(2 * ((1 << 30) + 0.5) * 2.0**-126)
    assert unit_gaussian(2, torch.Generator())[0] == pytest.approx(expected, rel=1e-14)


def test_twister_takes_the_whole_secret():
    secrets = [bytes(2496), bytes(2495) + b"\1", b"\0\0\0\x80" + bytes(2492), bytes(range(208)) * 12]
    drawn = []
    for secret in secrets:
        generator = torch.Generator()
        key_twister(generator, secret)
        drawn.append(torch.empty(2000, dtype=torch.int64).random_(-(2**63), None, generator=generator))
        state = generator.get_state()
        assert state.dtype == torch.uint8
    assert len({tuple(values.tolist()) for values in drawn}) == 4


def test_unknown_twister_layout_is_refused(monkeypatch):
    generator = torch.Generator()
    monkeypatch.setattr("lightning_lap2.noise.device._TWISTER_START", 32)
    with pytest.raises(RuntimeError, match="aes"):
        key_twister(generator, bytes(2496))


class FakePhilox:
    """Keeps a state as CUDA's generator does: 16 bytes, the offset a multiple of 4."""

    def __init__(self, faithful: bool = True) -> None:
        self.faithful = faithful

    def set_state(self, state: torch.Tensor) -> None:
        assert state.dtype == torch.uint8
        assert state.numel() == 16
        self.state = state.clone() if self.faithful else state * 0

    def get_state(self) -> torch.Tensor:
        return self.state


def test_philox_key_and_offset():
    generator = FakePhilox()
    key_philox(generator, b"\xff" * 16)
    assert bytes(generator.state[:8].tolist()) == b"\xff" * 8
    offset = int.from_bytes(bytes(generator.state[8:].tolist()), "little")
    assert offset % 4 == 0
    assert 2**61 < offset < 2**62
    with pytest.raises(RuntimeError, match="aes"):
        key_philox(FakePhilox(faithful=False), b"\xff" * 16)
