"""What the paper's experiments share: common flags, and a CSV file in which a run that exists is not run again."""

from __future__ import annotations

import csv
import fcntl
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import lightning
import torch
from jsonargparse import ArgumentParser

from lightning_lap2 import __version__

MechanismName = Literal["laplace", "gaussian", "laplace_l1"]
ClippingName = Literal["flat", "automatic", "per_layer", "adaptive"]
# What calibrated a row, beside the version: how many of the routes of docs/guarantee.md the accountant took the
# smallest of. Rows of an older accounting hold, but the same eps takes less noise now; they are run again.
ACCOUNTING = "four routes"


@dataclass(frozen=True)
class Results:
    """Rows in a CSV file, each identified by the columns of its key.

    Several processes may write to one file: a row is appended under a lock, in one piece.

    Args:
        path: made with its folders where it does not exist.
    """

    path: Path

    def rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether a row agrees with ``key`` in every column of it."""
        return self.find(key) is not None

    def find(self, key: Mapping[str, Any]) -> dict[str, str] | None:
        """The first row that agrees with ``key`` in every column of it."""
        wanted = {name: _text(value) for name, value in key.items()}
        return next((row for row in self.rows() if wanted.items() <= row.items()), None)

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row.

        Raises:
            ValueError: the file has other columns.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path) as file:
            file.seek(0)
            columns = next(csv.reader(file), None)
            if columns is not None and columns != list(row):
                raise ValueError(f"{self.path} has the columns {columns}, the new row {list(row)}; give another --csv")
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if columns is None:
                writer.writeheader()
            writer.writerow({name: _text(value) for name, value in row.items()})


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    with path.open("a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def versions() -> str:
    """What a row was made with."""
    return f"lightning-lap2 {__version__}, torch {torch.__version__}, lightning {lightning.__version__}"


def machine() -> str:
    return f"{torch.get_num_threads()} thread(s), {platform.machine()}"


def parser(description: str, *, eps: Sequence[float], csv_name: str) -> ArgumentParser:
    """The flags that every experiment has."""
    out = ArgumentParser(description=description)
    out.add_argument("--eps", type=float, nargs="+", default=list(eps), help="budgets, a run for each")
    out.add_argument("--delta", type=float, default=1e-5)
    out.add_argument("--mechanism", type=MechanismName, nargs="+", default=["laplace"])
    out.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the weights; the noise ignores them")
    out.add_argument("--csv", type=str, default=csv_name, help="rows are appended; a row that exists is not run again")
    out.add_argument("--progress", type=bool, default=False, help="show Lightning's progress bar")
    return out
