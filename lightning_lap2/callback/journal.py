"""A write-ahead record of releases, so that a killed run never under-counts.

A checkpoint holds the ledger as it was when it was written. Releases made after it, by a process that then dies, are
in no checkpoint, but they did happen: logs, event files or another checkpoint may carry what they revealed. So every
release first adds one character to this file; a resumed run charges what the file has beyond its checkpoint.

Format: a JSON line opens a segment of releases that share their parameters, then one ``.`` per release, appended
unbuffered before the noise is drawn::

    {"run": "5f1c...", "start": 0, "charge": {"noise_multiplier": 1.2, "sample_rate": 0.0043, "dimension": 26010}}
    ..........
    {"run": "5f1c...", "closed": true}

A run that ended in order closes its segment. Resuming from an *earlier* checkpoint of a closed run is a fork made on
purpose: it is another model with a ledger of its own, and starts a file of its own. (Publishing both models costs the
sum of both; see docs/pitfalls.md.)
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "privacy_journal.txt"
Charge = Mapping[str, Any]


class Journal:
    """Appends to one file; rank 0 only.

    Args:
        path: the file, created with its folder if need be.
        run: identity of the run, kept in its checkpoints.

    Attributes:
        noted: the file holds a release of this run.
    """

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.path = path
        self.run = run or uuid.uuid4().hex
        self.noted = False
        self._descriptor: int | None = None
        self._charge: Charge | None = None

    def record(self, release: int, charge: Charge) -> None:
        """Notes that release number ``release`` (from 0) is about to happen, with its accounting parameters.

        Raises:
            OSError: the note could not be written; the release must then not happen.
        """
        try:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if charge != self._charge:
                self._line({"run": self.run, "start": release, "charge": dict(charge)})
                self._charge = dict(charge)
            self._append(b".")
        except OSError as error:
            raise OSError(
                error.errno,
                f"release {release + 1} was not made, since the privacy journal {self.path} cannot be written "
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
        finally:
            os.close(self._descriptor)
            self._descriptor = None
            self._charge = None

    def _line(self, content: dict[str, Any]) -> None:
        self._append(b"\n" + json.dumps(content).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        written = os.write(self._descriptor, data)
        if written != len(data):
            # a disk that fills up takes part of a line, which would make the file unreadable once more is appended
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """``path``, or ``None`` for a URL of another file system (``s3://...``), to which nothing can be appended."""
    return None if "://" in str(path) else Path(path)


def releases_beyond(path: Path, run: str, known: int, *, noted: bool = True) -> list[Charge]:
    """Charges of the releases numbered ``known`` and up that run ``run`` made, in order.

    Empty when the run was closed in order, when the file is gone, or when there are none.

    Args:
        noted: the run is known to have noted releases, so that a file without any is not its own.

    Raises:
        ValueError: the file is not a journal of this run or is damaged; nothing can be said about the releases.
    """
    if not path.is_file():
        return []
    charges: dict[int, Charge] = {}
    seen = closed = False
    for header, count in _segments(path):
        if header["run"] != run:
            continue
        seen = True
        closed = bool(header.get("closed", False))
        if not closed:
            start = header["start"]
            charges.update({start + i: header["charge"] for i in range(count)})
    if noted and not seen:
        raise ValueError(f"{path} holds no releases of the run {run} that this checkpoint belongs to")
    return [] if closed else [charges[i] for i in sorted(charges) if i >= known]


def has_run(path: Path, run: str) -> bool:
    """Whether the file is there and holds notes of run ``run``.

    Raises:
        ValueError: the file is damaged.
    """
    return path.is_file() and any(header["run"] == run for header, _ in _segments(path))


def is_open(path: Path, run: str) -> bool:
    """Whether run ``run`` has noted releases in the file and did not end in order.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return False
    headers = [header for header, _ in _segments(path) if header["run"] == run]
    return bool(headers) and not headers[-1].get("closed", False)


def _segments(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(header, number of releases under it), in file order. A header cut short by a kill had no release yet."""
    header: dict[str, Any] | None = None
    count = 0
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        if set(line) == {"."} and header is not None:
            count += len(line)
            continue
        if header is not None:
            yield header, count
        count = 0
        try:
            header = json.loads(line)
            if "closed" not in header and not {"start", "charge"} <= header.keys():
                raise KeyError("start, charge")
            header["run"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) - 1:
                return
            raise ValueError(f"line {number + 1} of {path} is damaged: {error}") from error
    if header is not None:
        yield header, count
