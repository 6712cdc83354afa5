"""The privacy report: what is guaranteed, under which assumptions, and what is not."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

NAME = "privacy_report"


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """One fit's (or several fits') privacy statement. ``str()`` gives Markdown, ``to_dict()`` plain values.

    Fields carry the names of the callback's arguments and attributes; ``None`` where no fit has started. ``run`` is in
    the name of the run's journal, ``None`` without one. ``rounding_margin`` is the share of C that gradients are
    clipped below it, for what floating point adds. With ``unit`` ``num_examples`` is U, the number of units, and
    ``num_records`` N. ``clipping_threshold`` and what follows are for adaptive
    clipping: ``max_grad_norm`` is where C started, ``clipping_threshold`` where it is now, and
    ``epsilon_without_count`` what the same releases would have cost without their counts.
    """

    eps: float
    epsilon: float
    delta: float
    mechanism: str
    bound: str
    adjacency: str
    sampling: str
    clipping: str
    max_grad_norm: float
    noise_multiplier: float | None
    scale: float | None
    sample_rate: float | None
    expected_batch_size: int | None
    num_examples: int | None
    dimension: int | None
    steps: int
    planned_steps: float | None
    best_order: float | None
    engine: str
    augmentations: int
    noise_source: str | None
    noise_seed: int | None
    reproducible: bool
    precision: str | None
    world_size: int | None
    caveats: tuple[str, ...]
    versions: dict[str, str]
    rounding_margin: float | None = None
    clipping_threshold: float | None = None
    target_quantile: float | None = None
    clip_learning_rate: float | None = None
    count_noise_scale: float | None = None
    epsilon_without_count: float | None = None
    run: str | None = None
    unit: str | None = None
    records_per_unit: int | None = None
    num_records: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values; infinities as the string ``"inf"``, so that the JSON is standard."""
        content = asdict(self)
        content["caveats"] = list(self.caveats)
        return {
            key: "inf" if isinstance(value, float) and math.isinf(value) else value for key, value in content.items()
        }

    def __str__(self) -> str:
        caveats = "\n".join(f"* {text}" for text in self.caveats)
        rows = "\n".join(
            f"| {key} | {value} |"
            for key, value in self.to_dict().items()
            if key not in ("caveats", "versions") and value is not None
        )
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            "# Privacy report\n\n"
            f"{self._statement()}{self._of_the_threshold()}\n\n"
            f"| | |\n|---|---|\n{rows}\n\n"
            f"## What this does not cover\n\n{caveats}\n\n"
            f"{versions}\n"
        )

    def _statement(self) -> str:
        if math.isinf(self.epsilon):
            return f"**No privacy guarantee**: epsilon is infinite after {self.steps} releases."
        if not self.steps and self.planned_steps is None:
            return (
                "This callback has not trained anything, so it knows of no releases. (A copy of it that trained in "
                "another process has a ledger of its own.)"
            )
        if not self.steps:
            return "Nothing was released: epsilon = 0."
        guarantee = (
            f"({rounded_up(self.epsilon)}, {self.delta:g})-differentially private under {self.adjacency}, of a budget "
            f"of {self.eps:g}"
        )
        if self.bound == "published":
            return f"**Not a valid guarantee.** The printed bound gives: {guarantee}."
        if self.reproducible:
            return f"**Not private: the noise is reproducible.** With secret noise the weights would be {guarantee}."
        return f"The weights after {self.steps} releases are {guarantee}."

    def _of_the_threshold(self) -> str:
        if self.clipping_threshold is None or self.epsilon_without_count is None or math.isinf(self.epsilon):
            return ""
        return (
            f" The clipping threshold went from {self.max_grad_norm:g} to {self.clipping_threshold:.4g}, after the "
            f"{self.target_quantile:g} quantile of gradient norms. It follows from noisy counts that are part of the "
            f"guarantee; without them the same releases would have cost {rounded_up(self.epsilon_without_count)}."
        )


def rounded_up(value: float) -> str:
    """Six digits, never below ``value``: a stated epsilon must not be too small."""
    if math.isinf(value):
        return "inf"
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal(value):g}"


def write_report(report: PrivacyReport, directory: Path, *, warn: Callable[[str], object]) -> None:
    """Writes JSON and Markdown: ``privacy_report.*``, the latest run's in this folder, and with a ``run``
    ``privacy_report_<run>.*``, which no other run overwrites. Each file is whole or not there at all.

    A failure (a full disk) is a warning: training is over, and the report can still be had from ``callback.report()``.
    """
    texts = {".json": json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", ".md": str(report)}
    stems = [NAME] if report.run is None else [NAME, f"{NAME}_{report.run}"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stem in stems:
            for suffix, text in texts.items():
                _replace(directory / f"{stem}{suffix}", text)
    except OSError as error:
        warn(f"the privacy report could not be written to {directory}: {error}")


def _replace(path: Path, text: str) -> None:
    # of this process alone: another run may be writing the same report
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
