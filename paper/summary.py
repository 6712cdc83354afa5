"""A results file as a Markdown table: mean and spread over seeds, beside the paper's number where it is known.

python paper/summary.py docs/results/table2.csv
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import _path  # noqa: F401
from jsonargparse import ArgumentParser
from recording import Results

# Lap2's accuracy in the paper's Table II, percent
PAPER = {
    "fashion_mnist": {"3.42": 82.60, "2.53": 81.45, "1.68": 81.45, "0.88": 77.03, "0.13": 70.03},
    "mnist": {"3.42": 96.82, "2.53": 96.90, "1.68": 95.39, "0.88": 93.29, "0.13": 78.96},
}
COLUMNS = (
    "data",
    "recipe",
    "mechanism",
    "eps",
    "spent",
    "noise multiplier",
    "steps",
    "batch",
    "accounting",
    "runs",
    "accuracy",
    "mean",
    "std",
    "paper (Lap2)",
    "CPU s per run",
)
_SETTING = ("dataset", "recipe", "mechanism", "eps", "steps", "batch_size", "accounting")


def table(rows: Sequence[Mapping[str, str]], *, digits: int = 2) -> str:
    """Rows that differ in their seed only become one line; the standard deviation is over seeds (n - 1).

    Rows of another accounting have other noise at the same epsilon: they are a line of their own.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        key = tuple(row[name] for name in _SETTING)
        groups[key].append(row)
    lines = [" | ".join(("", *COLUMNS, "")).strip(), "|" + "---|" * len(COLUMNS)]
    for key in sorted(groups, key=lambda key: (key[0], key[1], -float(key[3]), key[2], key[6])):
        dataset, recipe, mechanism, eps, steps, batch, accounting = key
        group = groups[key]
        accuracies = [float(row["accuracy"]) for row in group]
        paper = PAPER.get(dataset, {}).get(eps) if mechanism == "laplace" else None
        cells = (
            dataset,
            recipe,
            mechanism,
            eps,
            f"{max(float(row['epsilon']) for row in group):.4f}",
            f"{float(group[0]['noise_multiplier']):.4g}",
            steps,
            batch,
            accounting,
            str(len(group)),
            ", ".join(f"{accuracy:.{digits}f}" for accuracy in accuracies),
            f"{statistics.mean(accuracies):.{digits}f}",
            f"{statistics.stdev(accuracies):.{digits}f}" if len(group) > 1 else "",
            "" if paper is None else f"{paper:.2f}",
            f"{statistics.mean(float(row['cpu_seconds']) for row in group):.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="A results file as a Markdown table.")
    parser.add_argument("csv", type=str)
    print(table(Results(Path(parser.parse_args(argv).csv)).rows()))


if __name__ == "__main__":
    main()
