"""The write-ahead journal: what a killed run released beyond its checkpoint is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_lap2.callback.journal import Journal, releases_beyond

CHARGE = {"noise_multiplier": 1.2, "sample_rate": 0.01, "dimension": 10, "accounted": True}
OTHER = {**CHARGE, "dimension": 20}


def record(journal: Journal, start: int, charges: list[dict]) -> None:
    for offset, charge in enumerate(charges):
        journal.record(start + offset, charge)


def test_open_run_owes_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "journal.txt")
    record(journal, 0, [CHARGE] * 3 + [OTHER] * 2)
    assert releases_beyond(journal.path, journal.run, 0) == [CHARGE] * 3 + [OTHER] * 2
    assert releases_beyond(journal.path, journal.run, 2) == [CHARGE] + [OTHER] * 2
    assert releases_beyond(journal.path, journal.run, 5) == []


def test_closed_run_owes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.txt")
    record(journal, 0, [CHARGE] * 3)
    journal.close(completed=True)
    assert releases_beyond(journal.path, journal.run, 1) == []


def test_run_that_ended_by_an_exception_owes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.txt")
    record(journal, 0, [CHARGE] * 3)
    journal.close(completed=False)
    assert releases_beyond(journal.path, journal.run, 1) == [CHARGE] * 2


def test_continued_run_owes_both_lives(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal.txt")
    record(first, 0, [CHARGE] * 4)
    first.close(completed=False)
    second = Journal(first.path, first.run)
    record(second, 4, [OTHER] * 2)
    assert releases_beyond(first.path, first.run, 1) == [CHARGE] * 3 + [OTHER] * 2


def test_two_runs_in_one_file_are_kept_apart(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "journal.txt"), Journal(tmp_path / "journal.txt")
    record(first, 0, [CHARGE])
    record(second, 0, [OTHER, OTHER])
    assert releases_beyond(first.path, second.run, 0) == [OTHER, OTHER]
    assert releases_beyond(first.path, first.run, 0) == [CHARGE]


def test_missing_file_owes_nothing_and_foreign_or_damaged_is_refused(tmp_path: Path) -> None:
    assert releases_beyond(tmp_path / "gone.txt", "run", 0) == []
    journal = Journal(tmp_path / "journal.txt")
    record(journal, 0, [CHARGE])
    with pytest.raises(ValueError, match="holds no releases of the run nobody"):
        releases_beyond(journal.path, "nobody", 0)
    text = journal.path.read_text()
    journal.path.write_text("garbage\n" + text)
    with pytest.raises(ValueError, match="line 1 of .* is damaged"):
        releases_beyond(journal.path, journal.run, 0)


def test_header_cut_short_by_a_kill_had_no_release(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.txt")
    record(journal, 0, [CHARGE] * 2)
    with journal.path.open("a") as file:
        file.write('\n{"run": "' + journal.run)
    assert releases_beyond(journal.path, journal.run, 0) == [CHARGE] * 2


def test_sigkill_loses_nothing(tmp_path: Path) -> None:
    """The note is in the kernel's hands before the release, so a killed process cannot lose it."""
    program = (
        "import os, signal; from pathlib import Path; from lightning_lap2.callback.journal import Journal\n"
        f"j = Journal(Path({str(tmp_path / 'journal.txt')!r}), 'run')\n"
        f"for i in range(7): j.record(i, {CHARGE!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(releases_beyond(tmp_path / "journal.txt", "run", 0)) == 7


def test_journal_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file where the folder should be")
    with pytest.raises(OSError):
        Journal(tmp_path / "folder" / "journal.txt").record(0, CHARGE)
