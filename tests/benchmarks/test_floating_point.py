"""The attack on the last bits: what happened is never called impossible, and textbook noise is caught."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.floating_point import SOURCES, Source, certain, identified, reachable, summation_table


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_what_was_released_is_reachable(source: Source) -> None:
    for centre in (0.0, 0.1, 50.0):
        values = (centre * np.random.default_rng(3).standard_normal(20_000)).astype(np.float32)
        assert certain(source, values, 1.0)[1] == 0.0


def test_reachable_agrees_with_every_float_there_is() -> None:
    """Ours in fp32: all 2^21 floats t of one stretch, against outputs one unit in the last place apart."""
    ours = SOURCES[0]
    t = np.arange(np.float32(0.75).view(np.uint32), np.float32(0.875).view(np.uint32), dtype=np.uint32).view(np.float32)
    made = set((np.float32(0.25) + np.log(t)).tolist())
    low = np.float32(0.25) + np.log(np.float32(0.8))
    outputs = low.view(np.int32) + np.arange(-500, 500, dtype=np.int32)
    outputs = outputs.astype(np.int32).view(np.float32)
    expected = np.array([float(y) in made for y in outputs])
    assert 0 < expected.sum() < len(outputs)
    assert (reachable(ours, np.full(len(outputs), 0.25, np.float32), outputs) == expected).all()


def test_rounding_once_from_fp64_hides_the_holes() -> None:
    values = np.zeros(20_000, np.float32)
    shares = {s.name: certain(s, values, 1.0)[0] for s in SOURCES}
    assert shares["textbook, 24-bit uniform, fp32"] > shares["ours, `aes`, fp32"] > 0.1
    assert shares["ours, `aes`, fp64, rounded to fp32"] == 0.0
    assert identified(SOURCES[2], coordinates=2_000, rounds=3) == 1.0


def test_summation_is_finer_in_fp64() -> None:
    first = summation_table(coordinates=500).splitlines()[2].split("|")
    assert float(first[2].split()[0]) > 1e3 * float(first[3].split()[0]) > 0.0
