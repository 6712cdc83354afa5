"""A DataLoader worker that dies: a clear error, and a ledger that holds every release made before it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_lap2.callback import hooks
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, quiet_trainer, records, watched_releases

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", "noise_seed": 1}
N, BATCH = 40, 8


class Mortal(Dataset[Any]):
    """Its worker dies, or raises, once it has given a number of records."""

    def __init__(self, how: str | None, after: int) -> None:
        self.records, self.how, self.left = records(N), how, after

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if get_worker_info() is not None and self.how is not None:
            self.left -= 1
            if self.left < 0 and self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.left < 0:
                raise ArithmeticError("a record that cannot be read")
        return self.records[index]


def run(directory: Path, how: str | None, path: Path | None = None) -> tuple[Any, int]:
    """The callback and the number of releases of a fit."""
    callback = Lap2Privacy(**GIVEN)
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    trainer = quiet_trainer(pl, callback, checkpoint, max_epochs=3)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if how else {}
    data = DataLoader(Mortal(how, 34), BATCH, **workers)  # some way into the first epoch of 5 steps
    with watched_releases() as seen:
        if how is None:
            trainer.fit(classifier(pl), data, ckpt_path=path)
        else:
            # a worker that is killed while it hands over a batch leaves a connection without an end
            errors = (RuntimeError, EOFError, ConnectionError) if how == "killed" else ArithmeticError
            with pytest.raises(errors) as raised:
                trainer.fit(classifier(pl), data, ckpt_path=path)
            words = "DataLoader worker .* exited unexpectedly|killed by signal" if how == "killed" else "cannot be read"
            assert raised.type in (EOFError, ConnectionResetError) or raised.match(words)
    return callback, len(seen)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_worker_that_dies(tmp_path: Path, how: str) -> None:
    callback, released = run(tmp_path, how)
    assert callback.steps == callback.accountant.steps == released
    assert callback.report().steps == released
    assert (tmp_path / "privacy_report.json").exists()
    resumed = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    again, further = run(tmp_path, None, resumed[-1] if resumed else None)
    before = released if resumed else 0
    assert again.steps == before + further
    assert again.accountant.epsilon(delta=again.delta) <= again.eps


def test_the_report_survives_a_late_word_of_the_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's SIGCHLD handler raises wherever the main thread is: here while the report is written."""
    write, calls = hooks.write_report, []

    def interrupted(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        write(*args, **options)

    monkeypatch.setattr(hooks, "write_report", interrupted)
    with pytest.raises(RuntimeError, match="killed by signal"):
        run(tmp_path, None)
    assert len(calls) == 2 and (tmp_path / "privacy_report.json").exists()
