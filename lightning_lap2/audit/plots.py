"""One picture of an audit: the scores of both worlds with the event that was chosen, and the bound beside the claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_lap2.audit.bounds import GuessesBound, RatesBound
from lightning_lap2.audit.result import AuditResult
from lightning_lap2.figures.draw import check_matplotlib

IN, OUT, CLAIM = "#1f77b4", "#ff7f0e", "#444444"


def plot(result: AuditResult, path: str | Path) -> Path:
    """Writes the picture to ``path``; its suffix (``.png``, ``.svg``, ``.pdf``) is the format.

    Raises:
        MissingMatplotlibError: matplotlib is missing.
        ValueError: a suffix that matplotlib does not write.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    _histogram(left, result)
    _bars(right, result)
    figure.savefig(Path(path), dpi=120)
    return Path(path)


def _histogram(axes: Any, result: AuditResult) -> None:
    bound = result.bound
    if isinstance(bound, RatesBound):
        scores, included = result.scores[:, bound.canary], result.included[:, bound.canary]
    else:
        scores, included = result.scores.ravel(), result.included.ravel()
    finite = np.isfinite(scores)
    bins = np.linspace(*_limits(scores[finite]), 61)
    for world, colour, label in ((included, IN, "canary in"), (~included, OUT, "canary out")):
        axes.hist(scores[world & finite], bins, color=colour, alpha=0.6, label=f"{label} ({int(world.sum())})")
    if isinstance(bound, RatesBound):
        sign = "≥" if bound.direction == "in" else "≤"
        axes.axvline(bound.threshold, color=CLAIM, linestyle="--", label=f"event: score {sign} {bound.threshold:.3g}")
    axes.set_xlabel(
        "loss on the canary, before minus after" if result.canary == "mislabelled" else "log likelihood ratio"
    )
    axes.set_ylabel("canaries" if isinstance(bound, GuessesBound) else "runs")
    axes.set_title(f"{result.method}, {result.canary}", fontsize=10)
    axes.legend(fontsize=8)


def _limits(scores: Any) -> tuple[float, float]:
    if not len(scores):
        return -1.0, 1.0
    low, high = float(scores.min()), float(scores.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _bars(axes: Any, result: AuditResult) -> None:
    claim = result.claimed_epsilon
    colour = "#d62728" if result.violated else "#2ca02c"
    axes.bar(["lower\nbound"], [result.epsilon], color=colour, width=0.5)
    axes.text(0, result.epsilon, f"{result.epsilon:.3g}", ha="center", va="bottom", fontsize=9)
    top = result.epsilon
    if np.isfinite(claim):
        axes.axhline(claim, color=CLAIM, linestyle="--", label=f"claim {claim:.3g}")
        axes.legend(fontsize=8)
        top = max(top, claim)
    axes.set_xlim(-1, 1)
    axes.set_ylim(0, 1.2 * top if top > 0 else 1)
    axes.set_ylabel(f"epsilon at delta = {result.delta:g}")
    axes.set_title("refuted" if result.violated else "not refuted", fontsize=10)
