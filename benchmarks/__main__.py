"""Time and memory of one private optimizer step, as multiples of the plain step.

Every method does forward, backward, clipping at C = 1, noise and SGD. Methods take turns within each round, in one
process; the figure is the median over rounds of the ratio to the plain step of the same round. Peak memory is
measured in a process of its own for each method, with an allocator that returns what is freed. The result is a
Markdown table on standard output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings

from benchmarks.measure import Timing, machine, peak_memory, time_workload
from benchmarks.methods import METHODS, available
from benchmarks.workloads import WORKLOADS


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if m != "loop"],
        help="plain always runs; those whose package is missing are left out (default: all but loop)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each workload (default: 9)")
    parser.add_argument("--steps", type=int, default=2, help="steps per method and round, fastest counts (default: 2)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory table out")
    parser.add_argument("--no-time", action="store_true", help="leave the table of times out")
    return parser.parse_args()


def time_table(timings: dict[str, Timing], methods: list[str]) -> str:
    """Ratios to plain, one column per workload."""
    heads = [f"{name} ({timing.milliseconds('plain'):.1f} ms)" for name, timing in timings.items()]
    lines = ["| step, ratio to plain (plain) | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in methods:
        cells = [timing.ratio(method) for timing in timings.values()]
        lines.append(f"| {method} | " + " | ".join("fails" if c is None else f"{c:.2f}" for c in cells) + " |")
    return "\n".join(lines)


def memory_table(workloads: list[str], methods: list[str]) -> str:
    """Peak MiB above the resting process, one column per workload."""
    lines = ["| peak memory, MiB | " + " | ".join(workloads) + " |", "|---" * (len(workloads) + 1) + "|"]
    for method in methods:
        cells = [peak_memory(name, method) for name in workloads]
        lines.append(f"| {method} | " + " | ".join("fails" if c is None else f"{c:.0f}" for c in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    methods = ["plain", *[m for m in options.methods if m != "plain" and available(m)]]
    peers = f", opacus {importlib.metadata.version('opacus')}" if available("opacus") else ""
    print(f"{machine()}{peers}; {options.rounds} rounds\n")
    if not options.no_time:
        timings = {}
        for name in options.workloads:
            print(f"timing {name} ...", file=sys.stderr)
            timings[name] = time_workload(name, methods, options.rounds, options.steps)
        print(time_table(timings, methods), flush=True)
        for name, timing in timings.items():
            for method, why in timing.failures.items():
                print(f"\n{method} on {name}: {why}")
    if not options.no_memory:
        print("\n" + memory_table(options.workloads, methods))


if __name__ == "__main__":
    main()
