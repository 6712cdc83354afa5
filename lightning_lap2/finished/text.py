"""A finished run as plain text, for a terminal or a mail."""

from __future__ import annotations

import textwrap

from lightning_lap2.finished.rows import rows
from lightning_lap2.finished.run import FinishedRun, shared

WIDTH = 96


def text(run: FinishedRun) -> str:
    """Statement, caveats, settings and where the curve ends, wrapped at 96 columns."""
    report = run.report
    table = rows(report)
    widest = max(len(what) for what, _ in table)
    return "\n".join(
        [
            "Privacy report",
            "",
            *textwrap.wrap(report.statement().replace("**", ""), WIDTH),
            "",
            "What this does not cover, the gravest first",
            *(line for number, caveat in enumerate(report.caveats, 1) for line in _item(number, caveat)),
            "",
            "The run",
            *(f"  {what.ljust(widest)}  {value}" for what, value in table),
            "",
            *textwrap.wrap(_logged(run), WIDTH),
            *textwrap.wrap(", ".join(f"{name} {version}" for name, version in report.versions.items()), WIDTH),
        ]
    )


def _item(number: int, caveat: str) -> list[str]:
    return textwrap.wrap(caveat, WIDTH, initial_indent=f"{number:2d}. ", subsequent_indent="    ")


def _logged(run: FinishedRun) -> str:
    if not run.epsilon:
        return "No privacy/epsilon was found in a TensorBoard event file or metrics.csv beside the report."
    step, epsilon = run.epsilon[-1]
    return f"privacy/epsilon was logged {len(run.epsilon):,} times, last {epsilon:.6g} at step {step:,}.{shared(run)}"
