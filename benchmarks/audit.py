"""The audits that docs/audit.md records: the real thing under several settings, and five planted faults.

    python -m benchmarks.audit                        # all of them, into ./audit_results
    python -m benchmarks.audit --only lap2 digits     # those whose name contains one of these

A finished audit is a row of ``results.csv``, its scores and a picture; one that is there already is not run again, so
an interrupted call goes on where it stopped. ``audit-summary.png`` shows all rows. Everything follows from ``--seed``.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.faults import FAULTS
from lightning_lap2._progress import progress_bar
from lightning_lap2.audit import AuditResult, Training, audit, plot

COLUMNS = (
    "name", "fault", "mechanism", "canary", "method", "runs", "n", "q", "steps", "noise_multiplier", "delta",
    "claimed", "lower_bound", "confidence", "evidence", "violated", "seconds",
)  # fmt: skip


class Chain(L.LightningModule):
    """Linear layers without bias and with tanh between them, squared error."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Digits(L.LightningModule):
    """64 -> 32 -> 10, as in examples/digits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def chain(*widths: int, records: int, batch: int, steps: int, **privacy: Any) -> Training:
    """A chain on standard normal data."""
    data = torch.Generator().manual_seed(0)
    x, y = (torch.randn(records, width, generator=data) for width in (widths[0], widths[-1]))
    return Training(
        model=lambda: Chain(*widths),
        loader=DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True),
        privacy=privacy,
        trainer={"max_steps": steps, "accelerator": "cpu", "devices": 1},
    )


def digits(**privacy: Any) -> Training:
    """The network of ``make demo`` at eps = 3, on all 1,797 of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long())
    return Training(
        model=Digits,
        loader=DataLoader(data, batch_size=256, shuffle=True),
        privacy={"eps": 3.0, "delta": 1e-4, **privacy},
        trainer={"max_epochs": 30, "accelerator": "cpu", "devices": 1},
    )


@dataclass(frozen=True)
class Case:
    """One audit: how it is made, under which fault, and what else ``audit`` is told."""

    name: str
    training: Callable[[], Training]
    options: dict[str, Any]
    fault: str = ""

    def planted(self) -> AbstractContextManager[None]:
        return FAULTS[self.fault]() if self.fault else nullcontext()


def cases() -> list[Case]:
    many = {"method": "many_runs"}
    # the theorem's delta term needs a delta well below 1 - confidence
    one = {"method": "one_run", "delta": 1e-7}
    # Two layers of one scalar each and one step on four records: delta may be large, the claim is near the truth.
    tiny = dict(records=4, batch=4, steps=1, eps=float("inf"), delta=0.2, noise_multiplier=0.7)
    # A net of 12 scalars, 2 steps at q = 1/2.
    net = dict(records=16, batch=8, steps=2, eps=2.0, delta=0.05)

    def small(mechanism: str, fault: str) -> Callable[[], Training]:
        # at delta = 0.2 a quarter of the rate would be claimed to cost nothing at all
        more = {"delta": 0.1} if fault == "small_rate" else {}
        return lambda: chain(1, 1, 1, mechanism=mechanism, **{**tiny, **more})

    def usual(mechanism: str, **more: Any) -> Callable[[], Training]:
        return lambda: chain(2, 3, 2, mechanism=mechanism, **{**net, **more})

    found = [
        Case(f"{label}-tiny{'-' + fault if fault else ''}", small(mechanism, fault), many, fault)
        for label, mechanism in (("lap2", "laplace"), ("gaussian", "gaussian"))
        for fault in ("", *FAULTS)
    ]
    # on four records a clipped mean is little more than twice what it should be, on sixteen about ten times
    sixteen = {**tiny, "records": 16, "batch": 16, "delta": 0.05}
    found[6:6] = [
        Case("lap2-16-clipped_mean", lambda: chain(1, 1, 1, mechanism="laplace", **sixteen), many, "clipped_mean"),
        Case("lap2-coordinate", usual("laplace"), {**many, "canary": "one_coordinate"}),
        Case("lap2-spread", usual("laplace"), {**many, "canary": "even_spread"}),
        Case("gaussian", usual("gaussian"), many),
        Case("lap2-unsampled", usual("laplace", sampling="none"), many),
        Case("l1-one-step", lambda: chain(1, 1, 1, mechanism="laplace_l1", **{**tiny, "delta": 1e-5}), many),
        Case("digits-coordinate", digits, {**one, "canary": "one_coordinate"}),
        Case("digits-spread", digits, {**one, "canary": "even_spread", "canaries": 500}),
        Case("digits-mislabelled", digits, {**one, "canary": "mislabelled", "canaries": 500}),
    ]
    return found


def row(case: Case, result: AuditResult) -> dict[str, Any]:
    claim = result.claim
    evidence = str(result).splitlines()[2].split(maxsplit=1)[1]
    values = (
        case.name, case.fault, claim.mechanism, result.canary, result.method, result.runs, claim.dimension,
        f"{claim.sample_rate:.4g}", claim.steps, f"{claim.noise_multiplier:.5g}", f"{result.delta:g}",
        f"{result.claimed_epsilon:.4f}", f"{result.epsilon:.4f}", result.confidence, evidence, result.violated,
        f"{result.seconds:.1f}",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def draw_summary(table: Path, path: Path) -> None:
    """Claims and lower bounds of all rows of ``table``."""
    from matplotlib.figure import Figure

    rows = list(csv.DictReader(table.open(newline="")))[::-1]
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    colours = ["#d62728" if row["violated"] == "True" else "#2ca02c" for row in rows]
    axes.barh(places, [float(row["lower_bound"]) for row in rows], color=colours, height=0.6)
    axes.scatter(
        [float(row["claimed"]) for row in rows], places, marker="|", s=180, color="black", zorder=3, label="claim"
    )
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.set_xlabel("epsilon: audited lower bound (green: at or below the claim, red: above it)")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def markdown(table: Path) -> str:
    """The rows of ``table`` as docs/audit.md shows them."""
    names = ("name", "mechanism", "canary", "n", "q", "steps", "noise_multiplier", "delta", "claimed", "lower_bound")
    heads = ("audit", "mechanism", "canary", "n", "q", "steps", "m", "delta", "claim", "lower bound", "refuted")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for line in csv.DictReader(table.open(newline="")):
        cells = [line[name] for name in names] + ["**yes**" if line["violated"] == "True" else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="audits whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("audit_results"), help="folder of results and pictures")
    parser.add_argument("--runs", type=int, default=1000, help="runs of each many-runs audit (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only print the results that are there, as Markdown")
    options = parser.parse_args()
    if options.table:
        print(markdown(options.out / "results.csv"))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Lightning looks through all installed packages for plugins at every Trainer: a fifth of a short run
    registry.entry_points = lru_cache(registry.entry_points)
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / "results.csv"
    done = {line["name"] for line in csv.DictReader(table.open(newline=""))} if table.exists() else set()
    for case in cases():
        if case.name in done or not any(part in case.name for part in options.only):
            continue
        told = {**case.options, "seed": options.seed}
        if told.get("method") == "many_runs":
            told["runs"] = options.runs
        started = time.process_time()
        with progress_bar(case.name) as progress, case.planted():
            result = audit(case.training(), progress=progress, **told)
        np.savez_compressed(options.out / f"{case.name}.npz", scores=result.scores, included=result.included)
        plot(result, options.out / f"audit-{case.name}.png")
        with table.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row(case, result))
        draw_summary(table, options.out / "audit-summary.png")
        print(f"--- {case.name}\n{result}\nCPU time             {time.process_time() - started:.1f} s\n", flush=True)


if __name__ == "__main__":
    main()
