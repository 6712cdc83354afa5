"""Starts ``python -m tests.ddp.job`` (whose Trainers launch their further ranks themselves) and gathers results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 150.0  # seconds; importing torch and Lightning on all ranks takes up to twenty of them


@dataclass
class Job:
    """One started job: scenarios run one after the other, each by all ranks."""

    process: subprocess.Popen[bytes]
    output: Path
    started: float

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit status of rank 0. Past ``timeout`` every process of the job is killed, and the test fails."""
        try:
            return self.process.wait(max(1.0, self.started + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs; it printed:\n{self.printed()[-6000:]}") from None
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """The job runs in a session of its own: no other process is hit."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def printed(self) -> str:
        return (self.output / "printed.txt").read_text(errors="replace")

    def result(self, scenario: str, rank: int) -> dict[str, Any]:
        path = self.output / f"{scenario}.{rank}.pt"
        assert path.exists(), f"rank {rank} left no result of {scenario}; the job printed:\n{self.printed()[-6000:]}"
        return torch.load(path, weights_only=True)

    def results(self, scenario: str, ranks: int) -> list[dict[str, Any]]:
        found = [self.result(scenario, rank) for rank in range(ranks)]
        for rank, result in enumerate(found):
            assert "error" not in result, f"rank {rank} of {scenario} raised:\n{result['traceback']}"
        return found


def start(module: str, scenarios: Sequence[str], output: Path, *, ranks: int) -> Job:
    """Starts ``python -m module`` for some scenarios on ``ranks`` CPU processes."""
    output.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "MASTER_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (output / "printed.txt").open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(output), str(ranks), *scenarios],
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(process, output, time.monotonic())
