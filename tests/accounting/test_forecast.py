"""The logged number: the least of all orders' lines and of the next grid point's value, at a glance."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_lap2.accounting import EpsilonForecast, MajorizedAccountant


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_least_line_and_the_next_grid_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, count = 400, int(rng.integers(1, 60))
    slopes = np.round(rng.exponential(0.02, count), 3)  # rounded, so that some meet and some are parallel
    intercepts = np.round(0.1 / (slopes + 0.01) + rng.normal(0, 1.0, count), 2)
    grid, values = [0, 1, 7, 50, 200, steps], [0.0, 0.4, 2.0, 4.0, 5.0, 6.0]
    forecast = EpsilonForecast(1e-5, grid, values, intercepts, slopes)
    found = [forecast.epsilon(k) for k in range(steps + 1)]
    for k, epsilon in enumerate(found):
        ahead = next(value for point, value in zip(grid, values, strict=True) if point >= k)
        least = max(0.0, float((intercepts + k * slopes).min()))
        assert epsilon == min(ahead, least)
    assert found == sorted(found)


def test_without_lines_and_outside_the_plan() -> None:
    forecast = EpsilonForecast(1e-5, [0, 2, 4], [0.0, 1.0, 3.0], np.zeros(0), np.zeros(0))
    assert [forecast.epsilon(k) for k in range(5)] == [0.0, 1.0, 1.0, 3.0, 3.0]
    for k in (-1, 5):
        with pytest.raises(ValueError, match=r"k must be an integer in \[0, 4\]"):
            forecast.epsilon(k)


@pytest.mark.parametrize("bound", ["tight", "joint"])
def test_is_never_below_what_is_spent_and_exact_at_the_end(bound: str) -> None:
    accountant = MajorizedAccountant(bound=bound)  # type: ignore[arg-type]
    charge = {"noise_multiplier": 2.0, "sample_rate": 0.01, "dimension": 1000}
    accountant.step(**charge, steps=10)  # type: ignore[arg-type]
    forecast = accountant.forecast(delta=1e-5, steps=300, **charge)  # type: ignore[arg-type]
    for k in (0, 1, 10, 77, 299, 300):
        spent = MajorizedAccountant(bound=bound)  # type: ignore[arg-type]
        spent.step(**charge, steps=10 + k)  # type: ignore[arg-type]
        assert forecast.epsilon(k) >= spent.epsilon(delta=1e-5) * (1 - 1e-12)
    assert forecast.epsilon(300) == pytest.approx(spent.epsilon(delta=1e-5), rel=1e-12)
