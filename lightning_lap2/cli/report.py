"""``lightning-lap2 report``: the report of a finished run, as one HTML page or as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.cli.options import echo
from lightning_lap2.cli.parsing import Result, Subcommand, plain
from lightning_lap2.finished import FinishedRun, page, read_run, text

PAGE_NAME = "privacy_report.html"


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        type=str,
        help="folder of the run (lightning_logs/version_0), a folder above a single run, or a privacy_report*.json",
    )
    parser.add_argument("--text", action="store_true", help="plain text instead of a page")
    parser.add_argument(
        "--output",
        type=str,
        default=None,
        help=f"file to write (default: {PAGE_NAME} beside the report; with --text or --json: none, it is printed)",
    )


def _run(config: Namespace) -> Result:
    run = read_run(Path(config.run_folder))
    shown = text(run) if config.text else page(run)
    target = _target(config, run)
    if target is None:
        return Result(_data(run, config, None), text(run))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(shown if shown.endswith("\n") else f"{shown}\n", encoding="utf-8")
    return Result(_data(run, config, target), f"wrote {target}")


def _target(config: Namespace, run: FinishedRun) -> Path | None:
    if config.output is not None:
        return Path(config.output)
    return None if config.text or config.json else run.source.with_name(PAGE_NAME)


def _data(run: FinishedRun, config: Namespace, target: Path | None) -> dict[str, Any]:
    return {
        "source": str(run.source),
        "report": run.report.to_dict(),
        "epsilon": [list(point) for point in run.epsilon],
        "max_grad_norm": [list(point) for point in run.threshold],
        "file": None if target is None else str(target),
        **echo(config),
    }


SUBCOMMAND = Subcommand(
    run=plain(_run),
    help="the privacy report of a finished run, as one HTML page or as text.",
    add_arguments=_add_arguments,
    examples=("lightning_logs/version_0",),
    details="""
Reads privacy_report.json, and the curves of privacy/epsilon and (where C adapts) privacy/max_grad_norm from the
TensorBoard event files or the metrics.csv beside it. The page needs nothing but itself: no script, no network.""",
)
