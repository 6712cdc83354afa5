"""The tables of docs/private-search.md: noise of a private search's runs, as a multiple of what one run needs.

python -m benchmarks.search_prices            # minutes
python -m benchmarks.search_prices --mean-runs 10 --grids 2 3
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_lap2.accounting import calibrate_noise_multiplier
from lightning_lap2.accounting.selection import RunCount, plan_search
from lightning_lap2.cli.text import markdown

COUNTS: dict[str, Callable[[float], RunCount]] = {
    "logarithmic": lambda mean: RunCount(mean),
    "geometric": lambda mean: RunCount(mean, shape=1.0),
    "Poisson": lambda mean: RunCount(mean, "poisson"),
}
COVERED = 0.9
"""Probability with which a search of the second table tries any given configuration."""


@dataclass(frozen=True)
class Setting:
    """A plan and the budget of the whole search."""

    name: str
    eps: float
    delta: float
    plan: dict[str, Any]

    def one(self, runs: int = 1) -> float:
        """Noise multiplier of so many runs, composed."""
        return calibrate_noise_multiplier(
            eps=self.eps, delta=self.delta, **{**self.plan, "steps": runs * self.plan["steps"]}
        )

    def search(self, runs: RunCount) -> float:
        """Noise multiplier of each run of a search."""
        return plan_search(eps=self.eps, delta=self.delta, runs=runs, **self.plan).noise_multiplier


_PAPER = {"sample_rate": 0.0043, "steps": 5860, "dimension": 26010}
DIGITS = Setting("digits, 3", 3.0, 1e-4, {"sample_rate": 256 / 1437, "steps": 180, "dimension": 2410})
SETTINGS = (Setting("paper, 3", 3.0, 1e-5, _PAPER), Setting("paper, 1", 1.0, 1e-5, _PAPER), DIGITS)


def price_rows(mean: int) -> list[list[str]]:
    """One row of the first table for each setting."""
    rows = []
    for setting in SETTINGS:
        prices = [setting.search(make(mean)) for make in COUNTS.values()]
        ratios = [price / setting.one() for price in (*prices, setting.one(mean))]
        rows.append([str(mean), setting.name, *(f"{ratio:.3f}" for ratio in ratios)])
    return rows


def covering_mean(make: Callable[[float], RunCount], configurations: int) -> float:
    """Smallest mean, up to 1e-6, with which any given configuration is tried with probability :data:`COVERED`."""
    low, high = 1.0, 1e7
    while high > low * (1.0 + 1e-6):
        middle = math.sqrt(low * high)
        covers = make(middle).chance_of(1.0 / configurations) >= COVERED
        low, high = (low, middle) if covers else (middle, high)
    return high


def grid_row(configurations: int) -> list[str]:
    """One row of the second table."""
    one = DIGITS.one()
    row = [str(configurations), f"{DIGITS.one(configurations) / one:.3f}"]
    for name in ("geometric", "Poisson"):
        mean = covering_mean(COUNTS[name], configurations)
        row.append(f"{DIGITS.search(COUNTS[name](mean)) / one:.3f} ({mean:.1f})")
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mean-runs", type=int, nargs="*", default=[5, 10, 20, 50, 100], help="rows of the first table"
    )
    parser.add_argument("--grids", type=int, nargs="*", default=[2, 3, 4, 6, 8, 12, 16, 24], help="of the second")
    args = parser.parse_args(argv)
    rows = [row for mean in args.mean_runs for row in price_rows(mean)]
    print(markdown(["mean runs", "", *COUNTS, "so many runs, composed"], rows))
    print()
    head = ["configurations", "all of them, composed", "geometric (mean runs)", "Poisson (mean runs)"]
    print(markdown(head, [grid_row(count) for count in args.grids]))


if __name__ == "__main__":
    main()
