"""The attack on exact floats: what happened is never called impossible, and textbook noise is caught. What it finds of
the library's own releases: ``tests/noise/test_grid.py``."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.floating_point import (
    FLOATS,
    OTHERS,
    SOURCES,
    Source,
    advantage,
    certain,
    log_likelihood,
    reachable,
    summation_table,
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_what_was_released_is_reachable(source: Source) -> None:
    for centre in (0.0, 0.1, 50.0):
        values = (centre * np.random.default_rng(3).standard_normal(20_000)).astype(np.float32)
        assert certain(source, values, 1.0)[1] == 0.0


def test_reachable_agrees_with_every_float_there_is() -> None:
    """Noise in fp32: all 2^21 floats t of one stretch, against outputs one unit in the last place apart."""
    t = np.arange(np.float32(0.75).view(np.uint32), np.float32(0.875).view(np.uint32), dtype=np.uint32).view(np.float32)
    made = set((np.float32(0.25) + np.log(t)).tolist())
    low = np.float32(0.25) + np.log(np.float32(0.8))
    outputs = low.view(np.int32) + np.arange(-500, 500, dtype=np.int32)
    outputs = outputs.astype(np.int32).view(np.float32)
    expected = np.array([float(y) in made for y in outputs])
    assert 0 < expected.sum() < len(outputs)
    assert (reachable(FLOATS, np.full(len(outputs), 0.25, np.float32), outputs) == expected).all()


def test_textbook_noise_is_caught() -> None:
    values = np.zeros(20_000, np.float32)
    shares = {s.name: certain(s, values, 1.0)[0] for s in SOURCES}
    assert shares["textbook, 24-bit uniform, fp32"] > shares[FLOATS.name] > 0.3
    assert advantage(OTHERS[1], rounds=10) == 1.0


@pytest.mark.parametrize("width", [1 / 64, 0.5])
def test_likelihood_of_a_cell_is_its_probability(width: float) -> None:
    value = np.array([0.0, 0.3, 1.0, 0.25])
    output = np.array([0.0, 0.3001, -0.5, 40.0])
    # of the reflected cell where that is nearer to 0, so that the difference keeps its digits
    near = np.abs(output - value)
    expected = stats.laplace.sf(near - width / 2) - stats.laplace.sf(near + width / 2)
    assert np.exp(log_likelihood(output, value, width)) == pytest.approx(expected, rel=1e-9)


def test_summation_is_finer_in_fp64_and_within_its_margin() -> None:
    for line in summation_table(coordinates=300, sizes=(100, 1000)).splitlines()[2:]:
        _, random, aligned, room, exact = (float(cell.split()[0].replace(",", "")) for cell in line.split("|")[1:-1])
        assert 0.0 < exact < 1e-6 * random < 1e-6 * aligned < 1e-6 * room / 3
