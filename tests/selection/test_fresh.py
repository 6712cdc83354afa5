"""Every run of a search starts from fresh weights, and nothing goes on from the ledger of one run alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_lap2.accounting.selection import RunLimit
from lightning_lap2.callback.ledger.ledger import SEARCH_CAVEAT, Ledger
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.selection.run import make_callback
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer
from tests.selection.test_search import SEED_OF, search

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
CONFIG = [{"lr": 0.1}]
DELTA = 1e-3


def fit(privacy: Any, module: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    """4 releases."""
    options = {"default_root_dir": getattr(privacy, "folder", None), "max_epochs": 1, **options}
    trainer = quiet_trainer(pl, privacy, *callbacks, **options)
    trainer.fit(module, loader(64, 16), ckpt_path=ckpt_path)
    return privacy


def plain(module: Any, privacy: Any = None, **options: Any) -> Any:
    return fit(privacy or Lap2Privacy(eps=50.0, delta=DELTA, noise_multiplier=1.5), module, **options)


def searched(tmp_path: Path, make: Callable[[], Any], runs: int = 1) -> list[Any]:
    """The modules of a search's runs, in this process."""
    made: list[Any] = []

    def train(config: Any, privacy: Any) -> float:
        made.append(make())
        fit(privacy, made[-1])
        return 0.5

    search(tmp_path, seed=SEED_OF[runs]).run(train, CONFIG, progress=False)
    return made


class Parts(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A body that may have been trained before, under a new head."""

    def __init__(self, body: nn.Module, *, late: bool = False) -> None:
        super().__init__()
        self.head, self._late = nn.Linear(2, 2), body
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            self.body = self._late

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_late":  # hidden from nn.Module: not a part before configure_model
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# -- between the runs of a search ---------------------------------------------------------------------------------


def test_a_module_that_an_earlier_run_trained_is_refused(tmp_path: Path) -> None:
    module = classifier(pl)
    with pytest.raises(UnsupportedSettingError, match="a Classifier that was trained privately before.*fresh weights"):
        searched(tmp_path, lambda: module, runs=2)
    assert not list((tmp_path / "search").glob("*/*.ckpt"))  # nothing of the second run remains


@pytest.mark.parametrize("late", [False, True])
def test_so_is_a_part_of_one(tmp_path: Path, late: bool) -> None:
    body = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="a run of a private search starts from fresh weights|fresh weights: build"):
        searched(tmp_path, lambda: Parts(body, late=late), runs=2)


def test_copies_of_an_untrained_module_are_fresh(tmp_path: Path) -> None:
    template = classifier(pl)
    before = copy.deepcopy(template.state_dict())
    assert len(searched(tmp_path, lambda: copy.deepcopy(template), runs=3)) == 3
    assert all(torch.equal(value, before[name]) for name, value in template.state_dict().items())


def test_a_module_that_was_trained_privately_before_is_refused_and_keeps_its_own_ledger(tmp_path: Path) -> None:
    module = classifier(pl)
    first = plain(module)
    with pytest.raises(UnsupportedSettingError, match="trained privately before"):
        searched(tmp_path, lambda: module)
    pickled = pickle.loads(pickle.dumps(module.layer))
    with pytest.raises(UnsupportedSettingError, match="trained privately before"):
        searched(tmp_path / "pickled", lambda: Parts(pickled))
    late = Parts(module.layer, late=True)
    with pytest.raises(ValueError, match="starts from fresh weights, but the module, which was trained"):
        searched(tmp_path / "late", lambda: late)
    again = plain(module)
    assert again.steps == first.steps == 8
    assert SEARCH_CAVEAT not in again.report().caveats
    # the remedy that the message names
    new = classifier(pl)
    new.load_state_dict(module.state_dict())
    assert searched(tmp_path / "remedy", lambda: new) == [new]


def test_a_run_takes_up_no_checkpoint(tmp_path: Path) -> None:
    plain(classifier(pl), enable_checkpointing=True, default_root_dir=tmp_path / "before")
    (checkpoint,) = (tmp_path / "before").rglob("*.ckpt")

    def train(config: Any, privacy: Any) -> float:
        fit(privacy, classifier(pl), ckpt_path=checkpoint, max_epochs=3)
        return 0.5

    with pytest.raises(ValueError, match="starts from fresh weights, but the checkpoint has a ledger"):
        search(tmp_path, seed=SEED_OF[1]).run(train, CONFIG, progress=False)


def test_a_run_stays_marked_whatever_it_is_given(tmp_path: Path) -> None:
    """A ledger without any release would otherwise take the mark off."""
    privacy = make_callback(Lap2Privacy, tmp_path, RunLimit(((1.0, DELTA),)), eps=1.0, delta=DELTA)
    with pytest.raises(ValueError, match="fresh weights"):
        privacy.load_state_dict(Lap2Privacy(eps=1.0, delta=DELTA).state_dict())
    assert SEARCH_CAVEAT in privacy.report().caveats
    assert SEARCH_CAVEAT in Ledger(privacy.settings).caveats


# -- after a search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [
        lambda module: module,
        copy.deepcopy,
        lambda module: Parts(module.layer),
        lambda module: Parts(copy.deepcopy(module.layer)),
        lambda module: Parts(pickle.loads(pickle.dumps(module.layer))),
    ],
    ids=["module", "copy", "part", "part of a copy", "part from a pickle"],
)
def test_no_plain_callback_goes_on_from_a_runs_module(tmp_path: Path, of: Callable[[Any], Any]) -> None:
    (module,) = searched(tmp_path, lambda: classifier(pl))
    found = of(module)
    new, used = Lap2Privacy(eps=50.0, delta=DELTA), plain(classifier(pl))
    for privacy, steps in ((new, 0), (used, 4), (Lap2Privacy(eps=50.0, delta=1e-4), 0)):
        with pytest.raises(ValueError, match="ledger of the module.* is that of one run of a private search"):
            plain(found, privacy)
        assert privacy.steps == steps
    # the remedy that the message names
    weights = Parts(nn.Linear(3, 2)) if isinstance(found, Parts) else classifier(pl)
    weights.load_state_dict(found.state_dict())
    assert plain(weights).steps == 4


class Fails(pl.Callback):  # type: ignore[name-defined, misc]
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


def test_nor_from_a_run_that_was_cut(tmp_path: Path) -> None:
    """Its journal is open, its checkpoint holds fewer releases, its module is marked."""
    limit = search(tmp_path).limit
    privacy = make_callback(Lap2Privacy, tmp_path / "run", limit, eps=2.0, delta=DELTA)
    module = classifier(pl)
    every = pl.callbacks.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, dirpath=tmp_path / "run")
    with pytest.raises(BaseException):  # noqa: B017 (Lightning turns it into a SystemExit)
        fit(privacy, module, every, Fails(), enable_checkpointing=True)
    assert privacy.steps == 3
    assert list((tmp_path / "run").glob("privacy_journal_*.txt"))
    checkpoint = min((tmp_path / "run").glob("*.ckpt"))
    for arguments in ({}, {"assume_nothing_spent": True}):
        with pytest.raises(ValueError, match="ledger of the checkpoint is that of one run of a private search"):
            plain(classifier(pl), Lap2Privacy(eps=9.0, delta=DELTA, **arguments), ckpt_path=checkpoint, max_epochs=3)
    with pytest.raises(ValueError, match="one run of a private search"):
        plain(module)
    with pytest.raises(UnsupportedSettingError, match="one fit from its beginning"):
        fit(privacy, classifier(pl))
