"""Figure 8: steps to a target accuracy, the paper's CNN on Fashion-MNIST (or MNIST), for each mechanism.

    python paper/figure8.py --data /usr/share/datasets/fashion-mnist --mechanism laplace gaussian laplace_l1
    python paper/figure8.py --data ... --max-steps 600 --every 50 --targets 0.5 0.6 0.65 --plot figure8.png

The test set is looked at every ``--every`` steps; the guarantee, which is about the training records, does not cover
it. The CSV file keeps the whole curve of a run, so that other targets need no new run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import _path  # noqa: F401
import lightning as L
from data import Rows, idx, loader
from fashion_mnist import TutorialCNN
from training import Row, fit, flags, spread, sweep


class Curve(L.Callback):
    """Validation accuracy by optimizer step."""

    def __init__(self) -> None:
        self.points: dict[int, float] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.points[trainer.global_step] = float(trainer.callback_metrics["val_accuracy"])


def as_text(points: dict[int, float]) -> str:
    return " ".join(f"{step}:{accuracy:.4f}" for step, accuracy in points.items())


def from_text(text: str) -> dict[int, float]:
    return {int(step): float(accuracy) for step, accuracy in (point.split(":") for point in text.split())}


def steps_to(points: dict[int, float], target: float) -> int | None:
    """The first step that was looked at with at least this accuracy; ``None``: none was."""
    return next((step for step, accuracy in sorted(points.items()) if accuracy >= target), None)


def table(rows: Sequence[Row], targets: Sequence[float]) -> str:
    """Mean steps to each target (smallest to largest) over the runs that reached it, and how many did."""
    lines = [f"| mechanism | eps | {' | '.join(f'to {target:.0%}' for target in targets)} | last accuracy |"]
    lines.append(f"|{'---|' * (3 + len(targets))}")
    for (mechanism, eps), group in itertools.groupby(rows, key=lambda row: (row["mechanism"], row["eps"])):
        curves = [from_text(row["curve"]) for row in group]
        cells = [reached(curves, target) for target in targets]
        last = spread([curve[max(curve)] for curve in curves])
        lines.append(f"| {mechanism} | {eps} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def reached(curves: Sequence[dict[int, float]], target: float) -> str:
    found = [float(step) for curve in curves if (step := steps_to(curve, target)) is not None]
    return f"{spread(found)}, {len(found)} of {len(curves)} runs" if found else "not reached"


def plot(rows: Sequence[Row], file: str) -> None:
    """The curves of the first seed of each mechanism and eps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for (mechanism, eps), group in itertools.groupby(rows, key=lambda row: (row["mechanism"], row["eps"])):
        points = from_text(next(group)["curve"])
        axes.plot(list(points), list(points.values()), label=f"{mechanism}, eps = {eps}")
    axes.set(xlabel="optimizer step", ylabel="test accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file)
    pyplot.close(figure)


def first(rows: Rows, number: int | None) -> Rows:
    return Rows(rows.images[:number], rows.labels[:number])


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = flags(
        "Steps to a target accuracy, the paper's CNN (Figure 8).",
        eps=(3.42, 0.88, 0.13),
        csv_name="figure8.csv",
        **{"steps": 5860, "batch_size": 258, "max_grad_norm": 1.0, "lr": 1e-3, "averaging": 0.0},
    )
    parser.add_argument("--data", type=str, required=True, help="folder with the four idx files, .gz or not")
    parser.add_argument("--every", type=int, default=100, help="steps between two looks at the test set")
    parser.add_argument("--test-subset", type=int, default=None, help="look at so many test images")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.6, 0.7, 0.75, 0.8], help="accuracies, 0 to 1")
    parser.add_argument("--plot", type=str, default=None, help="file for the curves (.png, .svg)")
    args = parser.parse_args(argv)
    train, test = first(idx(args.data, "train"), args.subset), first(idx(args.data, "t10k"), args.test_subset)

    def run(mechanism: str, eps: float, seed: int) -> Row:
        curve, validation = Curve(), loader(test, 1000)
        batches = loader(train, args.physical_batch or args.batch_size, shuffle=True)
        # intervals of validation are counted in loader batches
        every = args.every * (args.batch_size // (args.physical_batch or args.batch_size))
        looks: dict[str, Any] = {"val_check_interval": every, "check_val_every_n_epoch": None}
        looks["num_sanity_val_steps"] = 0
        spent = fit(TutorialCNN(args.lr), batches, args, mechanism, eps, validation, callbacks=[curve], **looks)
        return {**spent, "curve": as_text(curve.points)}

    settings = {"experiment": "figure8", **{name: args[name] for name in ("data", "every", "test_subset")}}
    rows = sweep(args, settings, run)
    print(table(rows, args.targets))
    if args.plot:
        plot(rows, args.plot)
    return rows


if __name__ == "__main__":
    main()
