"""One run of a search: the callback that holds it to its limit, and what is checked when it has ended."""

from __future__ import annotations

import math
from numbers import Real
from pathlib import Path
from typing import Any

from lightning_lap2.accounting.selection import RunLimit
from lightning_lap2.callback.hooks import Lap2Hooks
from lightning_lap2.callback.ledger import module_mark
from lightning_lap2.callback.ledger.journal import local_path
from lightning_lap2.callback.readable import keep_within
from lightning_lap2.callback.session import FitSession
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.report import NAME


class SearchRun(Lap2Hooks):
    """Joined with a namespace's ``Lap2Privacy`` by :func:`make_callback`.

    Attributes:
        folder: where the run may write. It is deleted unless the run is the best.
        notes: what the report of the search must say of it.
    """

    folder: Path
    notes: list[str]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._check_fresh(pl_module)
            if not trainer.fast_dev_run:
                self._check_outputs(trainer)
        super().setup(trainer, pl_module, stage)

    def _check_outputs(self, trainer: Any) -> None:
        """Refuses a Trainer whose logs or checkpoints the search could not delete.

        Raises:
            UnsupportedSettingError: a folder outside the run's own.
        """
        kept: dict[str, Any] = {}
        for logger in trainer.loggers:
            if logger.save_dir is None:
                self.notes.append(
                    f"{type(logger).__name__} has no folder: what it keeps of each run must be deleted by hand."
                )
            else:
                kept[f"{type(logger).__name__} (save_dir)"] = logger.save_dir
        for checkpoint in trainer.checkpoint_callbacks:
            where = getattr(checkpoint, "dirpath", None) or next(
                (logger.save_dir for logger in trainer.loggers if logger.save_dir), trainer.default_root_dir
            )
            kept[f"{type(checkpoint).__name__} (dirpath)"] = where
        for name, where in kept.items():
            path = local_path(where)
            if path is None or not path.resolve().is_relative_to(self.folder.resolve()):
                raise UnsupportedSettingError(
                    f"{name} writes to {where}, where the logs and checkpoints of every run would remain, but a search "
                    "may release those of the best alone: give Trainer(default_root_dir=privacy.folder), and that "
                    "folder to your own loggers and ModelCheckpoint"
                )

    def _planned(self, session: FitSession) -> None:
        super()._planned(session)
        if session.run.fit.ranks.size > 1:
            raise UnsupportedSettingError(
                f"a private search draws in one process, but the Trainer has {session.run.fit.ranks.size}: use "
                "Trainer(devices=1)"
            )
        self._check_fresh(session.run.fit.module)  # once more: configure_model may have added parts

    def _check_fresh(self, module: Any) -> None:
        """Runs must be alike in law, and their ledgers hold one run each.

        Raises:
            UnsupportedSettingError: a second fit, one that goes on from a checkpoint, or a module that an earlier run
                has trained, wholly or in part.
        """
        if self.steps:
            raise UnsupportedSettingError(
                f"the run of a private search is one fit from its beginning, but its ledger holds {self.steps} earlier "
                "releases (a second fit, or a checkpoint): plan one fit, such as one with more epochs"
            )
        if module_mark.spent(module):
            raise UnsupportedSettingError(
                f"train fits a {type(module).__name__} that was trained privately before, wholly or in part (by an "
                "earlier run of the search?), but every run of a private search starts from fresh weights: build the "
                "module and all its parts within train. Weights of an earlier private training go into a new module "
                "by load_state_dict, and its epsilon and delta are then yours to add to those of the search"
            )


def make_callback(base: type[Lap2Hooks], folder: Path, limit: RunLimit, **settings: Any) -> SearchRun:
    """The callback of one run.

    Args:
        base: ``Lap2Privacy`` of either namespace. The run's callback is one of them, by its class and in checkpoints.
        folder: of the run.
        limit: what the run keeps; ``eps`` and ``delta`` among the settings are then only what is logged against.
        settings: arguments of ``base``.
    """
    names = {"__qualname__": base.__qualname__, "__module__": base.__module__, "__doc__": base.__doc__}
    privacy: SearchRun = type(base.__name__, (SearchRun, base), names)(**settings)
    keep_within(privacy, limit)
    privacy.folder, privacy.notes = folder, []
    return privacy


def score_of(privacy: SearchRun, score: Any) -> float:
    """The score of a run that has ended, as a float.

    No message tells a value: an error is seen by whoever is to see the best run alone.

    Raises:
        RuntimeError: the run was not made with its callback, or is not within its limit.
        TypeError, ValueError: the score is not a number, or is NaN.
    """
    if not privacy.steps:
        raise RuntimeError(
            "train returned without a release by the callback it was given, so its run was not private (or made no "
            "step): give the callback to the Trainer, Trainer(callbacks=[privacy], ...), and fit with it"
        )
    limit = privacy.settings.run_limit
    if limit is None or not limit.met_by(privacy.accountant):
        raise RuntimeError(
            "the run's ledger is not that of its plan: it holds more than a run of this search may release; leave the "
            "callback's settings as train gets them"
        )
    if hasattr(score, "item") and getattr(score, "numel", lambda: getattr(score, "size", 0))() == 1:
        score = score.item()  # of a tensor or an array with one element
    if isinstance(score, bool) or not isinstance(score, Real):
        raise TypeError(f"train must return its score as a number, got a {type(score).__name__}")
    number = float(score)
    if math.isnan(number):
        raise ValueError(
            "the score of a run is NaN, which has no rank: let train return float('-inf') (with mode='min' "
            "float('inf')) for a run that failed"
        )
    return number


def drop_report(folder: Path) -> None:
    """Deletes the run's own privacy reports, whose epsilon is that of the run alone: the search has one of its own."""
    for path in [*folder.rglob(f"{NAME}*.json"), *folder.rglob(f"{NAME}*.md")]:
        path.unlink()
