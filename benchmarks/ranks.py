"""Steps on several ranks: ``measure_ranks`` starts them, this module run as a program is one of them.

Each rank takes its share of the workload's batch, on one thread. Private steps go through ``release_`` with the
all-reduce of the callback; the plain one through DistributedDataParallel. The process group is gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.families import find_workload
from benchmarks.measure import EXACT_MEMORY, peak_of
from benchmarks.methods import StepFunction, plain
from benchmarks.workloads import Step, Workload
from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.callback.release.window import release_
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.noise import make_noise_source

RANKED = ("cnn", "mlp")


def measure_ranks(
    name: str, world: int, engines: list[str], seconds: float, memory: bool
) -> dict[str, tuple[float, float | None]]:
    """Per engine milliseconds per step (median, all ranks in step) and the largest rank's peak MiB."""
    times = _run(name, world, engines, f"time {seconds}")
    peaks = _run(name, world, engines, "memory") if memory else {}
    return {
        engine: (statistics.median(times[engine]), max(peaks[engine]) if engine in peaks else None)
        for engine in engines
    }


def _run(name: str, world: int, engines: list[str], what: str) -> dict[str, list[float]]:
    """``time``: milliseconds of rank 0's steps; ``memory``: every rank's peak."""
    found = run_ranks("benchmarks.ranks", [name, ",".join(engines), what], world, exact_memory=what == "memory")
    return found[0] if what != "memory" else {engine: [one[engine] for one in found] for engine in engines}


def run_ranks(program: str, arguments: list[str], world: int, *, exact_memory: bool) -> list[Any]:
    """Runs ``python -m PROGRAM ARGUMENTS FOLDER RANK WORLD`` for each rank to their end; each leaves
    ``FOLDER/RANK.json``, whose contents are returned.

    Raises:
        RuntimeError: a rank failed, with what they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", program, *arguments, folder]
        environment = os.environ | (EXACT_MEMORY if exact_memory else {})
        started = [
            subprocess.Popen([*command, str(rank), str(world)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        errors = [process.communicate()[1] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError(f"a rank of {program} {arguments} failed:\n" + "\n".join(errors))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def _share(workload: Workload, rank: int, world: int) -> Workload:
    """This rank's rows of the batch."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = workload.batch()
        return x[rank::world].contiguous(), y[rank::world].contiguous()

    return Workload(workload.name, workload.net, batch, len(range(rank, workload.size, world)))


class _Forward(Step):
    """DistributedDataParallel wraps ``forward``."""

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.training_step(batch, 0)


def _plain(workload: Workload, world: int) -> StepFunction:
    if world == 1:
        return plain(workload)
    module, batch = workload.build()
    wrapped = DistributedDataParallel(_Forward(module.net))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()

    return step


def _private(workload: Workload, name: str, rank: int, world: int, normaliser: int) -> StepFunction:
    module, batch = workload.build()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    layout, clipper, engine = ParameterLayout(module), FlatClipper(1.0), make_engine(name, module)
    noise = make_noise_source("auto", layout.device, rank=rank)
    call = StepCall((batch, 0), workload.size)

    def step() -> None:
        optimizer.zero_grad()
        total = layout.zeros()
        engine.accumulate(call, layout, clipper, total)
        release_(
            total, noise=noise, scale=1.0, distribution="laplace", normaliser=normaliser, release=0,
            ranks=Ranks(rank, world),
        )  # fmt: skip
        layout.write_grads(total)
        optimizer.step()

    return step


def _timed(steps: dict[str, StepFunction], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {engine: [] for engine in steps}
    begun = time.perf_counter()
    more = True
    while more:
        for engine, step in steps.items():
            turn = []
            for _ in range(2):
                distributed.barrier()
                start = time.perf_counter()
                step()
                distributed.barrier()
                turn.append(1e3 * (time.perf_counter() - start))
            times[engine].append(min(turn))
        rounds = len(times[next(iter(times))])
        go_on = torch.tensor([float(rounds < 5 or (rounds < 25 and time.perf_counter() - begun < seconds))])
        distributed.broadcast(go_on, 0)  # rank 0 decides, so that all end together
        more = bool(go_on.item())
    return times


def _rank(name: str, engines: list[str], what: str, folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def steps_of(workload: Workload) -> dict[str, StepFunction]:
        mine = _share(workload, rank, world)
        return {
            engine: _plain(mine, world) if engine == "plain" else _private(mine, engine, rank, world, workload.size)
            for engine in engines
        }

    for step in steps_of(find_workload("batch=16")).values():
        step()  # code and buffers that any first step loads
    steps = steps_of(find_workload(name))
    kind, _, seconds = what.partition(" ")
    result: dict[str, object]
    if kind == "time":
        for step in steps.values():
            step()
            step()
        result = dict(_timed(steps, float(seconds)))
    else:
        result = {engine: peak_of(step, 3) for engine, step in steps.items()}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2].split(","), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
