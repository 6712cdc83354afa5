"""A process that is killed again and again, and the ledger that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_scenario_5_killed_runs_never_lose_a_release(tmp_path: Path) -> None:
    """In a process of its own, since it forks; ``python -m tests.resume.kill --rounds 50`` is the long form, of
    three runs in one folder."""
    command = [sys.executable, "-m", "tests.resume.kill", "--rounds", "4", "--seeded-rounds", "2", "--runs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "--directory", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("runs in one folder") == 2
    assert run.stdout.count("at the last start") == 4
