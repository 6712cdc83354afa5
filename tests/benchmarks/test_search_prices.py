"""The tables of docs/private-search.md."""

from __future__ import annotations

import math

import pytest

from benchmarks import search_prices


def test_the_mean_that_covers_a_grid() -> None:
    """Closed forms of the chance that a configuration is not tried."""
    assert search_prices.covering_mean(search_prices.COUNTS["Poisson"], 4) == pytest.approx(4 * math.log(10), rel=1e-5)
    # P[not tried] = x / (m - (m - 1) x) with x = 3/4 and mean m, which is 1/10 for m = 27
    assert search_prices.covering_mean(search_prices.COUNTS["geometric"], 4) == pytest.approx(27.0, rel=1e-5)


def test_both_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = search_prices.Setting("small", 2.0, 1e-4, {"sample_rate": 1.0, "steps": 4, "dimension": 100})
    monkeypatch.setattr(search_prices, "SETTINGS", (small,))
    monkeypatch.setattr(search_prices, "DIGITS", small)
    search_prices.main(["--mean-runs", "5", "--grids", "2"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    logarithmic, geometric, poisson, naive = map(float, rows[2][2:])
    assert 1.0 < logarithmic < geometric < poisson < naive
    assert float(rows[6][1]) == pytest.approx(small.one(2) / small.one(), abs=6e-4)
