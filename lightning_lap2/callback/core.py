"""The hooks. Each says which session method it stands for; decisions are made there.

``Lap2Core`` knows no Lightning class: the two namespaces' ``Callback`` classes are unrelated, so each thin module
combines this mixin with its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback import marks
from lightning_lap2.callback.adaptive import current_threshold
from lightning_lap2.callback.data import DataFacts
from lightning_lap2.callback.hyperparameters import log_hyperparameters
from lightning_lap2.callback.journal import local_path
from lightning_lap2.callback.ledger import Account, Ledger
from lightning_lap2.callback.probe import Probe
from lightning_lap2.callback.reporting import make_report
from lightning_lap2.callback.resume import Resumed, find_ledger
from lightning_lap2.callback.session import FitSession
from lightning_lap2.callback.settings import Settings
from lightning_lap2.callback.stepvalue import StepValue
from lightning_lap2.choices import (
    Bound,
    ClippingName,
    EngineName,
    MechanismName,
    NoiseSourceName,
    OnRecordError,
    Sampling,
)
from lightning_lap2.report import PrivacyReport, write_report

# ``None`` until fit has started.
_NOT_STARTED = "{} is known once fit has started"


class Lap2Core:
    """See :class:`lightning_lap2.Lap2Privacy`."""

    is_lap2_privacy = True
    _pl: ModuleType

    def __init__(
        self,
        eps: float | Literal["inf"],
        delta: float = 1e-5,
        max_grad_norm: float = 1.0,
        noise_multiplier: float | None = None,
        mechanism: MechanismName | str = "laplace",
        bound: Bound = "tight",
        sampling: Sampling = "poisson",
        clipping: ClippingName | str = "flat",
        engine: EngineName = "auto",
        chunk_size: int | None = None,
        augmentations: int = 1,
        noise_source: NoiseSourceName = "auto",
        noise_seed: int | None = None,
        assume_nothing_spent: bool = False,
        allow_feedback: bool = False,
        target_quantile: float | None = None,
        clip_learning_rate: float | None = None,
        count_noise_scale: float | None = None,
        on_record_error: OnRecordError = "raise",
        unit: str | Callable[[Any], Any] | None = None,
        records_per_unit: int | None = None,
        public_state: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.settings = Settings(
            eps=math.inf if isinstance(eps, str) and eps == "inf" else eps,
            delta=delta,
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            mechanism=mechanism,
            bound=bound,
            sampling=sampling,
            clipping=clipping,
            engine=engine,
            chunk_size=chunk_size,
            augmentations=augmentations,
            noise_source=noise_source,
            noise_seed=noise_seed,
            assume_nothing_spent=assume_nothing_spent,
            allow_feedback=allow_feedback,
            target_quantile=target_quantile,
            clip_learning_rate=clip_learning_rate,
            count_noise_scale=count_noise_scale,
            on_record_error=on_record_error,
            unit=unit,
            records_per_unit=records_per_unit,
            public_state=tuple(public_state) if isinstance(public_state, list) else public_state,  # type: ignore[arg-type]
        )
        self._account = Account(Ledger(self.settings))
        self._session: FitSession | None = None
        self._probe: Probe | None = None
        self._logged = StepValue("privacy/epsilon", prog_bar=True)
        self._logged_threshold = StepValue("privacy/max_grad_norm")

    @property
    def state_key(self) -> str:
        """Of the ledger in a checkpoint: one name for subclasses and in both namespaces, so that each finds it."""
        return "Lap2Privacy"

    @property
    def _ledger(self) -> Ledger:
        return self._account.ledger

    @property
    def _facts(self) -> dict[str, Any]:
        return self._account.facts

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a fit that goes on stays with its own callback. A copy in this process shares ledger
        and facts; one from a pickle has them as they were."""
        own = {"_session": None, "_logged": self._logged.fresh(), "_logged_threshold": self._logged_threshold.fresh()}
        # Lightning lends a callback its module's log and log_dict for each fit
        return {name: value for name, value in {**vars(self), **own}.items() if name not in ("log", "log_dict")}

    # -- what can be read -----------------------------------------------------------------------------------------

    @property
    def eps(self) -> float:
        """The budget."""
        return self.settings.eps

    @property
    def delta(self) -> float:
        return self.settings.delta

    @property
    def max_grad_norm(self) -> float:
        """C; with adaptive clipping where it starts."""
        return self.settings.max_grad_norm

    @property
    def clipping_threshold(self) -> float:
        """C of the next release: ``max_grad_norm``, or where adaptive clipping has taken it by now."""
        return current_threshold(self.settings, self._ledger.clipping)

    @property
    def noise_multiplier(self) -> float:
        """scale / C: as given, or as calibrated when fit started."""
        given = self.settings.noise_multiplier
        return float(self._fact("noise_multiplier") if given is None else given)

    @property
    def scale(self) -> float:
        """b of the Laplace (sigma of the Gaussian) noise on the sum of the next release."""
        return self.settings.mechanism_with(self.noise_multiplier, max_grad_norm=self.clipping_threshold).scale

    @property
    def sample_rate(self) -> float:
        """q: 1 under ``sampling="none"``."""
        return float(self._fact("sample_rate"))

    @property
    def expected_batch_size(self) -> int:
        """The public normaliser of the sum."""
        return int(self._fact("expected_batch_size"))

    @property
    def dimension(self) -> int:
        """n: trainable scalars now."""
        session = self._session
        return session.layout.numel if session and session.plan else int(self._fact("dimension"))

    @property
    def planned_steps(self) -> float:
        """Releases this fit planned to make; ``inf`` for a run without a last step or budget."""
        return self._fact("planned_steps")

    @property
    def steps(self) -> int:
        """Releases made so far, over all fits of the weights and resumed checkpoints."""
        return self._ledger.releases

    @property
    def epsilon(self) -> float:
        """Spent so far, at ``delta``.

        During a fit the cheap upper bound that is logged; otherwise the accountant's value.
        """
        session = self._session
        return session.releases.spending.epsilon if session and session.plan else self._ledger.epsilon()

    @property
    def accountant(self) -> MajorizedAccountant:
        return self._ledger.accountant

    def report(self) -> PrivacyReport:
        """What is guaranteed so far, and what is not."""
        return make_report(self.settings, self._ledger, self._facts)

    def _fact(self, name: str) -> Any:
        if name not in self._facts:
            raise RuntimeError(_NOT_STARTED.format(name))
        return self._facts[name]

    def attach(self, probe: Probe | None) -> None:
        """Lets an audit place canaries in the next fits and see their releases; ``None`` takes it off again."""
        self._probe = probe

    # -- start ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._end_session(completed=False)
        session = FitSession(
            self.settings, self._account, trainer, pl_module, self._pl, self._planned, probe=self._probe
        )
        session.begin()
        self._session = session

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        session = self._session
        if session is None:
            return
        session.resumed, session.checkpoint_seen = Resumed.from_checkpoint(checkpoint), True
        state = find_ledger(checkpoint, self.state_key)
        if state is None:
            session.untracked_checkpoint()
        elif not checkpoint["callbacks"].get(self.state_key):
            self.load_state_dict(state)  # kept under another class's name; under ours Lightning loads it

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        session = self._session
        assert session is not None
        # Asked here, on every rank: log_dir is a broadcast, and would hang where only one rank asks.
        session.directory = self._output_directory(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        session = self._session
        assert session is not None
        session.check_before_training()
        session.open_journal()
        marks.put(pl_module, self._ledger)
        self._facts["caveats"], self._facts["engine"] = session.trial.notes, session.engine_name
        values = {
            "privacy/delta": self.delta,
            "privacy/noise_multiplier": self.noise_multiplier,
            "privacy/sample_rate": self.sample_rate,
            "privacy/max_grad_norm": self.max_grad_norm,
        }
        log_hyperparameters(trainer.loggers, values, self._ledger, self._warn)

    def _planned(self, session: FitSession) -> None:
        plan, facts = session.plan, session.facts
        assert plan is not None and facts is not None
        self._account.facts = {
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": facts.sample_rate,
            "expected_batch_size": facts.expected_batch_size,
            "num_examples": facts.num_examples,
            "num_records": facts.num_records,
            "dimension": session.layout.numel,
            "count_noise_scale": session.releases.mechanism.count_noise_scale,
            "rounding_margin": session.releases.mechanism.margin if plan.noise_multiplier else None,
            "planned_steps": session.planned_steps,
            "noise_source": session.releases.noise.name,
            "world_size": session.trainer.world_size,
            "precision": str(session.trainer.precision),
            "fast_dev_run": bool(session.trainer.fast_dev_run),
            "once_per_pass": facts.once_per_pass,
            "caveats": (),
        }
        steps = session.planned_steps
        session.pl.utilities.rank_zero_info(
            f"Lap2Privacy: eps={self.eps:g}, delta={self.delta:g}, {self.settings.mechanism} noise multiplier "
            f"{plan.noise_multiplier:.6g} (scale {self.scale:.6g}, C={self.clipping_threshold:g}"
            + ("" if self.settings.clipping == "flat" else f", {self.settings.clipping} clipping")
            + "), sample rate "
            f"{facts.sample_rate:.6g}, planned steps {'unlimited' if math.isinf(steps) else int(steps)}, "
            f"n={session.layout.numel:,} trainable parameters, engine {self.settings.engine!r}, noise source "
            f"{session.releases.noise.name!r}"
            + (f", {self.settings.augmentations} views per example" if self.settings.augmentations > 1 else "")
            + self._units_in_words(facts)
            + (f", {self.steps} earlier releases" if self.steps else "")
            + (" [fast_dev_run: its step is charged too]" if session.trainer.fast_dev_run else "")
        )
        if session.trainer.gradient_clip_val:
            session.pl.utilities.rank_zero_warn(
                f"Trainer(gradient_clip_val={session.trainer.gradient_clip_val!r}) clips the noised gradient: "
                "harmless to privacy, ruinous for utility; per-example clipping is max_grad_norm"
            )

    def _units_in_words(self, facts: DataFacts) -> str:
        if self.settings.unit is None:
            return ""
        return (
            f", {facts.num_examples:,} units ({self.settings.unit_name}) of {facts.num_records:,} records, "
            f"{self.settings.rows_per_unit} shown of each drawn"
        )

    # -- steps ----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._session is not None
        # of what the module logged in on_train_epoch_end, which runs after this callback's
        self._session.check_feedback()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self._session is not None
        self._session.release()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._session is not None
        if not trainer.barebones:
            self._logged.log(trainer, pl_module, self._session.releases.spending.epsilon)
            if self.settings.clipping == "adaptive":
                # a function of noised counts
                self._logged_threshold.log(trainer, pl_module, self.clipping_threshold)
        self._session.check_feedback()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self._session is not None
        self._session.check_trained()
        self._session.check_feedback()
        self._session.check_weights()
        marks.put(pl_module, self._ledger)

    # -- end, however it comes ------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.check_feedback(refuse=False)
        self._end_session(completed=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end_session(completed=True)
            # here, after other callbacks' on_train_end may have put averaged weights into the module
            marks.seal(pl_module, self._ledger)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            self._end_session(completed=False)
        finally:
            marks.seal(pl_module, self._ledger)

    def _end_session(self, *, completed: bool) -> None:
        """Closes the journal, writes the report and undoes every patch; each even if one before it fails."""
        session, self._session = self._session, None
        if session is None:
            return
        with ExitStack() as last_first:
            last_first.callback(session.end)
            if session.plan is not None:
                self._facts["dimension"] = session.layout.numel
                last_first.callback(_even_if_interrupted, lambda: self._write_report(session))
            last_first.callback(_even_if_interrupted, lambda: self._close_journal(session, completed=completed))

    def _write_report(self, session: FitSession) -> None:
        if session.trainer.is_global_zero and session.directory is not None:
            write_report(self.report(), session.directory, warn=self._warn)

    def _close_journal(self, session: FitSession, *, completed: bool) -> None:
        try:
            self._ledger.close_journal(completed=completed)
        except OSError as error:
            # It then reads like a killed run's: a resumed run charges more than need be, never less.
            session.pl.utilities.rank_zero_warn(
                f"Lap2Privacy: the end of the run could not be noted in its journal ({error}); a run that resumes from "
                "an earlier checkpoint will charge all releases noted there"
            )

    def _output_directory(self, trainer: Any) -> Path | None:
        """Where the report and the journal go: the logger's folder, else the checkpoints', else (or if that is a
        URL) nowhere."""
        if trainer.loggers:
            directory = trainer.log_dir
            return None if directory is None else local_path(directory)
        for callback in trainer.checkpoint_callbacks:
            directory = getattr(callback, "dirpath", None)
            if directory is not None:
                return local_path(directory)
        return None

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._session is not None:
            self._session.before_checkpoint()
        return self._ledger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, ledger = self.steps, Ledger(self.settings)
        ledger.load_state_dict(state_dict)
        self._account.ledger = ledger  # a new one: modules trained with this callback keep what they have spent
        if branch := ledger.branched_off(before):
            self._warn(branch)

    def _warn(self, text: str) -> None:
        self._pl.utilities.rank_zero_warn(f"Lap2Privacy: {text}")


def _even_if_interrupted(act: Callable[[], None]) -> None:
    """Does ``act`` although torch's SIGCHLD handler raises in the midst of it: in the main thread, wherever that is,
    once for a DataLoader worker that died. The error then goes on."""
    try:
        act()
    except RuntimeError:
        act()
        raise
