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
PATIENCE = 240.0  # seconds, on a machine that does much else; some 20 on two idle cores


@dataclass
class Job:
    """One started job: scenarios run one after the other, each by all ranks."""

    process: subprocess.Popen[bytes]
    output: Path
    started: float

    def wait(self, timeout: float = PATIENCE, *, ranks: int = 1) -> int:
        """The exit status of rank 0. Past ``timeout`` every process of the job is killed, and the test fails.

        Args:
            ranks: with more than one the others must end, too, by themselves.
        """
        try:
            status = self.process.wait(max(1.0, self.started + timeout - time.monotonic()))
            assert not self.outlived_by(ranks), f"rank 0 ended, another did not:\n{self.printed()[-6000:]}"
            return status
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs; it printed:\n{self.printed()[-6000:]}") from None
        finally:
            self.kill_all()

    def outlived_by(self, ranks: int, patience: float = 60.0) -> list[int]:
        """After rank 0 has ended: the others that still run when ``patience`` is over, by their ``pid.RANK`` files."""
        deadline = time.monotonic() + patience
        left = list(range(1, ranks))
        while left and time.monotonic() < deadline:
            left = [rank for rank in left if _alive(int((self.output / f"pid.{rank}").read_text()))]
            time.sleep(0.05)
        return left

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


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").exists()
    return state not in "ZX"


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
