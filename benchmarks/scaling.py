"""How time and memory of a private step grow with batch, parameters, sequence length and ranks.

Engines take turns of two steps in one process, of which the faster counts; a figure is the median over rounds. Peak
memory is measured in a process of its own for each engine and size, above the resting process, with an allocator that
returns what is freed. A size whose memory or time would exceed the limits, extrapolated from the size before, is left
out and named. Results are written to OUT as scaling.csv, scaling.md and one plot per curve; curves that are not run
again keep their rows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.curves import Point, read_csv, write_all
from benchmarks.families import find_workload
from benchmarks.measure import Timing, machine
from benchmarks.methods import METHODS, StepFunction
from benchmarks.peaks import PeakServer
from benchmarks.ranks import RANKED, measure_ranks

SIZES = {
    "batch": [16, 32, 64, 128, 256, 512, 1024, 2048],
    "parameters": [10**4, 31_623, 10**5, 316_228, 10**6, 3_162_278, 10**7, 31_622_777, 10**8],
    "length": [32, 64, 128, 256, 512, 1024],
    "ranks": [1, 2, 3],
}
QUICK_SIZES = {"batch": [16, 32], "parameters": [10**4, 10**5], "length": [32, 64], "ranks": [1, 2]}
GROWTH = {"batch": 1, "parameters": 1, "length": 2}
"""Largest power of the size that time and memory can grow with, for the extrapolation."""


@dataclass(frozen=True)
class Limits:
    """What a point may take: MiB, seconds per step, seconds of timing per size, and for the loop seconds per step."""

    mib: float
    step: float
    timing: float
    loop: float


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--curves", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    parser.add_argument("--engines", nargs="+", default=["ghost", "vmap", "loop"], choices=["ghost", "vmap", "loop"])
    parser.add_argument("--quick", action="store_true", help="two sizes per curve, a second each: to see that it runs")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder (default: runs/scaling)")
    parser.add_argument("--threads", type=int, help="torch threads, except on several ranks (default: torch's choice)")
    parser.add_argument("--memory-limit", type=float, default=6144, metavar="MIB", help="default: 6144")
    parser.add_argument("--step-limit", type=float, default=20, metavar="S", help="longest step (default: 20 s)")
    parser.add_argument("--loop-limit", type=float, default=1, metavar="S", help="the same for the loop (default: 1 s)")
    parser.add_argument("--seconds", type=float, default=4, help="timing per size, warm-up apart (default: 4)")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def time_point(name: str, engines: list[str], seconds: float) -> Timing:
    """Rounds until ``seconds`` are over: at least 3 (1 where a round takes longer than ``seconds``), at most 25.

    A turn is two steps, of which the faster counts: the first one after another engine's finds the memory given back
    to the operating system, which does not happen in training.
    """
    timing = Timing()
    runners: dict[str, StepFunction] = {}
    begun = time.perf_counter()
    for engine in engines:
        try:
            runners[engine] = METHODS[engine](find_workload(name))
            runners[engine]()
            timing.seconds[engine] = []
        except Exception as error:  # an engine that cannot run a model is a result
            runners.pop(engine, None)
            timing.failures[engine] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    gc.collect()
    least = 3 if time.perf_counter() - begun < seconds else 1
    begun, rounds = time.perf_counter(), 0
    while rounds < least or (rounds < 25 and time.perf_counter() - begun < seconds):
        for engine, run in runners.items():
            turn: list[float] = []
            while len(turn) < (2 if sum(turn) < 1 else 1):
                start = time.perf_counter()
                run()
                turn.append(time.perf_counter() - start)
            timing.seconds[engine].append(min(turn))
        rounds += 1
    return timing


def _obstacle(before: Point | None, x: int, engine: str, power: int, limits: Limits) -> str:
    """Why ``engine`` is not run at ``x``, judging by its last point; empty if it can be."""
    if before is None or before.milliseconds is None:
        return ""
    factor = (x / before.x) ** power
    step = before.milliseconds / 1e3 * factor
    most = limits.loop if engine == "loop" else limits.step
    if step > most:
        return f"left out, a step could take {step:.2g} s (limit {most:g} s)"
    if before.mib is not None and before.mib * factor > limits.mib:
        return f"left out, could take {before.mib * factor:,.0f} MiB (limit {limits.mib:,.0f})"
    return ""


def measure_curve(
    curve: str, sizes: list[int], engines: list[str], limits: Limits, peaks: PeakServer | None
) -> list[Point]:
    """All sizes in ascending order."""
    points: list[Point] = []
    last: dict[str, Point] = {}
    for x in sizes:
        name = f"{curve}={x}"
        workload = find_workload(name)
        parameters = sum(p.numel() for p in workload.net().parameters())
        skipped = {e: _obstacle(last.get(e), x, e, GROWTH[curve], limits) for e in engines}
        running = [e for e in engines if not skipped[e]]
        timing = time_point(name, running, limits.timing)
        for engine in engines:
            found = Point(curve, x, engine, parameters, workload.size, note=skipped[engine])
            if engine in timing.failures:
                found = Point(curve, x, engine, parameters, workload.size, note=timing.failures[engine])
            elif engine in timing.seconds:
                spent = timing.milliseconds(engine)
                peak = peaks.measure(name, engine, 3 if spent < 2000 else 1) if peaks else None
                found = Point(
                    curve, x, engine, parameters, workload.size, spent,
                    timing.ratio(engine) if "plain" in timing.seconds else None, peak,
                )  # fmt: skip
                last[engine] = found
            points.append(found)
            text = found.note if found.milliseconds is None else f"{found.milliseconds:9.1f} ms"
            say(f"  {name:22s} {engine:6s} {text}" + ("" if found.mib is None else f" {found.mib:8.0f} MiB"))
    return points


def measure_rank_curves(worlds: list[int], engines: list[str], seconds: float, memory: bool) -> list[Point]:
    """The workloads of ``RANKED`` on 1, 2, ... processes."""
    points: list[Point] = []
    for name in RANKED:
        workload = find_workload(name)
        parameters = sum(p.numel() for p in workload.net().parameters())
        for world in worlds:
            found = measure_ranks(name, world, engines, seconds, memory)
            for engine, (spent, peak) in found.items():
                ratio = spent / found["plain"][0]
                points.append(Point(f"ranks-{name}", world, engine, parameters, workload.size, spent, ratio, peak))
                mib = "" if peak is None else f" {peak:8.0f} MiB"
                say(f"  {name} on {world} rank(s)    {engine:6s} {spent:9.1f} ms{mib}")
    return points


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    seconds = 1 if options.quick else options.seconds
    limits = Limits(mib=options.memory_limit, step=options.step_limit, timing=seconds, loop=options.loop_limit)
    sizes = QUICK_SIZES if options.quick else SIZES
    engines = ["plain", *options.engines]
    kept = options.out / "scaling.csv"
    points = read_csv(kept) if kept.exists() else []
    say(machine())
    for curve in options.curves:
        say(f"{curve} ({time.perf_counter() - begun:.0f} s so far)")
        if curve == "ranks":
            few = [e for e in engines if e != "loop"]
            new = measure_rank_curves(sizes[curve], few, seconds, not options.no_memory)
        elif options.no_memory:
            new = measure_curve(curve, sizes[curve], engines, limits, None)
        else:
            with PeakServer(torch.get_num_threads()) as peaks:
                new = measure_curve(curve, sizes[curve], engines, limits, peaks)
        again = {p.curve for p in new}
        points = [p for p in points if p.curve not in again] + new
        text = write_all(points, options.out)
    print(f"{machine()}\n\n{text}")
    say(f"{time.perf_counter() - begun:.0f} s in all; written to {options.out}")


if __name__ == "__main__":
    main()
