"""A write-ahead record of releases, so that a killed run never under-counts.

A checkpoint holds the ledger as it was when it was written. Releases made after it, by a process that then dies, are
in no checkpoint, but they did happen: logs, event files or another checkpoint may carry what they revealed. So every
release first adds one character to a file; a resumed run charges what is there beyond its checkpoint (see
:mod:`~lightning_lap2.callback.ledger.branches`).

Each run (one fit of one process) writes a file of its own, ``privacy_journal_<run>.txt``, so that any number of runs
may share a folder. A JSON line opens a segment of releases that share their parameters, then one ``.`` per release is
appended unbuffered before the noise is drawn. A run that goes on from another one leaves a line in the other's file
that says where its own lies, and from which release it went on::

    {"run": "5f1c...", "start": 0, "charge": {"noise_multiplier": 1.2, "sample_rate": 0.0043, ...}}
    ..........
    {"run": "5f1c...", "closed": true}
    {"run": "5f1c...", "child": "90ab...", "at": 10, "path": "/logs/version_1/privacy_journal_90ab....txt", ...}

A run that ended in order closes its journal. Checkpoints of versions before this one name a file
``privacy_journal.txt``, in which several runs may have their segments; it is read the same way.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_lap2.accounting import Release

FILE_NAME = "privacy_journal_{}.txt"
PATTERN = FILE_NAME.format("*")

_SYNC_SHARE = 0.01
"""At most this part of the time is spent on forcing notes to the disk, where they outlive a power failure."""
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What a file system answers that cannot force anything: the note is then with the operating system alone."""


@dataclass(frozen=True)
class Charge:
    """One release; ``accounted``: it is paid for by itself, and not by an earlier one of the same pass."""

    release: Release
    accounted: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As a journal holds it."""
        return {**self.release.to_dict(), "accounted": self.accounted}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Charge:
        """
        Raises:
            TypeError, ValueError: it is no charge.
        """
        release = {name: value for name, value in found.items() if name != "accounted"}
        return cls(Release.from_dict(release), bool(found.get("accounted", True)))


@dataclass(frozen=True)
class Origin:
    """A run's journal as its checkpoints name it; ``noted``: it held a release when the checkpoint was saved."""

    path: Path
    run: str
    noted: bool


@dataclass(frozen=True)
class Child:
    """A run that went on from release number ``at`` of another, and where its journal may lie."""

    run: str
    at: int
    paths: tuple[Path, ...]


@dataclass
class Notes:
    """What a journal holds of one run: the charge of each release by its number, and the runs that went on from it."""

    charges: dict[int, Charge] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)
    closed: bool = False
    seen: bool = False


class Journal:
    """Appends to one run's file; rank 0 only.

    Args:
        folder: of the file; both are made with the first release.
        parent: the run that this one goes on from, whose file is told of this one.
        at: releases of the ledger where it goes on.

    Attributes:
        run: identity of the run, in its file's name and in its checkpoints.
        noted: the file holds a release of this run.
    """

    def __init__(self, folder: Path, parent: Origin | None = None, at: int = 0) -> None:
        self.run = uuid.uuid4().hex[:16]
        self.path = folder / FILE_NAME.format(self.run)
        self.noted = False
        self._parent, self._at = parent, at
        self._descriptor: int | None = None
        self._charge: Charge | None = None
        self._sync_next = 0.0

    @property
    def origin(self) -> Origin:
        """What a checkpoint keeps of it."""
        return Origin(self.path.resolve(), self.run, self.noted)

    def record(self, number: int, charge: Charge) -> None:
        """Notes that release number ``number`` (from 0) is about to happen, with what it is charged as.

        Raises:
            OSError: the note could not be written; the release must then not happen.
        """
        path = self.path
        try:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = _opened(self.path)
                if self._parent is not None:
                    path = self._parent.path
                    self._tell(self._parent)
                    self._parent, path = None, self.path
            if charge != self._charge:
                self._line({"run": self.run, "start": number, "charge": charge.to_dict()})
                self._charge = charge
            _append(self._descriptor, b".")
            self._force_now_and_then()
        except OSError as error:
            raise OSError(
                error.errno,
                f"release {number + 1} was not made, since the privacy journal {path} cannot be written "
                f"({error.strerror}); make room and resume from the last checkpoint",
            ) from error
        self.noted = True

    def close(self, *, completed: bool) -> None:
        """Ends the file; ``completed`` marks an orderly end, after which nothing is owed to a resumed run."""
        if self._descriptor is None:
            return
        try:
            if completed:
                self._line({"run": self.run, "closed": True})
            _force(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = None
            self._charge = None

    def _tell(self, parent: Origin) -> None:
        """A line in the parent's file, before the first release of this run."""
        here = self.path.resolve()
        child = {"run": parent.run, "child": self.run, "at": self._at, "path": str(here)}
        descriptor = _opened(parent.path)
        try:
            # found by the one if both folders are moved together, by the other if not
            relative = _relative(here, parent.path.resolve().parent)
            _append(descriptor, _line({**child, "relative": relative}))
            _force(descriptor)
        finally:
            os.close(descriptor)

    def _line(self, content: dict[str, Any]) -> None:
        assert self._descriptor is not None
        _append(self._descriptor, _line(content))

    def _force_now_and_then(self) -> None:
        """Hands notes to the disk itself, as often as the disk is quick: at most ``_SYNC_SHARE`` of the time."""
        assert self._descriptor is not None
        started = time.monotonic()
        if started >= self._sync_next:
            _force(self._descriptor)
            ended = time.monotonic()
            self._sync_next = ended + (ended - started) / _SYNC_SHARE


def _force(descriptor: int) -> None:
    try:
        getattr(os, "fdatasync", os.fsync)(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _line(content: dict[str, Any]) -> bytes:
    return b"\n" + json.dumps(content).encode() + b"\n"


def _append(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    if written != len(data):
        # a disk that fills up takes part of a line, which would make the file unreadable once more is appended
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _relative(path: Path, folder: Path) -> str | None:
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # another drive
        return None


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """``path``, or ``None`` for a URL of another file system (``s3://...``), to which nothing can be appended."""
    return None if "://" in str(path) else Path(path)


def read(path: Path, run: str) -> Notes:
    """What the file holds of run ``run``; nothing where there is no file.

    Raises:
        ValueError: the file is damaged; nothing can be said about the releases.
    """
    notes = Notes()
    if not path.is_file():
        return notes
    for header, count in _segments(path):
        if header["run"] != run:
            continue
        notes.seen = True
        if "child" in header:
            places = [path.resolve().parent / header["relative"]] if header.get("relative") else []
            notes.children.append(Child(header["child"], header["at"], (*places, Path(header["path"]))))
            continue
        notes.closed = "closed" in header
        if not notes.closed:
            try:
                charge = Charge.from_dict(header["charge"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"a charge of run {run} in {path} is damaged: {error}") from error
            notes.charges.update({header["start"] + i: charge for i in range(count)})
    return notes


_KINDS: tuple[dict[str, type], ...] = (
    {"start": int, "charge": dict},
    {"closed": bool},
    {"child": str, "at": int, "path": str},
)


def _segments(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(header, number of releases under it), in file order. A header cut short by a kill had no release yet; a line
    about a child, which another process may write at any moment, does not end a segment."""
    header: dict[str, Any] | None = None
    count = 0
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        if set(line) == {"."} and header is not None:
            count += len(line)
            continue
        try:
            found = json.loads(line)
            if not isinstance(found["run"], str) or not any(
                all(isinstance(found.get(key), kind) for key, kind in keys.items()) for keys in _KINDS
            ):
                raise ValueError("neither charge, child nor end of a run")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"line {number + 1} of {path} is damaged: {error}") from error
        if "child" in found:
            yield found, 0
            continue
        if header is not None:
            yield header, count
        header, count = found, 0
    if header is not None:
        yield header, count
