"""A full disk: no release without its note, no ledger that misses one, no fit lost for a report."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.accounting.release import Release
from lightning_lap2.callback.ledger import journal as journal_module
from lightning_lap2.callback.ledger.journal import Charge, Journal, read
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer, watched_releases

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
CHARGE = Charge(Release(1.5, 0.25, 8))
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint"}


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fit(directory: Path, *, path: Path | None = None, every: int = 3, epochs: int = 2) -> tuple[Any, Any, Any]:
    """Callback, module and Trainer; the caller decides what a failure means."""
    callback, module = Lap2Privacy(**GIVEN), classifier(pl)
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=every, save_top_k=-1, filename="{step}"
    )
    trainer = quiet_trainer(pl, callback, checkpoint, max_epochs=epochs)
    return callback, module, lambda: trainer.fit(module, loader(16, 4), ckpt_path=path)


def at_start(path: Path) -> int:
    """Releases in the ledger of a run resumed from ``path``, before its first step."""
    callback = Lap2Privacy(**GIVEN)
    found: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            found.append(callback.steps)
            trainer.should_stop = True

    quiet_trainer(pl, callback, First(), max_epochs=2).fit(classifier(pl), loader(16, 4), ckpt_path=path)
    return found[0]


def test_dev_full() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    journal = Journal(Path("/dev"))
    journal.path = Path("/dev/full")
    with pytest.raises(OSError, match="release 1 was not made.*/dev/full cannot be written") as raised:
        journal.record(0, CHARGE)
    assert raised.value.errno == errno.ENOSPC


def test_journal_that_fills_up_stops_the_release_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, _, run = fit(tmp_path)
    write, written = os.write, []

    def filling(descriptor: int, data: bytes) -> int:
        written.append(data)
        return full() if written.count(b".") > 5 else write(descriptor, data)

    with watched_releases() as seen, monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", filling)
        with pytest.raises(OSError, match="release 6 was not made.*privacy_journal.* cannot be written.*No space left"):
            run()
    assert len(seen) == callback.steps == 5
    assert at_start(tmp_path / "step=3.ckpt") == 5


def test_line_cut_short_by_a_full_disk_leaves_a_readable_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.record(0, CHARGE)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        with pytest.raises(OSError, match="No space left"):
            journal.record(1, Charge(Release(1.5, 0.25, 9)))
    journal.record(1, CHARGE)
    assert read(journal.path, journal.run).charges == {0: CHARGE, 1: CHARGE}


def test_end_of_the_run_that_cannot_be_noted_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, _, run = fit(tmp_path)
    write = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: full() if b"closed" in data else write(fd, data))
    with pytest.warns(UserWarning, match="the end of the run could not be noted in its journal.*No space left"):
        run()
    assert json.loads((tmp_path / "privacy_report.json").read_text())["steps"] == callback.steps == 8
    assert at_start(tmp_path / "step=3.ckpt") == 8, "charged in full, as if it had been killed"


def test_report_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, _, run = fit(tmp_path)
    write_text = Path.write_text

    def partly(self: Path, text: str, **options: Any) -> int:
        if ".partial" not in self.name:
            return write_text(self, text, **options)
        write_text(self, text[:20], **options)
        return full()

    monkeypatch.setattr(Path, "write_text", partly)
    with pytest.warns(UserWarning, match="privacy report could not be written to .*No space left"):
        run()
    assert callback.steps == callback.report().steps == 8
    assert not list(tmp_path.glob("privacy_report*")), "half a report is none"


def test_checkpoint_that_cannot_be_written_loses_no_release(tmp_path: Path) -> None:
    callback, module, _ = fit(tmp_path)
    saved: list[Path] = []

    class Filling(pl.plugins.io.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            if saved:
                Path(path).write_bytes(b"PK")  # what fitted on the disk
                full()
            super().save_checkpoint(checkpoint, path, storage_options)
            saved.append(Path(path))

    trainer = quiet_trainer(
        pl,
        callback,
        pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
        max_epochs=2,
        plugins=[Filling()],
    )
    with watched_releases() as seen, pytest.raises(OSError, match="No space left"):
        trainer.fit(module, loader(16, 4))
    assert saved == [tmp_path / "step=3.ckpt"]
    assert len(seen) == callback.steps == 6
    assert at_start(saved[0]) == 6
    with pytest.raises(Exception, match="zip|archive|corrupt|pickle|EOF|persistent"):
        at_start(tmp_path / "step=6.ckpt")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where that may be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_real_full_disk(small_disk: Path) -> None:
    """Whatever fails first: what was released is in the ledger, in memory and of the run that is resumed."""
    callback, _, run = fit(small_disk, every=1, epochs=40)
    with watched_releases() as seen, pytest.raises((OSError, RuntimeError)), pytest.warns() as warned:
        run()
    assert any("privacy report could not be written" in str(w.message) for w in warned)
    assert 0 < len(seen) <= callback.steps <= len(seen) + 1
    whole = max(
        (path for path in small_disk.glob("*.ckpt") if _loads(path)), key=lambda path: int(path.stem.split("=")[1])
    )
    assert at_start(whole) == callback.steps


def _loads(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True
