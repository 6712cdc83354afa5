"""The lower bounds of the tightness table are lower bounds, and close; the table keeps its rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from benchmarks.lower import even_spread_epsilon, one_coordinate_epsilon
from benchmarks.tightness import Row, read, table
from lightning_lap2.accounting.routes.pairs import gdp_epsilon


@pytest.mark.parametrize(("m", "rate", "steps"), [(1.0, 0.01, 500), (2.0, 0.1, 100), (1.0, 1.0, 3), (0.5, 0.3, 1)])
def test_one_coordinate_is_just_below_dp_accounting(m: float, rate: float, steps: int) -> None:
    above = pld.from_laplace_mechanism(m, value_discretization_interval=rate * 1e-3, sampling_prob=rate)
    exact = above.self_compose(steps).get_epsilon_for_delta(1e-5)
    assert exact * (1.0 - 6e-3) <= one_coordinate_epsilon(m, rate, steps, 1e-5) <= exact


def test_even_spread_tends_to_the_gaussian_from_below() -> None:
    found = [even_spread_epsilon(2.0, 1.0, 16, n, 1e-5) for n in (1, 100, 10**6)]
    limit = gdp_epsilon(2.0, 1e-5)
    assert found[0] < found[1] < found[2] <= limit
    assert found[2] == pytest.approx(limit, rel=5e-3)
    assert even_spread_epsilon(1.0, 0.1, 50, 1, 1e-5) <= one_coordinate_epsilon(1.0, 0.1, 50, 1e-5)


def test_rows_come_back_and_are_printed(tmp_path: Path) -> None:
    row = Row(10, 0.5, 3, 1.0, 1.5, 0.4, 0.5, 0.6, 0.6, 0.65, 0.7, math.inf, 1.5, 0.45)
    path = tmp_path / "rows.csv"
    names = ",".join(Row.__dataclass_fields__)
    path.write_text(f"{names}\n1e+01,0.5,3,1,1.5,0.4,0.5,0.6,0.6,0.65,0.7,inf,1.5,0.45\n")
    assert read(path) == [row]
    text = table([row])
    assert "0.6 (+20 %)" in text
    assert "0.45 (-10 %)" in text
    assert "| – |" in text
