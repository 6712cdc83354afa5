"""Sharded modules (FSDP2) against DDP, plain and private: memory of a rank and time of a step.

    python -m benchmarks.sharded --update docs/performance.md

A transformer of 42.9 million parameters that all train, on two gloo processes of one thread each, 4 examples of 32
tokens on each. Memory is that of one rank with everything: its part of the weights, gradients, activations, sums. Each
method has processes of its own for it; for time all take turns in the same ones. CPU time is one rank's, threads of
gloo included; it is what another job on the machine moves least.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.document import replace_block
from benchmarks.measure import machine, memory_status
from benchmarks.methods import StepFunction
from benchmarks.ranks import run_ranks
from benchmarks.workloads import LanguageModel
from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.callback.release.window import release_
from lightning_lap2.gradients import FlatClipper, StepCall, make_layout
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.noise import make_noise_source

WORLD, EXAMPLES, LENGTH, VOCABULARY = 2, 4, 32, 5000
METHODS = {
    "plain, DDP": (False, ""), "plain, FSDP2": (True, ""), "ghost, DDP": (False, "ghost"),
    "ghost, FSDP2": (True, "ghost"), "vmap, DDP": (False, "vmap"), "vmap, FSDP2": (True, "vmap"),
}  # fmt: skip
"""Whether it is sharded, and by which engine it is private."""


class Model(nn.Module):
    """The language model and its step; ``forward`` is what DistributedDataParallel wraps."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = LanguageModel(VOCABULARY, width, depth, LENGTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.training_step(batch, 0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())


def step_of(method: str, rank: int, *, width: int = 512, depth: int = 12) -> StepFunction:
    """One optimizer step of a method."""
    shard, engine = METHODS[method]
    module, generator = Model(width, depth), torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (EXAMPLES, LENGTH + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if shard:
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in module.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module.net, mesh=mesh)
    if engine:
        return _private(module, engine, batch, rank)
    return _plain(module if shard else DistributedDataParallel(module), batch)


def _plain(module: nn.Module, batch: tuple[Tensor, Tensor]) -> StepFunction:
    optimizer = torch.optim.SGD(module.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()

    return step


def _private(module: nn.Module, name: str, batch: tuple[Tensor, Tensor], rank: int) -> StepFunction:
    layout, clipper, engine = make_layout(module), FlatClipper(1.0), make_engine(name, module)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    noise, call = make_noise_source("auto", layout.device, rank=rank), StepCall((batch, 0), EXAMPLES)
    ranks = Ranks(rank, WORLD).of(layout)

    def step() -> None:
        optimizer.zero_grad()
        total = layout.zeros()
        engine.accumulate(call, layout, clipper, total)
        release_(
            total, noise=noise, scale=1.0, distribution="laplace", normaliser=WORLD * EXAMPLES, release=0, ranks=ranks
        )
        layout.write_grads(total)
        optimizer.step()

    return step


def _memory(method: str, rank: int) -> dict[str, float]:
    """MiB of this rank between steps and at most, above what code and thread pools take."""
    step_of(method, rank, width=32, depth=1)()
    gc.collect()
    empty = memory_status("VmRSS")
    step = step_of(method, rank)
    gc.collect()
    resting = memory_status("VmRSS") - empty
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(3):
        step()
    return {"resting": resting, "peak": memory_status("VmHWM") - empty}


def _times(methods: list[str], rank: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step, by the wall's clock and of this process' CPU time; methods take turns."""
    steps = {method: step_of(method, rank) for method in methods}
    for step in steps.values():
        step()
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, step in steps.items():
            distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            distributed.barrier()
            times[method].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def _rank(what: str, methods: list[str], rounds: int, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    result = _memory(methods[0], rank) if what == "memory" else _times(methods, rank, rounds)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


def table(memory: dict[str, dict[str, float]], times: dict[str, list[list[float]]]) -> str:
    """One row for each method: memory of the larger rank, medians of the times."""
    lines = ["| | MiB between steps | MiB at most | CPU s per step | s per step |", "|---|---|---|---|---|"]
    for method, found in memory.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[method], strict=True))
        lines.append(f"| {method} | {found['resting']:.0f} | {found['peak']:.0f} | {cpu:.2f} | {wall:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of timing (default: 9)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="write the table into this document, in place")
    options = parser.parse_args()
    memory: dict[str, dict[str, float]] = {}
    for method in METHODS:
        print(f"memory of {method} ...", file=sys.stderr)
        found = run_ranks("benchmarks.sharded", ["memory", method, "0"], WORLD, exact_memory=True)
        memory[method] = {what: max(one[what] for one in found) for what in ("resting", "peak")}
    print("timing ...", file=sys.stderr)
    arguments = ["time", ";".join(METHODS), str(options.rounds)]
    times = run_ranks("benchmarks.sharded", arguments, WORLD, exact_memory=False)[0]
    load = f"load average {os.getloadavg()[0]:.1f}"
    text = f"{machine()}; {options.rounds} rounds, {load}.\n\n{table(memory, times)}"
    print(text)
    if options.update:
        replace_block(options.update, "python -m benchmarks.sharded", text)


if __name__ == "__main__":
    if len(sys.argv) == 7 and sys.argv[1] in ("memory", "time"):
        _rank(sys.argv[1], sys.argv[2].split(";"), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
