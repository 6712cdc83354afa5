"""python benchmarks/noise.py [--size 10000000] [--threads 1]: milliseconds to noise a flat buffer and round it.

Each route runs in turn, interleaved over the rounds; the median is printed, so that a busy moment hits all
alike. With one thread it is that thread's CPU time, else wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from lightning_lap2.noise import StagedAesNoise, make_noise_source


def routes(size: int) -> dict[str, Callable[[], object]]:
    """What is compared: name -> one noising of ``size`` coordinates."""
    values = torch.zeros(size)
    double = torch.zeros(size, dtype=torch.float64)
    cpu = torch.device("cpu")
    aes, own = make_noise_source("aes", cpu), make_noise_source("torch", cpu)
    staged = StagedAesNoise(cpu, ahead=False)
    unit = torch.distributions.Laplace(torch.zeros(()), torch.ones(()))
    return {
        "aes laplace fp32": lambda: aes.add_(values, 1.0, release=0),
        "aes gaussian fp32": lambda: aes.add_(values, 1.0, "gaussian", release=0),
        "aes laplace fp64": lambda: aes.add_(double, 1.0, release=0),
        "aes gaussian fp64": lambda: aes.add_(double, 1.0, "gaussian", release=0),
        "aes laplace fp32, as for an accelerator": lambda: staged.add_(values, 1.0, release=0),
        "torch laplace fp32": lambda: own.add_(values, 1.0, release=0),
        "torch gaussian fp32": lambda: own.add_(values, 1.0, "gaussian", release=0),
        "torch.randn": lambda: torch.randn(size),
        "torch.randn, added": lambda: values.add_(torch.randn(size)),
        "torch.distributions.Laplace": lambda: unit.sample((size,)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10**7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compared = routes(arguments.size)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(arguments.rounds):
        for name, run in compared.items():
            start = clock()
            run()
            times[name].append(1e3 * (clock() - start))
    for name, seen in times.items():
        print(f"{name:40s} {statistics.median(seen):8.1f} ms")


if __name__ == "__main__":
    main()
