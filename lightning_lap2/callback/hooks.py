"""The hooks. Each says which session method it stands for; decisions are made there.

``Lap2Hooks`` knows no Lightning class: the two namespaces' ``Callback`` classes are unrelated, so each thin module
combines this mixin with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_lap2.callback.ledger import module_mark
from lightning_lap2.callback.ledger.journal import local_path
from lightning_lap2.callback.ledger.ledger import Ledger
from lightning_lap2.callback.ledger.resume import find_ledger, keep_journal, open_journal
from lightning_lap2.callback.preparing import Preparing
from lightning_lap2.callback.readable import Readable
from lightning_lap2.callback.reporting import announcement, run_facts
from lightning_lap2.callback.run import Fit
from lightning_lap2.callback.session import FitSession
from lightning_lap2.callback.trainer.hyperparameters import log_hyperparameters
from lightning_lap2.callback.trainer.loaders import check_loaders
from lightning_lap2.callback.trainer.shadows import shadow_data
from lightning_lap2.report import write_report


class Lap2Hooks(Readable):
    """See :class:`lightning_lap2.Lap2Privacy`."""

    _pl: ModuleType

    # -- start ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._end(completed=False)
        fit = Fit(
            settings=self.settings,
            account=self._account,
            trainer=trainer,
            module=pl_module,
            pl=self._pl,
            probe=self._probe,
        )
        preparing = Preparing(fit)
        preparing.check()
        shadow_data(fit.patches, trainer, loader=self._loader_made, ready=self._data_ready)
        self._preparing, self._directory = preparing, None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        if self._preparing is None:
            return
        state = find_ledger(checkpoint, self.state_key)
        self._preparing.checkpoint_loaded(checkpoint, tracked=state is not None)
        if state is not None and not checkpoint["callbacks"].get(self.state_key):
            self.load_state_dict(state)  # kept under another class's name; under ours Lightning loads it

    def _loader_made(self, loader: Any) -> Any:
        """Lightning made a train loader, at first or for another epoch; returns the one to train on."""
        if self._session is not None:
            return self._session.reload(loader)
        return self._started.replace_loader(loader)

    def _data_ready(self) -> None:
        """Lightning set its train data up: once a fit, the plan is made and the steps are taken over."""
        preparing, session = self._started, self._session
        data = preparing.data if session is None else session.data
        check_loaders(preparing.fit.trainer, data.facts.batches_per_epoch)
        if session is None:
            session = FitSession(preparing.run())
            session.begin_audit()
            self._session = session
            self._planned(session)

    def _planned(self, session: FitSession) -> None:
        """The plan stands, and no step was taken yet."""
        self._account.facts = run_facts(session)
        fit = session.run.fit
        fit.say(announcement(session, self._ledger, self.scale, self.clipping_threshold))
        if fit.trainer.gradient_clip_val:
            fit.pl.utilities.rank_zero_warn(
                f"Trainer(gradient_clip_val={fit.trainer.gradient_clip_val!r}) clips the noised gradient: "
                "harmless to privacy, ruinous for utility; per-example clipping is max_grad_norm"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Asked here, on every rank: log_dir is a broadcast, and would hang where only one rank asks.
        self._directory = _output_directory(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        session = self._steps
        session.check_before_training()
        open_journal(session.run.fit, self._directory)
        module_mark.put(pl_module, self._ledger)
        self._note_facts(caveats=session.trial.notes, engine=session.engine_name)
        values = {
            "privacy/delta": self.delta,
            "privacy/noise_multiplier": self.noise_multiplier,
            "privacy/sample_rate": self.sample_rate,
            "privacy/max_grad_norm": self.max_grad_norm,
        }
        log_hyperparameters(trainer.loggers, values, self._ledger, session.run.fit.warn)

    def _note_facts(self, **changes: Any) -> None:
        assert self._account.facts is not None  # since the plan stands
        self._account.facts = replace(self._account.facts, **changes)

    @property
    def _started(self) -> Preparing:
        """The fit that goes on.

        Raises:
            RuntimeError: none does.
        """
        if self._preparing is None:
            raise RuntimeError("no fit goes on; please report this")
        return self._preparing

    @property
    def _steps(self) -> FitSession:
        """The steps of the fit that goes on.

        Raises:
            RuntimeError: its plan was never made, so nothing may be trained.
        """
        if self._session is None:
            raise RuntimeError("training began before the privacy plan was made; please report this")
        return self._session

    # -- steps ----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # of what the module logged in on_train_epoch_end, which runs after this callback's
        self._steps.check_feedback()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._steps.release()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.barebones:
            self._logged.log(trainer, pl_module, self._steps.releases.spending.epsilon)
            if self.settings.clipping == "adaptive":
                # a function of noised counts
                self._logged_threshold.log(trainer, pl_module, self.clipping_threshold)
        self._steps.check_feedback()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.check_trained()
        self._steps.check_feedback()
        self._steps.check_weights()
        module_mark.put(pl_module, self._ledger)

    # -- end, however it comes ------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.check_feedback(refuse=False)
        self._end(completed=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end(completed=True)
            # here, after other callbacks' on_train_end may have put averaged weights into the module
            module_mark.seal(pl_module, self._ledger)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            self._end(completed=False)
        finally:
            module_mark.seal(pl_module, self._ledger)

    def _end(self, *, completed: bool) -> None:
        """Closes the journal, writes the report and undoes every patch; each even if one before it fails."""
        preparing, session = self._preparing, self._session
        self._preparing = self._session = None
        if preparing is None:
            return
        with ExitStack() as last_first:
            last_first.callback(preparing.fit.patches.undo)
            if session is not None:
                last_first.callback(session.note_state)
                last_first.callback(session.settle_weights)
                self._note_facts(dimension=session.layout.numel)
                last_first.callback(_even_if_interrupted, lambda: self._write_report(preparing.fit))
            last_first.callback(_even_if_interrupted, lambda: self._close_journal(completed=completed))

    def _write_report(self, fit: Fit) -> None:
        if fit.trainer.is_global_zero and self._directory is not None:
            write_report(self.report(), self._directory, warn=self._warn)

    def _close_journal(self, *, completed: bool) -> None:
        try:
            self._ledger.close_journal(completed=completed)
        except OSError as error:
            # It then reads like a killed run's: a resumed run charges more than need be, never less.
            self._warn(
                f"the end of the run could not be noted in its journal ({error}); a run that resumes from "
                "an earlier checkpoint will charge all releases noted there"
            )

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._session is not None:
            self._session.note_state()
        if self._preparing is not None:
            keep_journal(self._preparing.fit)
        return self._ledger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, ledger = self.steps, Ledger(self.settings)
        ledger.load_state_dict(state_dict)
        self._account.ledger = ledger  # a new one: modules trained with this callback keep what they have spent
        if branch := ledger.branched_off(before):
            self._warn(branch)

    def _warn(self, text: str) -> None:
        self._pl.utilities.rank_zero_warn(f"Lap2Privacy: {text}")


def _output_directory(trainer: Any) -> Path | None:
    """Where the report and the journal go: the logger's folder, else the checkpoints', else (or if that is a URL)
    nowhere."""
    if trainer.loggers:
        directory = trainer.log_dir
        return None if directory is None else local_path(directory)
    for callback in trainer.checkpoint_callbacks:
        directory = getattr(callback, "dirpath", None)
        if directory is not None:
            return local_path(directory)
    return None


def _even_if_interrupted(act: Callable[[], None]) -> None:
    """Does ``act`` although torch's SIGCHLD handler raises in the midst of it: in the main thread, wherever that is,
    once for a DataLoader worker that died. The error then goes on."""
    try:
        act()
    except RuntimeError:
        act()
        raise
