"""``lightning-lap2 calibrate --mean-runs``: what a private search costs, beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.accounting.selection import DISTRIBUTIONS, RunCount, plan_search
from lightning_lap2.cli.compare import ratios
from lightning_lap2.cli.options import echo, spellings
from lightning_lap2.cli.parsing import Result
from lightning_lap2.cli.text import markdown, number
from lightning_lap2.report import rounded_up


def add_price_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        *spellings("mean-runs"),
        type=number,
        default=None,
        help="price of a private search with so many runs expected, beside that of one run and of naive composition",
    )
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default=DISTRIBUTIONS[0], help="of the number of runs")
    parser.add_argument(
        "--shape", type=number, default=0, help="of the negative binomial: 0 logarithmic (default), 1 geometric"
    )


def price(config: Namespace, plan: Mapping[str, Any]) -> Result:
    """Noise multipliers for one run, for the best of a random number of runs, and for that many runs composed."""
    runs = RunCount(config.mean_runs, config.distribution, config.shape)
    told = {"eps": config.eps, "delta": config.delta, "bound": config.bound, "mechanism": config.mechanism}
    count = math.ceil(config.mean_runs)
    one = calibrate_noise_multiplier(**told, **plan)
    search = plan_search(**told, runs=runs, **plan)
    naive = calibrate_noise_multiplier(**told, **{**plan, "steps": count * plan["steps"]})
    rows = [
        _row("one run", one, one, config, plan),
        _row(f"private search, {runs.name}, mean {config.mean_runs:g}", search.noise_multiplier, one, config, plan),
        _row(f"{count} runs, naive composition", naive, one, config, plan),
    ]
    head = ["", "noise multiplier", "times one run", "std / C", "epsilon of each run"]
    cells = [_cells(row) for row in rows]
    limit = {"points": search.limit.points, "divergences": search.limit.divergences}
    result = {"rows": rows, "search_epsilon": search.epsilon, "run_limit": limit, **echo(config)}
    return Result(result, markdown(head, cells))


def _row(method: str, multiplier: float, one: float, config: Namespace, plan: Mapping[str, Any]) -> dict[str, Any]:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=multiplier, **plan)
    return {
        "method": method,
        "noise_multiplier": multiplier,
        "times_one_run": multiplier / one if one else 1.0,
        **ratios(multiplier, config.mechanism),
        "epsilon_of_each_run": accountant.epsilon(delta=config.delta),
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio, deviation = f"{row['times_one_run']:.3f}", f"{row['std_over_clip']:.4g}"
    return [
        row["method"],
        rounded_up(row["noise_multiplier"]),
        ratio,
        deviation,
        rounded_up(row["epsilon_of_each_run"]),
    ]
