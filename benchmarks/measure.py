"""Times in one process, all methods taking turns; peak memory in a process for each."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.families import find_workload
from benchmarks.methods import METHODS, StepFunction

EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc map every tensor by itself and give it back when freed: the peak is then what the method holds, not how
the heap happened to fragment (which adds up to half, to plain steps too)."""


@dataclass
class Timing:
    """Times of one workload.

    Attributes:
        seconds: per method, one entry per round.
        failures: per method that did not run, why.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def ratio(self, method: str) -> float | None:
        """Median over rounds of the time as a multiple of the plain step's of the same round."""
        if method not in self.seconds:
            return None
        pairs = zip(self.seconds[method], self.seconds["plain"], strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)

    def milliseconds(self, method: str) -> float:
        return 1e3 * statistics.median(self.seconds[method])


def time_workload(name: str, methods: Sequence[str], rounds: int, steps: int) -> Timing:
    """Runs ``rounds`` rounds; in each every method takes ``steps`` steps in turn.

    Short workloads are noisy, so a round's figure is the fastest of its steps.
    """
    timing = Timing()
    runners: dict[str, StepFunction] = {}
    for method in methods:
        try:
            runners[method] = METHODS[method](find_workload(name))
            runners[method]()
            runners[method]()
            timing.seconds[method] = []
        except Exception as error:  # a peer that cannot run a model is a result
            runners.pop(method, None)
            timing.failures[method] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    gc.collect()
    for _ in range(rounds):
        for method, run in runners.items():
            best = float("inf")
            for _ in range(steps):
                start = time.perf_counter()
                run()
                best = min(best, time.perf_counter() - start)
            timing.seconds[method].append(best)
    return timing


def peak_memory(name: str, method: str, steps: int = 3) -> float | None:
    """MiB that ``steps`` steps need at most above the resting process; ``None`` where the method fails."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure", name, method, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | EXACT_MEMORY)
    found = re.search(r"^peak ([\d.]+)$", done.stdout, re.MULTILINE)
    return float(found[1]) if found else None


def memory_status(field_name: str) -> float:
    """A memory figure of this process in MiB."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field_name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field_name}")
    return int(found[1]) / 1024


def peak_of(run: StepFunction, steps: int) -> float:
    """MiB that ``steps`` steps need at most above what this process holds now."""
    gc.collect()
    resting = memory_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(steps):
        run()
    return memory_status("VmHWM") - resting


def _measure_peak(name: str, method: str, steps: int) -> None:
    # modules, batch, code and thread pools are there before the measurement: a small step of another workload
    METHODS["plain"](find_workload("cnn"))()
    print(f"peak {peak_of(METHODS[method](find_workload(name)), steps):.1f}")


def machine() -> str:
    """What the figures were measured on."""
    import torch

    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = models[0] if models else "unknown processor"
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    _measure_peak(sys.argv[1], sys.argv[2], int(sys.argv[3]))
