"""The write-ahead journals: what a killed run released beyond its checkpoint is known, and whose it is."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_lap2.accounting import Release
from lightning_lap2.callback.ledger import journal as journal_module
from lightning_lap2.callback.ledger.branches import Found, search
from lightning_lap2.callback.ledger.journal import Charge, Journal, Origin, read

CHARGE = Charge(Release(1.2, 0.01, 10))
OTHER = Charge(Release(1.2, 0.01, 20))
OLD = {"noise_multiplier": 1.2, "sample_rate": 0.01, "dimension": 10, "accounted": True}


def record(journal: Journal, start: int, charges: list[Charge]) -> Journal:
    for offset, charge in enumerate(charges):
        journal.record(start + offset, charge)
    return journal


def root(folder: Path, releases: int, *, closed: bool = False) -> Journal:
    journal = record(Journal(folder), 0, [CHARGE] * releases)
    journal.close(completed=closed)
    return journal


def child(parent: Journal, at: int, start: int, releases: int, *, closed: bool = False, folder: Path | None = None):
    """A run that went on from release ``at`` of ``parent``, with ``start`` releases once its ledger was settled."""
    journal = Journal(folder or parent.path.parent, parent.origin, at)
    record(journal, start, [OTHER] * releases).close(completed=closed)
    return journal


def beyond(journal: Journal, releases: int, known: dict | None = None, folders: tuple[Path, ...] = ()) -> Found:
    return search(journal.origin, releases, known or {}, folders)


# -- one file ---------------------------------------------------------------------------------------------------------


def test_notes_of_a_file(tmp_path: Path) -> None:
    journal = record(Journal(tmp_path / "deep"), 0, [CHARGE] * 3 + [OTHER] * 2)
    notes = read(journal.path, journal.run)
    assert list(notes.charges.values()) == [CHARGE] * 3 + [OTHER] * 2
    assert list(notes.charges) == [0, 1, 2, 3, 4]
    assert notes.seen and not notes.closed and not notes.children
    assert journal.run in journal.path.name


def test_two_runs_in_one_folder_write_two_files(tmp_path: Path) -> None:
    """Also at the same time, note by note."""
    first, second = Journal(tmp_path), Journal(tmp_path)
    for number in range(4):
        first.record(number, CHARGE)
        second.record(number, OTHER)
    assert list(read(first.path, first.run).charges.values()) == [CHARGE] * 4
    assert list(read(second.path, second.run).charges.values()) == [OTHER] * 4


def test_missing_file_holds_nothing_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert read(tmp_path / "gone.txt", "run") == journal_module.Notes()
    journal = root(tmp_path, 1)
    assert not read(journal.path, "nobody").seen
    journal.path.write_text("garbage\n" + journal.path.read_text())
    with pytest.raises(ValueError, match="line 1 of .* is damaged"):
        read(journal.path, journal.run)


def test_header_cut_short_by_a_kill_had_no_release(tmp_path: Path) -> None:
    journal = record(Journal(tmp_path), 0, [CHARGE] * 2)
    with journal.path.open("a") as file:
        file.write('\n{"run": "' + journal.run)
    assert read(journal.path, journal.run).charges == {0: CHARGE, 1: CHARGE}


def test_line_of_a_child_in_the_midst_of_a_segment_does_not_end_it(tmp_path: Path) -> None:
    journal = record(Journal(tmp_path), 0, [CHARGE] * 2)
    child(journal, 1, 1, 3)
    record(journal, 2, [CHARGE] * 2)
    assert list(read(journal.path, journal.run).charges) == [0, 1, 2, 3]


def test_sigkill_loses_nothing(tmp_path: Path) -> None:
    """The note is in the kernel's hands before the release, so a killed process cannot lose it."""
    program = (
        "import os, signal; from pathlib import Path\n"
        "from lightning_lap2.callback.ledger.journal import Charge, Journal\n"
        f"j = Journal(Path({str(tmp_path)!r}))\n"
        f"for i in range(7): j.record(i, Charge.from_dict({CHARGE.to_dict()!r}))\n"
        "print(j.run, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    run = done.stdout.strip()
    assert len(read(tmp_path / journal_module.FILE_NAME.format(run), run).charges) == 7


def test_journal_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file where the folder should be")
    with pytest.raises(OSError):
        Journal(tmp_path / "folder").record(0, CHARGE)


@pytest.mark.parametrize("milliseconds", [0.1, 20.0])
def test_notes_are_forced_to_the_disk_for_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, milliseconds: float
) -> None:
    """A quick disk gets every note, a slow one as many as fit: a power failure costs at most those since."""
    clock, forced = [0.0], []

    def sync(descriptor: int) -> None:
        clock[0] += milliseconds / 1000
        forced.append(clock[0])

    monkeypatch.setattr(journal_module, "_force", sync)
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: clock[0])
    journal = Journal(tmp_path)
    for number in range(1000):
        journal.record(number, CHARGE)
        clock[0] += 0.015  # a step
    if milliseconds == 0.1:
        assert len(forced) == 1000
    else:
        assert 0.008 < len(forced) * milliseconds / 1000 / clock[0] <= 0.011
        assert max(b - a for a, b in pairwise(forced)) < 2.1


@pytest.mark.parametrize(("number", "fatal"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_disk_that_cannot_force_is_used_all_the_same_and_one_that_fails_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fatal: bool
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    journal = Journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fdatasync", failing)
        patch.setattr(journal_module.os, "fsync", failing)
        with pytest.raises(OSError, match="release 1 was not made") if fatal else nullcontext():
            journal.record(0, CHARGE)
    assert journal.noted is not fatal


# -- whose releases they are ------------------------------------------------------------------------------------------


def test_killed_run_owes_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    journal = root(tmp_path, 5)
    for held in range(6):
        found = beyond(journal, held)
        assert found.owed == [CHARGE] * (5 - held)
        assert found.elsewhere == 0 and not found.lost
        assert found.known[journal.run] == (str(journal.path), 5)


def test_run_that_ended_in_order_owes_nothing_and_its_later_releases_are_elsewhere(tmp_path: Path) -> None:
    found = beyond(root(tmp_path, 5, closed=True), 2)
    assert (found.owed, found.elsewhere) == ([], 3)


def test_run_killed_twice_owes_both_lives(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    second = child(first, 5, 8, 2, folder=tmp_path / "another" / "folder")
    child(second, 8, 10, 4)
    found = beyond(first, 5)
    assert found.owed == [CHARGE] * 3 + [OTHER] * 6
    assert found.elsewhere == 0


def test_run_killed_more_often_than_python_nests_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time after a checkpoint of its own; resumed from the first of them."""
    monkeypatch.setattr(journal_module, "_force", lambda descriptor: None)
    first = last = root(tmp_path, 2)
    lives = sys.getrecursionlimit() + 10
    for number in range(lives):
        last = child(last, 2 + number, 2 + number, 1)
    found = beyond(first, 1)
    assert found.owed == [CHARGE] + [OTHER] * lives
    assert found.known[last.run][1] == 2 + lives


def test_sibling_that_ends_in_order_hides_no_release_of_the_killed_run(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    child(first, 5, 8, 20, closed=True)
    found = beyond(first, 5)
    assert found.owed == [CHARGE] * 3
    assert found.elsewhere == 20


def test_run_that_branched_off_before_the_checkpoint_is_elsewhere(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    early = child(first, 2, 8, 3)
    child(early, 8, 11, 4)
    found = beyond(first, 5)
    assert found.owed == [CHARGE] * 3
    assert found.elsewhere == 7


def test_branches_killed_after_the_end_of_a_run_are_owed_at_its_end_only(tmp_path: Path) -> None:
    """From the last checkpoint a killed continuation is taken over; from an earlier one it is another branch's."""
    first = root(tmp_path, 6, closed=True)
    child(first, 6, 6, 3)
    assert beyond(first, 6).owed == [OTHER] * 3
    assert (beyond(first, 4).owed, beyond(first, 4).elsewhere) == ([], 2 + 3)


def test_branch_from_an_earlier_checkpoint_that_was_killed_is_owed_there(tmp_path: Path) -> None:
    first = root(tmp_path, 6, closed=True)
    child(first, 4, 4, 3)
    found = beyond(first, 4)
    assert (found.owed, found.elsewhere) == ([OTHER] * 3, 2)


def test_releases_that_were_taken_over_are_neither_owed_nor_elsewhere(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    known = beyond(first, 5).known
    second = child(first, 5, 8, 4, closed=True)
    found = beyond(second, 12, known)
    assert (found.owed, found.elsewhere) == ([], 0)
    child(first, 5, 8, 7, closed=True)
    assert beyond(second, 12, known).elsewhere == 7, "a sibling of the run, known by their common parent"


def test_folders_that_were_moved_together(tmp_path: Path) -> None:
    first = root(tmp_path / "logs" / "version_0", 8)
    child(first, 5, 8, 2, folder=tmp_path / "logs" / "version_1")
    (tmp_path / "logs").rename(tmp_path / "moved")
    found = beyond(first, 5, folders=(tmp_path / "moved" / "version_0",))
    assert found.owed == [CHARGE] * 3 + [OTHER] * 2
    assert not found.lost


def test_lost_journals_are_named(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    second = child(first, 5, 8, 2, folder=tmp_path / "other")
    second.path.unlink()
    assert beyond(first, 5).lost, "of a run that went on from there"
    first.path.unlink()
    assert beyond(first, 5).lost
    assert not beyond(Journal(tmp_path), 0).lost, "a run that made no release has none"


def test_run_killed_before_its_first_release_owes_nothing(tmp_path: Path) -> None:
    first = root(tmp_path, 8)
    second = child(first, 5, 8, 1)
    second.path.write_text("")
    found = beyond(first, 5)
    assert found.owed == [CHARGE] * 3
    assert not found.lost


def test_file_of_another_run_in_its_place_is_refused(tmp_path: Path) -> None:
    first, other = root(tmp_path, 2), root(tmp_path, 3)
    first.path.write_text(other.path.read_text())
    with pytest.raises(ValueError, match="holds no releases of the run"):
        beyond(first, 0)


def test_journal_of_an_earlier_version(tmp_path: Path) -> None:
    """One file for all runs of a folder, each segment with its run's name; continued by a run with its own file."""
    path = tmp_path / "privacy_journal.txt"
    lines = [
        {"run": "a", "start": 0, "charge": OLD},
        "....",
        {"run": "b", "start": 0, "charge": {**OLD, "dimension": 20}},
        "...",
    ]
    lines += [{"run": "b", "closed": True}, {"run": "a", "start": 4, "charge": {**OLD, "dimension": 20}}, ".."]
    path.write_text("".join(f"\n{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    assert search(Origin(path, "a", True), 3, {}, ()).owed == [CHARGE] + [OTHER] * 2
    assert search(Origin(path, "b", True), 1, {}, ()).elsewhere == 2
    record(Journal(tmp_path, Origin(path, "a", True), 3), 6, [CHARGE] * 5)
    assert search(Origin(path, "a", True), 3, {}, ()).owed == [CHARGE] + [OTHER] * 2 + [CHARGE] * 5
