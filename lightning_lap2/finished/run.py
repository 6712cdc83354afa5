"""Reading a run's folder: ``privacy_report.json`` and what the logger wrote beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lightning_lap2.finished.series import Series, read_series
from lightning_lap2.report import NAME, PrivacyReport

JSON_NAME = f"{NAME}.json"
EPSILON, THRESHOLD = "privacy/epsilon", "privacy/max_grad_norm"


@dataclass(frozen=True)
class FinishedRun:
    """What a run's folder tells.

    Attributes:
        source: the report's file.
        report: what it states.
        epsilon: the logged upper bound on epsilon over the logger's steps; empty where no log was found.
        threshold: C over the same steps; empty unless clipping was adaptive.
        runs: how many runs have reports in this folder; their logs cannot be told apart.
    """

    source: Path
    report: PrivacyReport
    epsilon: Series
    threshold: Series
    runs: int


def read_run(path: Path) -> FinishedRun:
    """The run in the folder ``path``, in the only folder below it that holds a report, or of the report ``path``.

    Raises:
        FileNotFoundError: there is no report.
        ValueError: there are several runs, or the report cannot be read.
    """
    source = _find_report(path)
    try:
        report = PrivacyReport.from_dict(json.loads(source.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} is not a privacy report: {error}") from error
    series = read_series(source.parent, (EPSILON, THRESHOLD))
    runs = len(list(source.parent.glob(f"{NAME}_*.json")))
    return FinishedRun(source, report, series[EPSILON], series[THRESHOLD], runs)


def shared(run: FinishedRun) -> str:
    """What to know of the curves where several runs logged into one folder."""
    if run.runs < 2:
        return ""
    return f" {run.runs} runs logged into this folder; where two logged the same step, the later value is shown."


def _find_report(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist: name the folder of a run, or its {JSON_NAME}")
    folders = [path] if _latest(path) else sorted({found.parent for found in path.rglob(_PATTERN)})
    if not folders:
        raise FileNotFoundError(
            f"no {JSON_NAME} in {path}: the callback writes it into the logger's folder when training ends "
            "(lightning_logs/version_N), or into the checkpoints' folder of a run without a logger"
        )
    if len(folders) > 1:
        raise ValueError(f"{path} holds {len(folders)} runs, name one: {', '.join(map(str, folders))}")
    found = _latest(folders[0])
    assert found is not None
    return found


_PATTERN = f"{NAME}*.json"


def _latest(folder: Path) -> Path | None:
    """``privacy_report.json`` is the latest run's; without it the youngest of those named after their runs."""
    if (folder / JSON_NAME).is_file():
        return folder / JSON_NAME
    return max(folder.glob(_PATTERN), key=lambda found: found.stat().st_mtime, default=None)
