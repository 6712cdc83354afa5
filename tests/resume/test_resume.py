"""Whatever a run is resumed from, its ledger goes on, and nothing is drawn twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.ledger.journal import PATTERN
from tests.helpers import (
    DELTA,
    LIGHTNING,
    LIGHTNING_WARNINGS,
    NAMESPACES,
    Namespace,
    budget_for,
    classifier,
    loader,
    only_file,
    part_spy,
    quiet_trainer,
    watched_releases,
    weights,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2


# The looser bound: its epsilon costs less time than the default's, and nothing here depends on it.
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint"}


def epsilon_of(*charges: tuple[float, float, int], dimension: int = 8) -> float:
    """Of ``(noise multiplier, sample rate, steps)`` in turn."""
    accountant = MajorizedAccountant(bound="joint", mechanism="laplace")
    for noise_multiplier, sample_rate, steps in charges:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, dimension=dimension, steps=steps)
    return accountant.epsilon(delta=DELTA)


def epsilon(callback: Any) -> float:
    return callback.accountant.epsilon(delta=callback.delta)


class Interrupt(Exception):
    """Ends a run as a kill would: nothing is closed in order."""


def interrupting(after: int) -> Any:
    class Interrupting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == after:
                raise Interrupt

    return Interrupting()


def every_steps(directory: Path, steps: int, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=steps, save_top_k=-1, filename="{step}", **options
    )


@pytest.fixture
def sixteen(tmp_path: Path) -> Path:
    """A checkpoint after 16 steps of 2 epochs (q = 1/8, multiplier 1.5) of a run that ended in order."""
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), max_epochs=2)
    trainer.fit(classifier(pl), loader(16, 2))
    path = tmp_path / "sixteen.ckpt"
    trainer.save_checkpoint(path)
    return path


def resume(path: Path, batch_size: int = 2, *, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    callback = Lap2Privacy(**{**GIVEN, **arguments})
    trainer = quiet_trainer(pl, callback, **{"max_epochs": 4, **(options or {})})
    trainer.fit(classifier(pl), loader(16, batch_size), ckpt_path=path)
    return callback


# -- the ledger goes on -----------------------------------------------------------------------------------------------


def test_same_arguments(sixteen: Path) -> None:
    callback = resume(sixteen)
    assert callback.steps == 32
    assert epsilon(callback) == pytest.approx(epsilon_of((1.5, 1 / 8, 32)), rel=1e-9)


def test_calibrated_noise_is_kept_and_the_budget_met(tmp_path: Path) -> None:
    """A run in two halves spends what it would have spent in one."""
    first = Lap2Privacy(eps=2.0)
    trainer = quiet_trainer(pl, first, every_steps(tmp_path, 7), max_epochs=2)
    trainer.fit(classifier(pl), loader(16, 2))
    second = Lap2Privacy(eps=2.0)
    trainer = quiet_trainer(pl, second, max_epochs=2)
    trainer.fit(classifier(pl), loader(16, 2), ckpt_path=tmp_path / "step=7.ckpt")
    assert second.steps == first.steps == 16
    assert second.noise_multiplier == first.noise_multiplier
    assert epsilon(second) == pytest.approx(epsilon(first), rel=1e-9)
    assert 1.99 < epsilon(second) <= 2.0


@pytest.mark.parametrize(
    ("batch_size", "arguments", "charge"),
    [
        (2, {"max_grad_norm": 3.0}, (1.5, 1 / 8, 16)),
        (2, {"noise_multiplier": 2.5}, (2.5, 1 / 8, 16)),
        (4, {}, (1.5, 1 / 4, 8)),
        (4, {"noise_multiplier": 3.5, "max_grad_norm": 0.1}, (3.5, 1 / 4, 8)),
    ],
)
def test_changed_parameters_charge_each_step_as_it_was_taken(
    sixteen: Path, batch_size: int, arguments: dict[str, Any], charge: tuple[float, float, int]
) -> None:
    callback = resume(sixteen, batch_size, **arguments)
    assert callback.steps == 16 + charge[2]
    assert epsilon(callback) == pytest.approx(epsilon_of((1.5, 1 / 8, 16), charge), rel=1e-9)


def test_larger_budget_is_calibrated_for_what_is_left(sixteen: Path) -> None:
    spent = epsilon_of((1.5, 1 / 8, 16))
    callback = resume(sixteen, eps=spent + 2, noise_multiplier=None)
    assert callback.steps == 32
    assert spent + 1.99 < epsilon(callback) <= spent + 2
    assert epsilon(callback) == pytest.approx(
        epsilon_of((1.5, 1 / 8, 16), (callback.noise_multiplier, 1 / 8, 16)), rel=1e-9
    )


def test_smaller_budget_affords_fewer_steps(sixteen: Path) -> None:
    eps = budget_for(19, noise_multiplier=1.5, sample_rate=1 / 8, dimension=8, bound="joint")
    callback = resume(sixteen, eps=eps, options={"min_epochs": 4})
    assert callback.steps == 19
    assert epsilon(callback) <= eps


@pytest.mark.parametrize("multiplier", [1.5, None])
def test_spent_budget_takes_no_step(sixteen: Path, multiplier: float | None) -> None:
    module = classifier(pl)
    callback = Lap2Privacy(**{**GIVEN, "eps": 0.5, "noise_multiplier": multiplier})
    trainer = quiet_trainer(pl, callback, max_epochs=4)
    with pytest.warns(UserWarning, match="already spent"):
        trainer.fit(module, loader(16, 2), ckpt_path=sixteen)
    assert callback.steps == 16
    assert trainer.global_step == 16
    stored = torch.load(sixteen, weights_only=True)["state_dict"]
    assert all(torch.equal(value, stored[name]) for name, value in module.state_dict().items())
    assert callback.report().epsilon == pytest.approx(epsilon_of((1.5, 1 / 8, 16)), rel=1e-9)


def test_run_without_a_last_step_ends_at_the_budget_after_a_resume(sixteen: Path) -> None:
    eps = budget_for(21, noise_multiplier=1.5, sample_rate=1 / 8, dimension=8, bound="joint")
    callback = resume(sixteen, eps=eps, options={"max_epochs": -1})
    assert callback.steps == 21


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mechanism": "gaussian", "bound": "tight"}, "mechanism='laplace'"),
        ({"bound": "tight"}, "bound='joint'"),
        ({"delta": 1e-6}, "delta=1e-05"),
        ({"sampling": "none"}, "sampling='poisson'"),
    ],
)
def test_what_cannot_be_composed_is_refused_by_name(sixteen: Path, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"pass {name}"):
        resume(sixteen, **arguments)


# -- fit twice, two Trainers ------------------------------------------------------------------------------------------


def test_fit_twice_on_the_same_objects() -> None:
    callback = Lap2Privacy(**GIVEN)
    trainer, module = quiet_trainer(pl, callback, max_epochs=2), classifier(pl)
    trainer.fit(module, loader(16, 2))
    assert callback.steps == 16
    trainer.fit(module, loader(16, 2))
    assert callback.steps == trainer.global_step == 16, "the Trainer had reached its last epoch"
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(16, 2))
    assert callback.steps == trainer.global_step == 24
    assert epsilon(callback) == pytest.approx(epsilon_of((1.5, 1 / 8, 24)), rel=1e-9)


def test_second_trainer_starts_at_zero_and_the_ledger_does_not() -> None:
    eps = budget_for(27, noise_multiplier=1.5, sample_rate=1 / 8, dimension=8, bound="joint")
    callback, module = Lap2Privacy(**{**GIVEN, "eps": eps}), classifier(pl)
    quiet_trainer(pl, callback, max_epochs=2).fit(module, loader(16, 2))
    second = quiet_trainer(pl, callback, max_epochs=2, min_epochs=2)
    second.fit(module, loader(16, 2))
    assert callback.steps == 27
    assert second.global_step == 11
    assert epsilon(callback) <= eps
    third = quiet_trainer(pl, callback, max_epochs=2)
    with pytest.warns(UserWarning, match="already spent"):
        third.fit(module, loader(16, 2))
    assert (callback.steps, third.global_step) == (27, 0)


def test_calibrated_second_fit_takes_no_step() -> None:
    callback, module = Lap2Privacy(eps=1.0), classifier(pl)
    quiet_trainer(pl, callback, max_epochs=1).fit(module, loader(16, 2))
    assert 0.999 < epsilon(callback) <= 1.0
    again = quiet_trainer(pl, callback, max_epochs=50)
    with pytest.warns(UserWarning, match="already spent"):
        again.fit(module, loader(16, 2))
    assert (callback.steps, again.global_step) == (8, 0), "noise for the last 1e-5 of a budget would wreck the model"


# -- windows and plans ------------------------------------------------------------------------------------------------


def run_to_the_end(
    directory: Path, accumulate: int, checkpoint: Any, *, with_validation: bool = False, **options: Any
) -> tuple[int, list[Path]]:
    """Releases of an uninterrupted run of 2 epochs of 8 batches, and the checkpoints it left."""
    callback = Lap2Privacy(eps=4.0)
    trainer = quiet_trainer(
        pl,
        callback,
        checkpoint,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(classifier(pl), loader(32, 4), loader(8, 4) if with_validation else None)
    return callback.steps, sorted(directory.glob("*.ckpt"))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "steps": (lambda path: every_steps(path, 1), {"stride": 3}),
    "epoch end": (lambda path: _epochs(path, save_on_train_epoch_end=True), {}),
    "validation end": (lambda path: _epochs(path), {"with_validation": True}),
    "validation in the middle": (lambda path: _epochs(path), {"with_validation": True, "val_check_interval": 0.5}),
    "validation every second epoch": (
        lambda path: every_steps(path, 5),
        {"with_validation": True, "check_val_every_n_epoch": 2},
    ),
}


def _epochs(directory: Path, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(
        dirpath=directory, save_top_k=-1, filename="{epoch}-{step}", every_n_epochs=1, **options
    )


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_resumed_run_makes_the_releases_an_uninterrupted_one_makes(tmp_path: Path, kind: str, accumulate: int) -> None:
    """From every checkpoint, wherever in an epoch; each with its planned steps, and within the budget."""
    make, options = CHECKPOINTS[kind]
    options = {**options}
    stride = options.pop("stride", 1)
    total, paths = run_to_the_end(tmp_path, accumulate, make(tmp_path), **options)
    assert total == 2 * -(-8 // accumulate)
    assert paths
    validation = loader(8, 4) if options.pop("with_validation", False) else None
    for path in paths[::stride]:
        state = torch.load(path, weights_only=True)
        done = state["global_step"]
        callback = Lap2Privacy(eps=4.0)
        trainer = quiet_trainer(
            pl, callback, max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **options
        )
        trainer.fit(classifier(pl), loader(32, 4), validation, ckpt_path=path)
        assert callback.steps == trainer.global_step == total, path.name
        assert callback.planned_steps == total - done, path.name
        assert epsilon(callback) <= 4.0


@pytest.mark.parametrize("at", [1, 3, 5])
def test_windows_stay_aligned_with_the_trainer_after_a_resume(tmp_path: Path, at: int) -> None:
    """Every release is made of the parts of one draw, also after a resume in the middle of an epoch."""
    run_to_the_end(tmp_path, 3, every_steps(tmp_path, 1))
    callback, spy = Lap2Privacy(eps=4.0), part_spy(pl)
    trainer = quiet_trainer(pl, callback, spy, max_epochs=2, accumulate_grad_batches=3)
    with watched_releases() as seen:
        trainer.fit(classifier(pl), loader(32, 4), ckpt_path=tmp_path / f"step={at}.ckpt")
    assert [release.number for release in seen] == list(range(at, 6))
    windows: dict[int, list[Any]] = {}
    for part in spy.parts:
        windows.setdefault(part.release, []).append(part)
    assert sorted(windows) == list(range(at, 6))
    for number, parts in windows.items():
        assert [part.index for part in parts] == list(range(2 if number % 3 == 2 else 3)), parts
        assert {part.of for part in parts} == {len(parts)}


def test_checkpoint_in_the_middle_of_a_window_loses_its_parts_and_nothing_else(tmp_path: Path) -> None:
    """Saved after batch 4 of 8 with windows of 3: the parts gathered for the second release are gone."""

    class SaveInside(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 0 and batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    run_to_the_end(tmp_path, 3, SaveInside())
    callback, spy = Lap2Privacy(eps=4.0), part_spy(pl)
    trainer = quiet_trainer(pl, callback, spy, max_epochs=2, accumulate_grad_batches=3)
    with watched_releases() as seen:
        trainer.fit(classifier(pl), loader(32, 4), ckpt_path=tmp_path / "inside.ckpt")
    assert callback.steps == 6
    assert [release.number for release in seen] == list(range(1, 6))
    inside = [part for part in spy.parts if part.release == 1]
    assert [(part.index, part.of) for part in inside] in ([(1, 3), (2, 3)], [(0, 2), (1, 2)])
    assert epsilon(callback) <= 4.0


# -- nothing repeats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_seed", [None, 11])
def test_noise_and_draws_never_repeat_across_a_resume(tmp_path: Path, noise_seed: int | None) -> None:
    """Each release's noise and records are its own, also where the run is seeded, reloaded and resumed twice."""
    draws: list[bytes] = []

    class Witness(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            draws.append(batch[0].numpy().tobytes())

    def run(epochs: int, path: Path | None) -> list[bytes]:
        pl.seed_everything(42, verbose=False)
        callback = Lap2Privacy(**GIVEN, noise_seed=noise_seed)
        trainer = quiet_trainer(
            pl, callback, Witness(), every_steps(tmp_path, 3), max_epochs=epochs, reload_dataloaders_every_n_epochs=1
        )
        with watched_releases() as seen:
            trainer.fit(classifier(pl), loader(200, 20, shuffle=True), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return [(20 * release.after - release.before).numpy().tobytes() for release in seen]

    noise = run(2, None) + run(3, tmp_path / "2.ckpt") + run(4, tmp_path / "3.ckpt")
    assert len(set(noise)) == len(noise) == 40
    assert len(set(draws)) == len(draws) == 40
    again = run(4, tmp_path / "3.ckpt")
    shared = len(set(again) & set(noise))
    assert shared == (0 if noise_seed is None else 10), "a seeded fork repeats its noise, any other never does"


def test_seeded_run_in_two_halves_is_the_run_in_one(tmp_path: Path) -> None:
    found = []
    for halves in (False, True):
        module = classifier(pl)
        for epochs in (1, 2) if halves else (2,):
            trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN, noise_seed=3), max_epochs=epochs)
            path = tmp_path / "half.ckpt" if epochs == 2 and halves else None
            trainer.fit(module, loader(64, 8), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        found.append(weights(module))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-7)


# -- runs that did not end in order -----------------------------------------------------------------------------------


def interrupted(directory: Path, after: int, *, every: int = 5, path: Path | None = None, callback: Any = None) -> Any:
    """A run that dies after a global step, with checkpoints every few steps in ``directory``."""
    callback = callback or Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, every_steps(directory, every), interrupting(after), max_epochs=4)
    with pytest.raises(Interrupt):
        trainer.fit(classifier(pl), loader(16, 2), ckpt_path=path)
    return callback


def start_of(path: Path, **arguments: Any) -> int:
    """Releases that a run resumed from ``path`` starts with; it takes no step."""
    callback = Lap2Privacy(**{**GIVEN, **arguments})
    found: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            found.append(callback.steps)
            raise Interrupt

    with pytest.raises(Interrupt):
        quiet_trainer(pl, callback, First(), max_epochs=4).fit(classifier(pl), loader(16, 2), ckpt_path=path)
    return found[0]


def test_releases_after_the_checkpoint_are_charged(tmp_path: Path) -> None:
    interrupted(tmp_path, 13)
    assert start_of(tmp_path / "step=10.ckpt") == 13
    assert start_of(tmp_path / "step=5.ckpt") == 13
    callback = resume(tmp_path / "step=10.ckpt")
    assert callback.steps == 13 + (32 - 10)
    assert epsilon(callback) == pytest.approx(epsilon_of((1.5, 1 / 8, 35)), rel=1e-9)


def test_releases_after_the_checkpoint_count_against_the_budget(tmp_path: Path) -> None:
    interrupted(tmp_path, 13)
    eps = budget_for(20, noise_multiplier=1.5, sample_rate=1 / 8, dimension=8, bound="joint")
    callback = resume(tmp_path / "step=10.ckpt", eps=eps)
    assert callback.steps == 20
    assert epsilon(callback) <= eps


def test_run_killed_twice_between_checkpoints(tmp_path: Path) -> None:
    interrupted(tmp_path, 8)
    interrupted(tmp_path, 7, every=1000, path=tmp_path / "step=5.ckpt")
    assert start_of(tmp_path / "step=5.ckpt") == 10, "5 in the checkpoint, 3 by the first run, 2 by the second"


def test_run_killed_at_its_checkpoint_and_again_before_the_next(tmp_path: Path) -> None:
    """Nothing is owed after the first death, and still the second run's releases are found from the same file."""
    interrupted(tmp_path, 5)
    interrupted(tmp_path, 9, every=1000, path=tmp_path / "step=5.ckpt")
    assert start_of(tmp_path / "step=5.ckpt") == 9


def test_interrupted_fit_continued_in_the_same_process(tmp_path: Path) -> None:
    callback = interrupted(tmp_path, 8)
    assert callback.steps == 8
    interrupted(tmp_path / "other", 4, every=1000, callback=callback)
    assert callback.steps == 12
    assert start_of(tmp_path / "step=5.ckpt") == 12


def test_orderly_end_leaves_nothing_owed(tmp_path: Path) -> None:
    """Going back to an earlier checkpoint of a finished run is a fork made on purpose, with a ledger of its own."""
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), every_steps(tmp_path, 5), max_epochs=2)
    trainer.fit(classifier(pl), loader(16, 2))
    assert start_of(tmp_path / "step=10.ckpt") == 10


def test_journal_of_a_run_without_a_logger_or_checkpoint_callback(tmp_path: Path) -> None:
    """Only the user's own code saves; the journal lies under default_root_dir from then on."""

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "own.ckpt")

    callback = Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, Saving(), interrupting(8), max_epochs=4, default_root_dir=tmp_path / "root")
    with pytest.raises(Interrupt):
        trainer.fit(classifier(pl), loader(16, 2))
    assert start_of(tmp_path / "own.ckpt") == 8


def test_missing_journal_is_named_in_the_report(tmp_path: Path) -> None:
    interrupted(tmp_path, 8)
    only_file(tmp_path, PATTERN).unlink()
    with pytest.warns(UserWarning, match="journal of the run that saved the checkpoint was not found"):
        callback = resume(tmp_path / "step=5.ckpt")
    assert callback.steps == 32
    assert any("journal of the run" in caveat for caveat in callback.report().caveats)


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_journal_of_a_moved_folder_is_found(tmp_path: Path, below: str) -> None:
    """Beside the checkpoint, or above it, as a logger's version folder has it."""
    (tmp_path / "run" / below).mkdir(parents=True)
    interrupted(tmp_path / "run" / below, 8)
    if below:
        journal = only_file(tmp_path, PATTERN)
        journal.rename(tmp_path / "run" / journal.name)
    (tmp_path / "run").rename(tmp_path / "moved")
    checkpoint = tmp_path / "moved" / below / "step=5.ckpt"
    assert start_of(checkpoint) == 8
    interrupted(tmp_path / "new", 7, every=1000, path=checkpoint)
    assert start_of(checkpoint) == 10, "the moved journal knows of the one in the new folder"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["garbage\n....\n", '\n{"run": "another", "start": 0, "charge": {}}\n....\n', ""])
def test_damaged_journal_is_refused(tmp_path: Path, damage: str) -> None:
    interrupted(tmp_path, 8)
    only_file(tmp_path, PATTERN).write_text(damage)
    with pytest.raises(ValueError, match="privacy_journal"):
        resume(tmp_path / "step=5.ckpt")


def test_budget_reached_then_raised_in_the_same_folder(tmp_path: Path) -> None:
    """A fit that takes no step notes nothing; its checkpoint is still good when the budget grows."""
    small = {**GIVEN, "eps": budget_for(16, noise_multiplier=1.5, sample_rate=1 / 8, dimension=8, bound="joint")}
    trainer = quiet_trainer(pl, Lap2Privacy(**small), every_steps(tmp_path, 4), max_epochs=4)
    trainer.fit(classifier(pl), loader(16, 2))
    spent = quiet_trainer(pl, Lap2Privacy(**small), every_steps(tmp_path, 4), max_epochs=4)
    with pytest.warns(UserWarning, match="already spent"):
        spent.fit(classifier(pl), loader(16, 2), ckpt_path=tmp_path / "step=16.ckpt")
    spent.save_checkpoint(tmp_path / "again.ckpt")
    assert resume(tmp_path / "again.ckpt").steps == 32


# -- checkpoints that are not ours, or not whole ----------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint of ordinary training."""
    trainer = quiet_trainer(pl, max_epochs=1)
    trainer.fit(classifier(pl), loader(16, 2))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    return path


def test_checkpoint_without_a_ledger_is_refused(plain: Path) -> None:
    with pytest.raises(ValueError, match="no Lap2Privacy ledger.*assume_nothing_spent=True"):
        resume(plain)


def test_checkpoint_without_a_ledger_declared_free_is_in_the_report(plain: Path) -> None:
    callback = resume(plain, assume_nothing_spent=True)
    assert callback.steps == 24, "the plain run's 8 steps are the Trainer's, not the ledger's"
    assert any("declared to have spent nothing" in caveat for caveat in callback.report().caveats)
    assert "declared to have spent nothing" in str(callback.report())


def test_declaration_stays_in_the_report_of_later_runs(plain: Path, tmp_path: Path) -> None:
    callback = Lap2Privacy(**GIVEN, assume_nothing_spent=True)
    trainer = quiet_trainer(pl, callback, max_epochs=2)
    trainer.fit(classifier(pl), loader(16, 2), ckpt_path=plain)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    later = resume(tmp_path / "later.ckpt")
    assert later.steps == 24
    assert any("declared to have spent nothing" in caveat for caveat in later.report().caveats)


def test_weights_only_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), max_epochs=1)
    trainer.fit(classifier(pl), loader(16, 2))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):  # Lightning's own refusal comes first
        resume(tmp_path / "weights.ckpt")


def _edit(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint["callbacks"]["Lap2Privacy"])
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state.pop("accountant"),
        lambda state: state.pop("releases"),
        lambda state: state.update(releases=-1),
        lambda state: state.update(releases=3),
        lambda state: state.update(releases=float("nan")),
        lambda state: state.update(accountant={}),
        lambda state: state.update(accountant=None),
        lambda state: state.update(version=99),
        lambda state: state.update(delta=2.0),
        lambda state: state.update(journal={"path": 3}),
    ],
)
def test_corrupted_ledger_is_refused(sixteen: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(ValueError, match="ledger in the checkpoint is damaged"):
        resume(_edit(sixteen, edit))


@pytest.mark.parametrize("steps", [-5, 0, 1.5])
def test_corrupted_charges_are_refused(sixteen: Path, steps: float) -> None:
    def edit(state: dict[str, Any]) -> None:
        def change(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: steps if key == "steps" else change(value) for key, value in node.items()}
            return [change(value) for value in node] if isinstance(node, list | tuple) else node

        state["accountant"] = change(state["accountant"])
        assert str(steps) in str(state["accountant"])

    with pytest.raises(ValueError, match="damaged"):
        resume(_edit(sixteen, edit))


def test_refused_checkpoint_changes_nothing(sixteen: Path) -> None:
    callback = Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, max_epochs=4)
    before = callback.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        trainer.fit(classifier(pl), loader(16, 2), ckpt_path=_edit(sixteen, lambda state: state.update(releases=3)))
    assert callback.state_dict() == before
    assert "training_step" not in vars(trainer.strategy), "the patches were not undone"


# -- formats ----------------------------------------------------------------------------------------------------------


def test_checkpoint_loads_as_weights_only(sixteen: Path) -> None:
    state = torch.load(sixteen, weights_only=True)["callbacks"]["Lap2Privacy"]
    assert state["releases"] == 16


@pytest.mark.skipif(
    "weights_only" not in inspect.signature(pl.Trainer.fit).parameters,
    reason="this Lightning has no fit(weights_only=)",
)
def test_resumes_from_weights_only(sixteen: Path) -> None:
    callback = Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, max_epochs=3)
    trainer.fit(classifier(pl), loader(16, 2), ckpt_path=sixteen, weights_only=True)
    assert callback.steps == 24


@pytest.mark.parametrize("origin", NAMESPACES)
def test_checkpoints_are_exchangeable_between_the_namespaces(tmp_path: Path, origin: str) -> None:
    path = tmp_path / "exchanged.ckpt"
    here = Namespace.named(origin)
    there = Namespace.named(next(name for name in NAMESPACES if name != origin))
    trainer = quiet_trainer(here.pl, here.lap2(eps=2.0), max_epochs=1)
    trainer.fit(classifier(here.pl), loader(16, 2))
    trainer.save_checkpoint(path)
    callback = there.lap2(eps=3.0)
    trainer = quiet_trainer(there.pl, callback, max_epochs=2)
    trainer.fit(classifier(there.pl), loader(16, 2), ckpt_path=path)
    assert callback.steps == trainer.global_step == 16
    assert 2.99 < epsilon(callback) <= 3.0
