"""Faults of a run's surroundings: a run without a local folder."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lap2.callback.ledger.journal import PATTERN, Journal
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, only_file, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", "noise_seed": 1}


def test_error_while_the_journal_is_closed_does_not_cost_the_report(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch raises one in the main thread, wherever that is, when a DataLoader worker has died."""
    close = Journal.close
    calls: list[int] = []

    def interrupted(journal: Journal, *, completed: bool) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal")
        close(journal, completed=completed)

    monkeypatch.setattr(Journal, "close", interrupted)
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), pl.callbacks.ModelCheckpoint(dirpath=tmp_path), max_epochs=1)
    with pytest.raises(RuntimeError, match="worker"):
        trainer.fit(classifier(pl), loader(32, 4))
    assert (tmp_path / "privacy_report.json").exists()
    assert "training_step" not in vars(trainer.strategy), "the patches were not undone"


def test_run_without_a_local_folder_says_that_it_keeps_no_journal() -> None:
    """Once, by name, and in the report."""

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(f"memory://checkpoints/{trainer.global_step}.ckpt")

    callback = Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, Saving(), max_epochs=1, default_root_dir="memory://root")
    with pytest.warns(UserWarning, match=r"no journal of releases is kept.*default_root_dir='memory://root'") as warned:
        trainer.fit(classifier(pl), loader(32, 4))
    assert sum("no journal of releases" in str(w.message) for w in warned) == 1
    assert sum("no journal of releases" in caveat for caveat in callback.report().caveats) == 1


def test_run_with_a_local_root_folder_keeps_its_journal(tmp_path: Any) -> None:
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(f"memory://checkpoints/{trainer.global_step}.ckpt")

    callback = Lap2Privacy(**GIVEN)
    quiet_trainer(pl, callback, Saving(), max_epochs=1, default_root_dir=tmp_path).fit(classifier(pl), loader(32, 4))
    assert not any("journal" in caveat for caveat in callback.report().caveats)
    assert only_file(tmp_path, PATTERN)
