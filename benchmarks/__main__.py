"""Time and memory of one private optimizer step, as multiples of the plain step.

Every method does forward, backward, clipping at C = 1, noise and SGD. Methods take turns within each round, in one
process; the figure is the median over rounds of the ratio to the plain step of the same round. Peak memory is
measured in a process of its own for each method, with an allocator that returns what is freed. The result is a
Markdown table on standard output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import sys
import warnings
from pathlib import Path

from benchmarks.document import replace_block
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
    parser.add_argument("--update", type=Path, metavar="FILE", help="write the tables into this document, in place")
    return parser.parse_args()


def time_table(timings: dict[str, Timing], methods: list[str]) -> str:
    """Ratios to plain, one column per workload."""
    heads = [f"{name} ({timing.milliseconds('plain'):.1f} ms)" for name, timing in timings.items()]
    lines = ["| step, ratio to plain (plain) | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in methods:
        cells = [timing.ratio(method) for timing in timings.values()]
        lines.append(f"| {method} | " + " | ".join("fails" if c is None else f"{c:.2f}" for c in cells) + " |")
    return "\n".join(lines)


def memory_table(peaks: dict[str, dict[str, float | None]]) -> str:
    """Peak MiB above the resting process, one column per workload (the outer key)."""
    lines = ["| peak memory, MiB | " + " | ".join(peaks) + " |", "|---" * (len(peaks) + 1) + "|"]
    for method in next(iter(peaks.values())):
        cells = [found[method] for found in peaks.values()]
        lines.append(f"| {method} | " + " | ".join("fails" if c is None else f"{c:.0f}" for c in cells) + " |")
    return "\n".join(lines)


TARGETS = {"cnn": 1.5, "mlp": 1.9, "lm": 1.45, "vit": 1.4, "resnet": 1.7}
"""What the better of our engines was to reach, as a multiple of plain."""
_OURS = ("ghost", "vmap")


def target_table(timings: dict[str, Timing], peaks: dict[str, dict[str, float | None]]) -> str:
    """What was aimed at and what was reached; a figure in bold misses its target or a peer's figure."""
    rows: list[list[str]] = [
        ["target, multiple of plain"], ["reached, better engine"], ["lowest peer, same run"], ["peak MiB, that engine"],
        ["leanest peer"], ["that engine's peak over plain's"],
    ]  # fmt: skip
    for name, timing in timings.items():
        ratios = {m: r for m in timing.seconds if m != "plain" and (r := timing.ratio(m)) is not None}
        mine = _least({m: r for m, r in ratios.items() if m in _OURS})
        peer = _least({m: r for m, r in ratios.items() if m not in (*_OURS, "loop")})
        own, bound = ratios.get(mine, math.inf), min(TARGETS[name], ratios.get(peer, math.inf))
        memory = {m: p for m, p in peaks.get(name, {}).items() if p is not None}
        leanest = _least({m: p for m, p in memory.items() if m not in (*_OURS, "loop", "plain")})
        peak, floor = memory.get(mine, math.inf), memory.get(leanest, math.inf)
        cells = [
            f"{TARGETS[name]}",
            _marked(f"{own:.2f} ({mine})", own > bound),
            f"{ratios[peer]:.2f} ({peer})" if peer else "–",
            _marked(f"{peak:.0f}", peak > floor) if mine in memory else "–",
            f"{floor:.0f} ({leanest})" if leanest else "–",
            f"{peak / memory['plain']:.2f}" if mine in memory and "plain" in memory else "–",
        ]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    head = ["| | " + " | ".join(timings) + " |", "|---" * (len(timings) + 1) + "|"]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def _least(figures: dict[str, float]) -> str:
    return min(figures, key=lambda method: figures[method], default="")


def _marked(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    methods = ["plain", *[m for m in options.methods if m != "plain" and available(m)]]
    timings: dict[str, Timing] = {}
    peaks: dict[str, dict[str, float | None]] = {}
    written = [f"{machine()}{_peers()}; {options.rounds} rounds."]
    print(written[0] + "\n", flush=True)

    def out(text: str) -> None:
        written.append(text)
        print(text + "\n", flush=True)

    if not options.no_time:
        for name in options.workloads:
            print(f"timing {name} ...", file=sys.stderr)
            timings[name] = time_workload(name, methods, options.rounds, options.steps)
        out(time_table(timings, methods))
        for name, timing in timings.items():
            for method, why in timing.failures.items():
                out(f"{method} on {name}: `{why}`")
    if not options.no_memory:
        for name in options.workloads:
            print(f"memory of {name} ...", file=sys.stderr)
            peaks[name] = {method: peak_memory(name, method) for method in methods}
        out(memory_table(peaks))
    if timings:
        out(target_table(timings, peaks))
    if options.update:
        replace_block(options.update, "python -m benchmarks", "\n\n".join(written))


def _peers() -> str:
    found = [name for name in ("opacus", "fastdp") if available(name)]
    return "".join(f", {name} {_version(name)}" for name in found)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(no version)"  # on the path, not installed


if __name__ == "__main__":
    main()
