"""The scaling benchmark runs and leaves its files. No figure is judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.curves import Point, read_csv, table, write_csv
from benchmarks.families import find_workload
from benchmarks.scaling import Limits, _obstacle

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_quick_run_writes_csv_table_and_plot(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scaling", "--quick", "--no-memory", "--curves", "batch"]
    done = subprocess.run(
        [*command, "--engines", "ghost", "vmap", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = read_csv(tmp_path / "scaling.csv")
    assert {(p.x, p.engine) for p in points} == {(x, e) for x in (16, 32) for e in ("plain", "ghost", "vmap")}
    assert all(p.milliseconds for p in points)
    assert "| 32 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling-batch.png").stat().st_size > 1000


@pytest.mark.parametrize("parameters", [10**4, 31_623, 10**6])
def test_width_meets_the_parameter_count(parameters: int) -> None:
    found = sum(p.numel() for p in find_workload(f"parameters={parameters}").net().parameters())
    assert found == pytest.approx(parameters, rel=0.02)


def test_points_beyond_the_limits_are_named_not_run(tmp_path: Path) -> None:
    limits = Limits(mib=1000, step=10, timing=1, loop=1)
    before = Point("length", 32, "vmap", 10, 8, 500.0, 2.0, 300.0)
    assert _obstacle(before, 64, "vmap", 1, limits) == ""
    assert "MiB" in _obstacle(before, 64, "vmap", 2, limits)
    assert "s (limit 1 s)" in _obstacle(before, 64, "loop", 2, limits)
    left_out = Point("length", 64, "vmap", 10, 8, note="left out, too large")
    write_csv([before, left_out], tmp_path / "points.csv")
    assert read_csv(tmp_path / "points.csv") == [before, left_out]
    assert "* vmap at 64: left out, too large" in table([before, left_out], "length")
