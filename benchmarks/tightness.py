"""python -m benchmarks.tightness: each route to epsilon against the exact epsilon of single gradients.

Writes docs/tightness.csv, the tables of docs/tightness.md and docs/img/tightness.png. Rows that the CSV already has are
not computed again; ``--fresh`` starts over. The lower bounds are in :mod:`benchmarks.lower`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.lower import even_spread_epsilon, one_coordinate_epsilon
from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting._search import smallest_safe
from lightning_lap2.accounting.routes.comparison import Comparison
from lightning_lap2.accounting.routes.domination import Domination
from lightning_lap2.accounting.routes.falling import Falling
from lightning_lap2.accounting.routes.orders import Orders
from lightning_lap2.accounting.routes.route import Route

DELTA = 1e-5
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STEPS = (10, 1_000, 100_000)
ROUTES = ("tight", "falling", "comparison", "moments", "domination", "joint", "published")
COLOURS = {
    "falling": "#111111",
    "comparison": "#1b7fbd",
    "moments": "#d95f02",
    "domination": "#2a9d5c",
    "joint": "#8a6fb5",
}


@dataclass(frozen=True)
class Row:
    """Epsilon at ``DELTA`` of ``steps`` releases: two lower bounds, then a column per route. ``target`` is the epsilon
    that the noise was chosen for."""

    dimension: int
    rate: float
    steps: int
    target: float
    multiplier: float
    one_coordinate: float
    even_spread: float
    tight: float
    falling: float
    comparison: float
    moments: float
    domination: float
    joint: float
    published: float

    @property
    def lower(self) -> float:
        return max(self.one_coordinate, self.even_spread)


def settings() -> list[tuple[int, float, int, float]]:
    """(dimension, rate, steps, epsilon that the noise is chosen for)."""
    every = [(26_010, q, t, 1.0) for q, t in itertools.product(RATES, STEPS)]
    wide = [(10**6, q, 1_000, 1.0) for q in RATES[1:4]]
    other = [(26_010, 1e-2, 1_000, 0.1), (26_010, 1e-2, 1_000, 8.0)]
    return every + wide + other


def measure(dimension: int, rate: float, steps: int, target: float) -> Row:
    multiplier = multiplier_for(dimension, rate, steps, target)
    release = {"noise_multiplier": multiplier, "sample_rate": rate, "dimension": dimension, "steps": steps}

    def charged(bound: str) -> MajorizedAccountant:
        accountant = MajorizedAccountant(bound=bound)
        accountant.step(**release)
        return accountant

    tight = charged("tight")

    def alone(route: Route) -> float:
        return max(route.epsilon(DELTA)) if route.usable(DELTA) else math.inf

    return Row(
        dimension, rate, steps, target, multiplier,
        one_coordinate_epsilon(multiplier, rate, steps, DELTA),
        even_spread_epsilon(multiplier, rate, steps, dimension, DELTA),
        tight.epsilon(delta=DELTA),
        *(alone(make(tight.composition)) for make in (Falling, Comparison, Orders, Domination)),
        charged("joint").epsilon(delta=DELTA),
        charged("published").epsilon(delta=DELTA),
    )  # fmt: skip


def multiplier_for(dimension: int, rate: float, steps: int, eps: float) -> float:
    """A noise multiplier of two digits whose epsilon by the third route is about ``eps``: it has not moved since."""

    def cost(m: float) -> float:
        accountant = MajorizedAccountant()
        accountant.step(noise_multiplier=m, sample_rate=rate, dimension=dimension, steps=steps)
        return max(Comparison(accountant.composition).epsilon(DELTA))

    start = max(0.4, 4.0 * rate * math.sqrt(steps) / eps)
    return float(f"{smallest_safe(cost, eps, start, rtol=2e-2):.2g}")


def read(path: Path) -> list[Row]:
    whole = ("dimension", "steps")
    with path.open(newline="") as file:
        return [
            Row(**{k: int(float(v)) if k in whole else float(v) for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def complete(path: Path) -> list[Row]:
    """Every row of :func:`settings`, computing and appending those that ``path`` lacks."""
    rows = read(path) if path.exists() else []
    done = {(r.dimension, r.rate, r.steps, r.target): r for r in rows}
    if not rows:
        with path.open("w", newline="") as file:
            csv.writer(file).writerow([f.name for f in fields(Row)])
    for number, setting in enumerate(settings(), 1):
        if setting not in done:
            start = time.process_time()
            done[setting] = measure(*setting)
            with path.open("a", newline="") as file:
                csv.writer(file).writerow([f"{v:.6g}" for v in asdict(done[setting]).values()])
            seconds = time.process_time() - start
            print(f"{number} of {len(settings())}: {setting} {seconds:.1f} s", file=sys.stderr, flush=True)
    return [done[setting] for setting in settings()]


def table(rows: list[Row]) -> str:
    """Lower bounds, then each route and how far it is above the larger of them."""
    heads = ["q", "T", "m", "one coordinate", "even spread", *ROUTES[:-1], "published (not a bound)"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row.rate:g}", f"{row.steps:,}", f"{row.multiplier:g}"]
        cells += [_digits(row.one_coordinate), _digits(row.even_spread)]
        for route in ROUTES:
            value = getattr(row, route)
            cells.append(_digits(value) + (f" ({100 * (value / row.lower - 1):+.0f} %)" if value < math.inf else ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _digits(value: float) -> str:
    return "–" if math.isinf(value) else f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def plot(rows: list[Row], path: Path) -> None:
    """Route over lower bound against T, a panel per sampling rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 3.4), layout="constrained")
    panels = figure.subplots(1, len(RATES), sharey=True)
    for axes, rate in zip(panels, RATES, strict=True):
        mine = sorted((r for r in rows if r.rate == rate), key=lambda r: r.steps)
        for route, colour in COLOURS.items():
            points = [(r.steps, getattr(r, route) / r.lower) for r in mine if getattr(r, route) < math.inf]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=route, markersize=4, linewidth=1.6)
        axes.axhline(1.0, color="#555555", linewidth=1.0)
        axes.set(xscale="log", yscale="log", xlabel="steps T", title=f"q = {rate:g}", ylim=(0.95, 12.0))
        axes.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
        axes.minorticks_off()
        axes.grid(True, color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("epsilon / lower bound")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget rows computed before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    docs = Path(__file__).parent.parent / "docs"
    cache = docs / "tightness.csv"
    if arguments.fresh:
        cache.unlink(missing_ok=True)
    rows = complete(cache)
    groups = {
        f"n = {n:,}, noise for epsilon of about {eps:g}": [r for r in rows if (r.dimension, r.target) == (n, eps)]
        for n, eps in dict.fromkeys((n, eps) for n, _, _, eps in settings())
    }
    print("\n\n".join(f"**{title}**\n\n{table(group)}" for title, group in groups.items()))
    (docs / "img").mkdir(exist_ok=True)
    plot(next(iter(groups.values())), docs / "img" / "tightness.png")


if __name__ == "__main__":
    main()
