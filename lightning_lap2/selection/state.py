"""What a search keeps on disk, so that it can be killed at any time and never draws twice.

The number of runs and all their configurations are drawn, and written, before the first run. The file tells the number
of runs, which must stay secret, until the search is over; then only the best run is left in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_lap2.accounting.selection import RunLimit
from lightning_lap2.selection.space import Choice

FILE_NAME = "search.json"
LOCK_NAME = ".search.lock"
VERSION = 1


@dataclass
class Best:
    """The best run so far.

    Attributes:
        folder: name of its folder.
        score: as ``train`` returned it.
        choice: its configuration.
        run: its privacy report, as plain values.
    """

    folder: str
    score: float
    choice: Choice
    run: dict[str, Any]


@dataclass
class State:
    """One search.

    Attributes:
        search: its settings, by which a resumed one is recognised.
        limit: what each run keeps.
        pending: configurations still to be run, in order; the first may have been started.
        total: number of runs; 0 once it is over, when nobody needs it any more.
        finished: nothing is left to do.
        best: ``None`` before the first run has ended, or where none was drawn.
        notes: caveats that runs have brought up.
    """

    search: dict[str, Any]
    limit: RunLimit
    pending: list[Choice]
    total: int
    finished: bool = False
    best: Best | None = None
    notes: list[str] = field(default_factory=list)

    def finish(self) -> None:
        self.pending, self.total, self.finished = [], 0, True

    def save(self, folder: Path) -> None:
        """Whole or not at all, and on the disk when it returns."""
        partial = folder / f"{FILE_NAME}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / FILE_NAME)


def load(folder: Path) -> State | None:
    """The state in ``folder``, ``None`` where there is none.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        limit, best = content.pop("limit"), content.pop("best")
        return State(
            limit=RunLimit(*(tuple((float(a), float(b)) for a, b in limit[key]) for key in ("points", "divergences"))),
            best=None if best is None else Best(**best),
            **content,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); a search that starts anew draws anew, so both must be paid for: give "
            "another folder"
        ) from error


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """
    Raises:
        ValueError: the state belongs to a search with other settings, which it names.
    """
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        raise ValueError(
            f"{folder / FILE_NAME} belongs to a search with other settings ({', '.join(differing)}): to go on with it "
            "give those it began with, for a new search give another folder (both are then paid for)"
        )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder: it would make the same runs again, and there would be two results.

    The lock ends with the process, however that ends.

    Raises:
        RuntimeError: another process is there.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (folder / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another process is searching in {folder}: wait for it, or give another folder (both searches are "
                "then paid for)"
            ) from error
        yield
