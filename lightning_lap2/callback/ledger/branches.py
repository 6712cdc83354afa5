"""Which releases a resumed run is charged for, and which belong to other branches: read from the runs' journals.

Runs form a tree: each may go on from a checkpoint of an earlier one. What happened after the checkpoint at hand is of
two kinds.

* A run that was killed (its journal is open) has no later checkpoint whose ledger would hold its last releases. They
  are *owed*: the run that resumes takes them over. The same holds for every killed run that went on from there and
  was killed in turn, however many there were.
* A run that ended in order has checkpoints and a report of its own. Resuming from an earlier checkpoint of it makes
  another branch on purpose, with a ledger of its own. Its later releases are *elsewhere*: not charged here, but
  counted, since whoever sees both branches' results pays for both. So are those of a run that branched off before the
  checkpoint.

A run that is still alive in another process looks like a killed one: it is charged, more than need be and never less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_lap2.callback.ledger.journal import Charge, Child, Origin, read

Known = Mapping[str, tuple[str, int]]
"""Of each run whose releases a ledger holds: where its journal lay, and the number below which they are held."""


@dataclass
class Found:
    """What journals tell of a checkpoint's run, its descendants and its ancestors.

    Attributes:
        owed: charges of the releases to take over, in order of their runs.
        elsewhere: number of releases of other branches.
        known: what the ledger holds once it took them over, see :data:`Known`.
        lost: a journal that must have been there is gone, so something may be missing.
        origin: the checkpoint's journal where it was found.
    """

    owed: list[Charge] = field(default_factory=list)
    elsewhere: int = 0
    known: dict[str, tuple[str, int]] = field(default_factory=dict)
    lost: bool = False
    origin: Origin | None = None


def search(origin: Origin, releases: int, known: Known, folders: Iterable[Path]) -> Found:
    """Reads the journals of the run that saved a checkpoint, and of the runs related to it.

    Args:
        origin: the run's journal as the checkpoint names it.
        releases: what the checkpoint's ledger holds.
        known: the runs before it, as in the checkpoint.
        folders: where journals may lie now, if they were moved.

    Raises:
        ValueError: a journal is damaged, or is not that of its run.
    """
    return _Search(known, tuple(folders)).run(origin, releases)


@dataclass(frozen=True)
class _Step:
    """The releases of ``run`` numbered ``start`` and up; ``owed`` unless the run ended in order."""

    path: Path
    run: str
    start: int
    owed: bool


class _Search:
    def __init__(self, known: Known, folders: tuple[Path, ...]) -> None:
        self._known, self._folders = known, folders
        self._seen: set[str] = set()
        self.found = Found(known=dict(known))

    def run(self, origin: Origin, releases: int) -> Found:
        path = self._locate(origin.run, (origin.path,))
        if path is None:
            self.found.lost = origin.noted and not origin.path.is_file()
            path = self._place_for(origin.path)
        self.found.origin = Origin(path, origin.run, origin.noted)
        self.found.known[origin.run] = (str(path), releases)
        if origin.noted and path.is_file() and not read(path, origin.run).seen:
            raise ValueError(f"{path} holds no releases of the run {origin.run} that this checkpoint belongs to")
        self._walk(_Step(path, origin.run, releases, owed=True))
        for run, (place, held) in self._known.items():
            if run not in self._seen and (ancestor := self._locate(run, (Path(place),))) is not None:
                self._walk(_Step(ancestor, run, held, owed=False))
        return self.found

    def _walk(self, first: _Step) -> None:
        """A run and all that went on from it, in order (there may be more than Python nests calls)."""
        ahead = [first]
        while ahead:
            step = ahead.pop()
            if step.run not in self._seen:
                self._seen.add(step.run)
                ahead += reversed(self._take(step))

    def _take(self, step: _Step) -> list[_Step]:
        """Takes over or counts a run's releases; the runs that went on from it."""
        notes = read(step.path, step.run)
        beyond = [number for number in sorted(notes.charges) if number >= step.start]
        taken = step.owed and not notes.closed
        if taken and beyond:
            self.found.owed += [notes.charges[number] for number in beyond]
            self.found.known[step.run] = (str(step.path), beyond[-1] + 1)
        elif not taken:
            self.found.elsewhere += len(beyond)
        # where a run went on from a release that is held or taken over, its own are due as well
        end = math.inf if taken else step.start
        found = (
            self._next(child, owed=step.owed and step.start <= child.at <= end and child.run not in self._known)
            for child in notes.children
        )
        return [step for step in found if step is not None]

    def _next(self, child: Child, *, owed: bool) -> _Step | None:
        path = self._locate(child.run, child.paths)
        if path is None:
            # an empty file is a run that was killed before its first release
            self.found.lost |= owed and not any(place.is_file() for place in child.paths)
            return None
        return _Step(path, child.run, self._known.get(child.run, ("", 0))[1], owed=owed)

    def _locate(self, run: str, places: tuple[Path, ...]) -> Path | None:
        """The first of these files, wherever it was moved, that holds something of the run."""
        moved = (folder / places[0].name for folder in self._folders)
        return next((place for place in (*places, *moved) if read(place, run).seen), None)

    def _place_for(self, path: Path) -> Path:
        """Where the file of a run without releases may be told of those that go on from it."""
        return next((folder / path.name for folder in (path.parent, *self._folders) if folder.is_dir()), path)
