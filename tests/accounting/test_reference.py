"""Every row of the reference table: 60-digit arithmetic, computed outside this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_lap2.accounting import MajorizedAccountant, log_moments

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "reference.json").read_text())

pytestmark = pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")


def _name(row: dict[str, Any]) -> str:
    return f"{row['kind']}-{row['bound']}-n{row['dimension']}-m{row['noise_multiplier']}-k{row['order']}"


@pytest.mark.parametrize("row", [r for r in ROWS if r["kind"] == "log_moment"], ids=_name)
def test_log_moment(row: dict[str, Any]) -> None:
    value = log_moments(
        noise_multiplier=row["noise_multiplier"],
        sample_rate=row["sample_rate"],
        dimension=row["dimension"],
        orders=[row["order"]],
        bound=row["bound"],
    )
    assert value.shape == (1,)
    assert value[0] == pytest.approx(float(row["value"]), rel=1e-11)


@pytest.mark.parametrize("row", [r for r in ROWS if r["kind"] == "epsilon"], ids=_name)
def test_epsilon(row: dict[str, Any]) -> None:
    accountant = MajorizedAccountant(bound=row["bound"])
    accountant.step(
        noise_multiplier=row["noise_multiplier"],
        sample_rate=row["sample_rate"],
        dimension=row["dimension"],
        steps=row["steps"],
    )
    reference = float(row["value"])
    assert accountant.epsilon(delta=row["delta"], orders_only=True) == pytest.approx(reference, rel=1e-11)
    assert 0.5 * reference < accountant.epsilon(delta=row["delta"]) <= reference * (1.0 + 1e-12)
    assert accountant.best_order(row["delta"]) == pytest.approx(row["order"], abs=1.0)
