"""python -m benchmarks.accountants: what the accountant costs. Each first query is made in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

RUN = {"sample_rate": 0.0043, "steps": 5860}
DELTA = 1e-5
DIMENSIONS = [10**2, 26_010, 10**6, 10**7, 10**9]
COLD = [
    *((f"calibration to eps = {eps:g}, bound={bound}", f"calibrate {bound} {eps}")
      for bound in ("tight", "joint") for eps in (1.0, 8.0)),
    *((f"first epsilon at m = {m:g}, by orders", f"orders tight {m}") for m in (1.0,)),
    *((f"first epsilon at m = {m:g}, tight", f"epsilon tight {m}") for m in (1.0, 0.5)),
]  # fmt: skip


def cold(what: str, dimension: int) -> float:
    """Seconds of one call in a fresh process, imports apart."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.accountants", *what.split(), str(dimension)]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def _cold_call(kind: str, bound: str, value: float, dimension: int) -> float:
    from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier

    start = time.perf_counter()
    if kind == "calibrate":
        calibrate_noise_multiplier(eps=value, delta=DELTA, dimension=dimension, bound=bound, **RUN)  # type: ignore[arg-type]
    else:
        accountant = MajorizedAccountant(bound=bound)
        accountant.step(noise_multiplier=value, dimension=dimension, **RUN)  # type: ignore[arg-type]
        accountant.epsilon(delta=DELTA, orders_only=kind == "orders")
    return time.perf_counter() - start


def cold_table(rounds: int = 3) -> str:
    """Median seconds, a row per call, a column per dimension."""
    lines = ["| seconds, first call of a process | " + " | ".join(f"n = {n:,}" for n in DIMENSIONS) + " |"]
    lines.append("|---" * (len(DIMENSIONS) + 1) + "|")
    for label, what in COLD:
        print(f"timing {label} ...", file=sys.stderr, flush=True)
        cells = [statistics.median(cold(what, n) for _ in range(rounds)) for n in DIMENSIONS]
        lines.append(f"| {label} | " + " | ".join(f"{c:.3f}" for c in cells) + " |")
    return "\n".join(lines)


def _microseconds(call: Callable[[int], object], times: int) -> float:
    """Median over ten blocks of the mean time of a call."""
    means = []
    for block in range(10):
        start = time.perf_counter()
        for k in range(times):
            call(block * times + k)
        means.append(1e6 * (time.perf_counter() - start) / times)
    return statistics.median(means)


def step_table(dimension: int = 26_010, steps: int = 5860) -> str:
    """Microseconds of what happens at every step, once the forecast stands."""
    from lightning_lap2.accounting import MajorizedAccountant

    charge = {"noise_multiplier": 1.5, "sample_rate": 0.0043, "dimension": dimension}
    accountant = MajorizedAccountant()
    start = time.perf_counter()
    forecast = accountant.forecast(delta=DELTA, steps=steps, **charge)
    planning = time.perf_counter() - start
    asking = _microseconds(lambda k: forecast.epsilon(k % steps), 500)
    charging = _microseconds(lambda k: accountant.step(**charge), 500)
    return (
        "| at every step | microseconds |\n|---|---|\n"
        f"| epsilon as it is logged (`EpsilonForecast.epsilon`) | {asking:.1f} |\n"
        f"| the charge (`MajorizedAccountant.step`) | {charging:.1f} |\n\n"
        f"Making the forecast, once a fit ({steps:,} steps, n = {dimension:,}): {planning:.2f} s."
    )


def query_table() -> str:
    """Seconds of CPU time of the queries of large ledgers: 31 kinds of releases and one more, and many equal ones."""
    from lightning_lap2.accounting import MajorizedAccountant

    plan = {"noise_multiplier": 3.0, "sample_rate": 0.004, "dimension": 10**9}
    lines = ["| seconds | ledger | epsilon | delta | forecast | steps_within |", "|---" * 6 + "|"]
    for mechanism in ("laplace", "gaussian", "laplace_l1"):
        mixed, many = MajorizedAccountant(mechanism=mechanism), MajorizedAccountant(mechanism=mechanism)
        for i in range(31):
            rate = 2.5e-4 * (1 + i)
            mixed.step(noise_multiplier=2 + 0.1 * i, sample_rate=rate, dimension=10**9, steps=300)
        many.step(noise_multiplier=48.803, sample_rate=0.12545, dimension=1000, steps=395_568)
        for name, accountant in (("32 kinds", mixed), ("395,568 steps of one", many)):
            times = []
            for query in (
                lambda a=accountant: a.epsilon(delta=0.0027187),
                lambda a=accountant: a.delta(eps=1.0),
                lambda a=accountant: a.forecast(delta=1e-5, steps=400, **plan),
                lambda a=accountant: a.steps_within(eps=12.0, delta=1e-5, **plan),
            ):
                start = time.process_time()
                query()
                times.append(time.process_time() - start)
            lines.append(f"| {mechanism} | {name} | " + " | ".join(f"{t:.2f}" for t in times) + " |")
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{query_table()}\n")
    print(f"{step_table()}\n\nq = {RUN['sample_rate']}, {RUN['steps']:,} steps, delta = {DELTA}:\n\n{cold_table()}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(_cold_call(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
