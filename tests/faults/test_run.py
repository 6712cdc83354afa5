"""Faults of a run's surroundings: a run without a local folder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", "noise_seed": 1}


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
    assert (tmp_path / "privacy_journal.txt").exists()
