"""The data behind figures as a table that any program reads."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from lightning_lap2.figures.model import Figure

COLUMNS = ("figure", "panel", "curve", "mechanism", "bound", "valid", "x", "y")


def write_csv(figures: Iterable[Figure], path: Path) -> None:
    """One row per point with the columns :data:`COLUMNS`, floats in full; infinity is ``inf``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for figure in figures:
            writer.writerows(figure.rows())
