"""Logged values over steps, from TensorBoard's event files or from ``CSVLogger``'s ``metrics.csv``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Series = tuple[tuple[int, float], ...]
"""(step, value), steps ascending."""

CSV_NAME = "metrics.csv"


def read_series(folder: Path, names: Sequence[str]) -> dict[str, Series]:
    """The series of each of ``names`` in ``folder``; empty where neither kind of log has it.

    A step that was logged twice (a resumed run repeats the steps after its checkpoint) keeps its later value.

    Raises:
        OSError: a log cannot be read.
    """
    points = _from_events(folder, names) if any(folder.glob("events.out.tfevents.*")) else {}
    if not any(points.values()) and (folder / CSV_NAME).is_file():
        points = _from_csv(folder / CSV_NAME, names)
    return {name: tuple(sorted(points.get(name, {}).items())) for name in names}


def _from_events(folder: Path, names: Sequence[str]) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0: every point is kept, instead of a sample of 10,000
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    known = events.Tags()["scalars"]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names if name in known}


def _from_csv(path: Path, names: Sequence[str]) -> dict[str, dict[int, float]]:
    points: dict[str, dict[int, float]] = {name: {} for name in names}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name in names:
                if row.get(name) and row.get("step"):  # rows of validation metrics leave it empty
                    points[name][int(row["step"])] = float(row[name])
    return points
