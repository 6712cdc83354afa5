"""What scaling runs leave behind: CSV, Markdown tables, plots. ``python -m benchmarks.curves DIR`` redraws."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

CURVES = {
    "batch": ("batch size", "tutorial CNN, 26,010 parameters"),
    "parameters": ("trainable parameters", "two-hidden-layer MLP of growing width, batch 32"),
    "length": ("sequence length", "causal transformer, 2 layers, width 128, batch 8"),
    "ranks-cnn": ("ranks", "tutorial CNN, batch 256 over all ranks, one thread each"),
    "ranks-mlp": ("ranks", "784-1024-1024-10 MLP, batch 256 over all ranks, one thread each"),
}
ENGINES = {"plain": "#555555", "ghost": "#1b7fbd", "vmap": "#d95f02", "loop": "#a7a7c9"}


@dataclass(frozen=True)
class Point:
    """One engine at one size.

    Attributes:
        milliseconds: median per step.
        ratio: median over rounds of the time as a multiple of plain's in the same round.
        mib: peak above the resting process.
        note: why a figure is missing.
    """

    curve: str
    x: int
    engine: str
    parameters: int
    batch: int
    milliseconds: float | None = None
    ratio: float | None = None
    mib: float | None = None
    note: str = ""


def write_csv(points: list[Point], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Point)])
        writer.writeheader()
        for point in points:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(point).items()})


def read_csv(path: Path) -> list[Point]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    with path.open(newline="") as file:
        return [
            Point(
                curve=row["curve"], x=int(row["x"]), engine=row["engine"], parameters=int(row["parameters"]),
                batch=int(row["batch"]), milliseconds=number(row["milliseconds"]), ratio=number(row["ratio"]),
                mib=number(row["mib"]), note=row["note"],
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def table(points: list[Point], curve: str) -> str:
    """Milliseconds (multiple of plain) and MiB, a row per size."""
    mine = {(p.x, p.engine): p for p in points if p.curve == curve}
    xs = sorted({x for x, _ in mine})
    engines = [e for e in ENGINES if any(key[1] == e for key in mine)]
    label, what = CURVES[curve]
    heads = [f"{e}, ms" for e in engines] + [f"{e}, MiB" for e in engines]
    lines = [f"**{what}**", "", f"| {label} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    notes: list[str] = []
    for x in xs:
        found = [mine.get((x, e)) for e in engines]
        times = [_time_cell(p) for p in found]
        memory = ["–" if p is None or p.mib is None else f"{p.mib:.0f}" for p in found]
        lines.append(f"| {x:,} | " + " | ".join(times + memory) + " |")
        notes += [f"{p.engine} at {x:,}: {p.note}" for p in found if p is not None and p.note]
    return "\n".join([*lines, "", *(f"* {note}" for note in notes)]).rstrip()


def _time_cell(point: Point | None) -> str:
    if point is None or point.milliseconds is None:
        return "–"
    text = f"{point.milliseconds:.3g}" if point.milliseconds < 1000 else f"{point.milliseconds:,.0f}"
    return text if point.ratio is None or point.engine == "plain" else f"{text} ({point.ratio:.2f}x)"


def plot(points: list[Point], curve: str, path: Path) -> None:
    """Time and memory side by side."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    label, what = CURVES[curve]
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    figure.suptitle(what, fontsize=11)
    left, right = figure.subplots(1, 2)
    ticks = sorted({p.x for p in points if p.curve == curve})
    for axes, attribute, unit in ((left, "milliseconds", "time per step [ms]"), (right, "mib", "peak memory [MiB]")):
        for engine, colour in ENGINES.items():
            mine = [(p.x, getattr(p, attribute)) for p in points if p.curve == curve and p.engine == engine]
            known = sorted((x, y) for x, y in mine if y is not None and y > 0)
            if known:
                axes.plot(*zip(*known, strict=True), "o-", color=colour, label=engine, markersize=4, linewidth=1.6)
        axes.set_yscale("log")
        if curve.startswith("ranks"):
            axes.set_xticks(ticks)
        else:
            axes.set_xscale("log", base=10 if curve == "parameters" else 2)
            if curve != "parameters":
                axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.set_ylabel(unit)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path, dpi=130)


def write_all(points: list[Point], folder: Path) -> str:
    """Writes CSV, Markdown and plots; the Markdown comes back."""
    write_csv(points, folder / "scaling.csv")
    measured = [curve for curve in CURVES if any(p.curve == curve for p in points)]
    text = "\n\n".join(table(points, curve) for curve in measured) + "\n"
    (folder / "scaling.md").write_text(text)
    try:
        for curve in measured:
            plot(points, curve, folder / f"scaling-{curve}.png")
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
    return text


if __name__ == "__main__":
    print(write_all(read_csv(Path(sys.argv[1]) / "scaling.csv"), Path(sys.argv[1])))
