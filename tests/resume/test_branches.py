"""Whose releases are whose, however many runs share a folder, and what the report says of the others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.callback.ledger import ledger as ledger_module
from lightning_lap2.callback.ledger.journal import PATTERN
from lightning_lap2.callback.ledger.ledger import checksum
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, NAMESPACES, Namespace, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
GIVEN: dict[str, Any] = {"eps": 50.0, "noise_multiplier": 1.5, "bound": "joint"}


class Interrupt(Exception):
    """Ends a run as a kill would: nothing is closed in order."""


def run(
    directory: Path,
    *,
    until: int | None = None,
    path: Path | None = None,
    prefix: str = "",
    epochs: int = 2,
    **arguments: Any,
) -> Any:
    """8 releases an epoch, a checkpoint at every fifth; killed after step ``until`` if that is given."""

    class Interrupting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == until:
                raise Interrupt

    callback = Lap2Privacy(**{**GIVEN, **arguments})
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=5, save_top_k=-1, filename=prefix + "{step}"
    )
    trainer = quiet_trainer(pl, callback, checkpoint, Interrupting(), max_epochs=epochs)
    try:
        trainer.fit(classifier(pl), loader(16, 2), ckpt_path=path)
    except Interrupt:
        assert until is not None
    return callback


def caveats(callback: Any, text: str) -> list[str]:
    return [caveat for caveat in callback.report().caveats if text in caveat]


def others(callback: Any) -> int:
    """Later releases that the report names."""
    found = caveats(callback, "later releases of this run exist")
    return int(found[0].split()[0]) if found else 0


# -- several runs in one folder ---------------------------------------------------------------------------------------


def test_runs_in_one_folder_are_charged_what_they_released_themselves(tmp_path: Path) -> None:
    """Each of three is killed at another step and resumed, in turns."""
    for number, prefix in enumerate("abc"):
        run(tmp_path, until=6 + 2 * number, prefix=prefix)
    for number, prefix in enumerate("abc"):
        callback = run(tmp_path, until=9, path=tmp_path / f"{prefix}step=5.ckpt", prefix=prefix)
        assert callback.steps == (6 + 2 * number) + 4
    for number, prefix in enumerate("abc"):
        callback = run(tmp_path, path=tmp_path / f"{prefix}step=5.ckpt", prefix=prefix)
        assert callback.steps == (6 + 2 * number) + 4 + 11
        assert others(callback) == 0
    assert len(list(tmp_path.glob(PATTERN))) == 9


def test_sibling_that_ended_in_order_hides_nothing(tmp_path: Path) -> None:
    run(tmp_path, until=8)
    closed = run(tmp_path, path=tmp_path / "step=5.ckpt")
    assert (closed.steps, others(closed)) == (8 + 11, 0)
    again = run(tmp_path, path=tmp_path / "step=5.ckpt")
    assert again.steps == 8 + 11, "what was released before the kill is charged to both"
    assert others(again) == 11, "what the sibling released is named"


def test_fork_of_a_run_that_ended_in_order_names_its_later_releases(tmp_path: Path) -> None:
    assert others(run(tmp_path)) == 0
    fork = run(tmp_path, path=tmp_path / "step=10.ckpt")
    assert (fork.steps, others(fork)) == (16, 6)
    content = json.loads((tmp_path / "privacy_report.json").read_text())
    assert any("6 later releases of this run exist" in caveat for caveat in content["caveats"])
    further = run(tmp_path, path=tmp_path / "step=15.ckpt", epochs=3)
    assert others(further) == 1 + 6, "one of the first run, six of the fork"
    last = run(tmp_path, path=tmp_path / "step=20.ckpt", epochs=3)
    assert others(last) == 7 + 4, "what was named once stays so, in the run that went on from there"


def test_fork_that_was_killed_before_its_first_checkpoint_is_taken_over(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path / "elsewhere", until=13, path=tmp_path / "step=10.ckpt")
    callback = run(tmp_path / "again", path=tmp_path / "step=10.ckpt")
    assert (callback.steps, others(callback)) == (10 + 3 + 6, 6)


def test_further_fit_of_the_same_objects_is_no_other_branch(tmp_path: Path) -> None:
    callback, module = Lap2Privacy(**GIVEN), classifier(pl)
    for _ in range(3):
        checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1)
        quiet_trainer(pl, callback, checkpoint, max_epochs=1).fit(module, loader(16, 2))
    assert (callback.steps, others(callback)) == (24, 0)
    assert not caveats(callback, "journal")


def test_callback_from_a_pickle_is_charged_what_its_run_released_since(tmp_path: Path) -> None:
    """As from a checkpoint."""
    pickles: list[bytes] = []

    class Pickling(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                pickles.append(pickle.dumps(trainer.callbacks[0]))
            if trainer.global_step == 7:
                raise Interrupt

    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path)
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), Pickling(), checkpoint, max_epochs=1)
    with pytest.raises(Interrupt):
        trainer.fit(classifier(pl), loader(16, 2))
    callback = pickle.loads(pickles[0])
    assert callback.steps == 3
    quiet_trainer(pl, callback, max_epochs=1).fit(classifier(pl), loader(16, 2))
    assert callback.steps == 7 + 8


def test_journal_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on from somebody else's checkpoint."""
    run(tmp_path / "theirs", until=8)
    monkeypatch.setattr(ledger_module.os, "access", lambda *_: False)
    with pytest.warns(UserWarning, match="journal of the run that this one goes on from cannot be written"):
        callback = run(tmp_path / "mine", path=tmp_path / "theirs" / "step=5.ckpt")
    assert callback.steps == 8 + 11
    assert len(caveats(callback, "cannot be written")) == 1
    assert "child" not in next((tmp_path / "theirs").glob(PATTERN)).read_text()


# -- reports ----------------------------------------------------------------------------------------------------------


def test_reports_of_runs_in_one_folder_are_kept(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path, epochs=1)
    for callback in (first, second):
        report = callback.report()
        assert report.run is not None
        assert (tmp_path / f"privacy_journal_{report.run}.txt").exists()
        assert (tmp_path / f"privacy_report_{report.run}.md").read_text() == str(report)
        content = json.loads((tmp_path / f"privacy_report_{report.run}.json").read_text())
        assert content["steps"] == callback.steps and content["run"] == report.run
    latest = json.loads((tmp_path / "privacy_report.json").read_text())
    assert latest["run"] == second.report().run


# -- checkpoints of other classes and versions ------------------------------------------------------------------------


def renamed(path: Path, key: str) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][key] = checkpoint["callbacks"].pop("Lap2Privacy")
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_subclass_has_the_state_key_of_its_base(namespace: str) -> None:
    class Own(Namespace.named(namespace).lap2):  # type: ignore[misc]
        pass

    assert Own(**GIVEN).state_key == Lap2Privacy(**GIVEN).state_key == "Lap2Privacy"


@pytest.mark.parametrize("key", ["Own", "test_subclass.<locals>.Own"])
def test_ledger_saved_under_another_name_is_found(tmp_path: Path, key: str) -> None:
    run(tmp_path, until=8)
    callback = run(tmp_path, path=renamed(tmp_path / "step=5.ckpt", key), assume_nothing_spent=True)
    assert callback.steps == 8 + 11
    assert not caveats(callback, "declared to have spent nothing")


def test_several_ledgers_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    checkpoint = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    states = checkpoint["callbacks"]
    states["One"] = states["Other"] = states.pop("Lap2Privacy")
    torch.save(checkpoint, tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"several privacy ledgers \(One, Other\)"):
        run(tmp_path, path=tmp_path / "two.ckpt")


def test_checkpoint_and_journal_of_an_earlier_version(tmp_path: Path) -> None:
    """Version 2: one ``privacy_journal.txt`` for all runs of a folder."""
    run(tmp_path, until=8)
    (journal,) = tmp_path.glob(PATTERN)
    journal.rename(tmp_path / "privacy_journal.txt")
    checkpoint = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["Lap2Privacy"]
    for name in ("runs", "elsewhere", "changes", "logged", "checksum"):
        del state[name]
    state["version"] = 2
    state["journal"]["path"] = str(tmp_path / "privacy_journal.txt")
    state["checksum"] = checksum(state)
    torch.save(checkpoint, tmp_path / "old.ckpt")
    run(tmp_path, until=7, path=tmp_path / "old.ckpt")
    callback = run(tmp_path, path=tmp_path / "old.ckpt")
    assert callback.steps == 8 + 2 + 11
    assert not caveats(callback, "journal")


# -- arguments that changed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"noise_multiplier": 2.5}, "noise_multiplier 1.5 became 2.5"),
        ({"eps": 60.0}, "eps 50.0 became 60.0"),
        ({"epochs": 3}, "the last step 16 became 24"),
    ],
)
def test_arguments_that_changed_are_in_the_report(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    run(tmp_path)
    callback = run(tmp_path, path=tmp_path / "step=10.ckpt", **arguments)
    (found,) = caveats(callback, "Renyi filter")
    assert f"from release 11 on: {words}" in found
    assert "Feldman and Zrnic" in found


def test_further_fit_is_a_change_and_a_plain_resume_is_none(tmp_path: Path) -> None:
    assert not caveats(run(tmp_path, until=12), "Renyi filter")
    assert not caveats(run(tmp_path, path=tmp_path / "step=10.ckpt"), "Renyi filter")
    module, found = classifier(pl), None
    for _ in range(6):
        found = Lap2Privacy(**GIVEN)
        quiet_trainer(pl, found, max_epochs=1).fit(module, loader(16, 2))
    (text,) = caveats(found, "Renyi filter")
    assert "2 earlier changes; from release 25 on: training began once more" in text
    assert "from release 41 on: training began once more)" in text
