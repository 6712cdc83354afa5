"""Peak memory of many workloads, each in a process of its own, forked from one that has loaded all code already.

A fresh interpreter per figure costs seconds of imports, and what those load would count as the step's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import TracebackType

from benchmarks.measure import EXACT_MEMORY


class PeakServer:
    """``with PeakServer(threads) as peaks: peaks.measure("batch=512", "vmap", steps=3)``."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peaks", str(threads)]
        self._process = subprocess.Popen(
            command, env=os.environ | EXACT_MEMORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> PeakServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def measure(self, name: str, method: str, steps: int) -> float | None:
        """MiB that ``steps`` steps need at most above the resting process; ``None`` where the method fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {method} {steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().split()
        return float(answer[1]) if answer and answer[0] == "peak" else None


def _child(name: str, method: str, steps: int, threads: int) -> None:
    import torch

    from benchmarks.families import find_workload
    from benchmarks.measure import peak_of
    from benchmarks.methods import METHODS

    torch.set_num_threads(threads)
    METHODS["plain"](find_workload("cnn"))()  # thread pools
    print(f"peak {peak_of(METHODS[method](find_workload(name)), steps):.1f}", flush=True)


def _serve(threads: int) -> None:
    import torch

    from benchmarks.families import find_workload
    from benchmarks.methods import METHODS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    for name in ("batch=16", "length=32"):
        for method in ("plain", "ghost", "vmap", "loop"):
            METHODS[method](find_workload(name))()
    for line in sys.stdin:
        name, method, steps = line.split()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _child(name, method, int(steps), threads)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            print("failed", flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
