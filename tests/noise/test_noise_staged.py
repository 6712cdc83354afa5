"""The background thread that draws ahead, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_lap2.noise import AesNoise, StagedAesNoise, staged
from lightning_lap2.noise.base import secret_bytes

CPU = torch.device("cpu")


def run(source, requests):
    out = []
    for size, dtype, distribution, release in requests:
        values = torch.zeros(size, dtype=dtype)
        source.add_(values, 0.75, distribution, release=release)
        out.append(values)
    return out


def test_drawing_ahead_changes_nothing():
    """Hits, a changed size, dtype and distribution, a repeated and a skipped release."""
    requests = [
        (1000, torch.float32, "laplace", 0),
        (1000, torch.float32, "laplace", 1),
        (1000, torch.float32, "laplace", 2),
        (700, torch.float32, "laplace", 3),
        (700, torch.float64, "laplace", 4),
        (700, torch.float64, "gaussian", 5),
        (700, torch.float64, "gaussian", 5),
        (700, torch.float64, "gaussian", 9),
    ]
    ahead = run(StagedAesNoise(CPU, seed=1, rank=2, ahead=True), requests)
    plain = run(StagedAesNoise(CPU, seed=1, rank=2, ahead=False), requests)
    direct = run(AesNoise(CPU, seed=1, rank=2), requests)
    for one, two, three in zip(ahead, plain, direct, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_prepared_noise_is_used_once_and_only_if_it_fits():
    source = StagedAesNoise(CPU)
    drawn = []
    original = source._draw

    def counted(order):
        drawn.append(order)
        return original(order)

    source._draw = counted  # type: ignore[method-assign]
    outputs = run(source, [(100, torch.float32, "laplace", r) for r in (0, 7, 3)])
    source._prepared[1].result()
    assert len(drawn) == 4  # one at the start, then one ahead per release: unseeded noise fits any release
    assert len({tuple(values.tolist()) for values in outputs}) == 3


def test_a_failure_in_the_thread_is_raised_at_the_next_release(monkeypatch):
    source = StagedAesNoise(CPU)
    source.add_(torch.zeros(10), 1.0, release=0)
    source._prepared[1].result()

    def fails(order):
        raise MemoryError("no room")

    monkeypatch.setattr(source, "_draw", fails)
    source._prepare(source._prepared[0])
    values = torch.zeros(10)
    with pytest.raises(MemoryError, match="no room"):
        source.add_(values, 1.0, release=1)
    assert not values.any()


def test_scales_may_change_between_releases():
    source = StagedAesNoise(CPU, seed=3)
    values = torch.zeros(200_000)
    source.add_(values, 1.0, release=0)
    again = torch.zeros(200_000)
    source.add_(again, 8.0, release=1)
    assert again.std().item() == pytest.approx(8 * 2**0.5, rel=0.01)


def test_secret_bytes_separate_their_fields():
    assert secret_bytes(32, "a", None, 0, 0) != secret_bytes(32, "a", None, 0, 0)
    seen = {secret_bytes(32, *fields) for fields in (("a", 1, 2, 3), ("b", 1, 2, 3), ("a", 12, 3, 3), ("a", 1, 23, 3))}
    assert len(seen) == 4
    assert secret_bytes(32, "a", 1, 2, 3) == secret_bytes(32, "a", 1, np.int64(2), 3)


def test_a_device_without_float64_is_served_by_the_host(monkeypatch):
    """The sum goes to the host and back, with the same noise and the same rounding."""
    expected = run(AesNoise(CPU, seed=6), [(1000, torch.float32, "laplace", 0)])
    monkeypatch.setattr(staged, "has_float64", lambda device: False)
    assert torch.equal(*run(StagedAesNoise(CPU, seed=6), [(1000, torch.float32, "laplace", 0)]), *expected)
