"""python -m benchmarks.device [--device cuda] [--minutes 4]: this package on an accelerator, against the CPU's answers.

Three parts, each printed as it comes, the whole within the minutes given:

* engines: the clipped sum of every workload by ghost and vmap on the device, against vmap on the CPU in float64;
* noise: mean, spread and tails of each source on the device, and that no two releases share noise;
* timings: one private step by each engine beside the plain step, with peak memory.

Ends with exit code 1 if an answer is off. On a machine without the device it says so, and ends with 2; ``--device cpu``
tries the script itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import WORKLOADS, Workload
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.noise import make_noise_source

ENGINES = ("ghost", "vmap")
CLIP = 0.1
# relative to the norm of the sum: float32 on both sides, other kernels and orders of summation
TOLERANCE = 1e-4
_DRAWS = 4_000_000


def clipped_sum(workload: Workload, engine: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The clipped sum ``[n]`` of the workload's batch, on the CPU in float64."""
    torch.manual_seed(0)
    module, batch = workload.build()
    module = module.to(device, dtype)
    moved = tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in batch)
    layout = ParameterLayout(module)
    total = layout.zeros()
    make_engine(engine, module).accumulate(StepCall((moved, 0), workload.size), layout, FlatClipper(CLIP), total)
    return total.double().cpu()


def check_engines(device: torch.device, until: float) -> bool:
    print(f"{'workload':10s} {'engine':6s} {'difference':>12s}")
    good = True
    for name, workload in WORKLOADS.items():
        if time.monotonic() > until:
            print(f"{name:10s} not reached in time")
            continue
        want = clipped_sum(workload, "vmap", torch.device("cpu"), torch.float64)
        for engine in ENGINES:
            found = clipped_sum(workload, engine, device, torch.float32)
            off = float((found - want).norm() / want.norm())
            good &= off <= TOLERANCE
            print(f"{name:10s} {engine:6s} {off:12.2e}{'' if off <= TOLERANCE else '   OFF'}")
    return good


def check_noise(device: torch.device) -> bool:
    """Means, mean magnitudes and tails within five standard errors of what the distribution has."""
    good = True
    print(f"\n{'source':8s} {'noise':9s} {'mean':>9s} {'|x| mean':>9s} {'above 8':>9s} {'max':>6s}")
    for source in ("auto", "aes", "torch"):
        for distribution, spread, above in (("laplace", 1.0, math.exp(-8)), ("gaussian", math.sqrt(2 / math.pi), 0.0)):
            noise = make_noise_source(source, device)  # type: ignore[arg-type]
            values = torch.zeros(_DRAWS, device=device)
            noise.add_(values, 1.0, distribution, release=0)  # type: ignore[arg-type]
            other = torch.zeros(_DRAWS, device=device)
            noise.add_(other, 1.0, distribution, release=1)  # type: ignore[arg-type]
            mean, size = float(values.double().mean()), float(values.double().abs().mean())
            tail = float((values.abs() > 8).double().mean())
            error = 5 * math.sqrt(2 / _DRAWS)
            fine = abs(mean) < error and abs(size - spread) < error
            fine &= abs(tail - above) < 5 * math.sqrt(max(above, 1e-12) / _DRAWS) + 1e-9
            fine &= bool((values != other).double().mean() > 0.99)
            good &= fine
            print(
                f"{source:8s} {distribution:9s} {mean:9.5f} {size:9.5f} {tail:9.2e} {float(values.abs().max()):6.2f}"
                f"{'' if fine else '   OFF'}"
            )
    return good


def step_of(workload: Workload, engine: str | None, device: torch.device) -> Callable[[], Any]:
    """One optimizer step on the device: plain, or by an engine with noise."""
    torch.manual_seed(0)
    module, batch = workload.build()
    module = module.to(device)
    moved = tuple(t.to(device) for t in batch)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    if engine is None:

        def plain() -> None:
            optimizer.zero_grad()
            module.training_step(moved, 0).backward()
            optimizer.step()

        return plain
    layout, clipper, made = ParameterLayout(module), FlatClipper(1.0), make_engine(engine, module)
    noise, call = make_noise_source("auto", device), StepCall((moved, 0), workload.size)

    def private() -> None:
        optimizer.zero_grad()
        total = layout.zeros()
        made.accumulate(call, layout, clipper, total)
        noise.add_(total, 1.0, release=0)
        layout.write_grads(total.div_(workload.size))
        optimizer.step()

    return private


def timed(step: Callable[[], Any], device: torch.device, rounds: int = 10) -> tuple[float, float]:
    """Median milliseconds, and peak MiB above what was held before (0 where torch does not count)."""
    counted = device.type == "cuda"
    step()
    if counted:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if counted else 0
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        if counted:
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated(device) - held if counted else 0
    return statistics.median(times), peak / 2**20


def report_times(device: torch.device, until: float) -> None:
    print(f"\n{'workload':10s} {'step':6s} {'ms':>8s} {'ratio':>6s} {'MiB':>8s}")
    for name, workload in WORKLOADS.items():
        base = 0.0
        for engine in (None, *ENGINES):
            if time.monotonic() > until:
                print(f"{name:10s} not reached in time")
                break
            milliseconds, peak = timed(step_of(workload, engine, device), device)
            base = base or milliseconds
            print(f"{name:10s} {engine or 'plain':6s} {milliseconds:8.2f} {milliseconds / base:6.2f} {peak:8.0f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4.0)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {what}\n")
    start = time.monotonic()
    seconds = 60 * options.minutes
    good = check_engines(device, start + 0.5 * seconds)
    good &= check_noise(device)
    report_times(device, start + 0.9 * seconds)
    print("\nall answers as on the CPU" if good else "\nsome answers are off")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
