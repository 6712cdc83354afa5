"""The steps of one fit, from its plan to its last release.

One batch: ``TrainingData`` drew it -> ``Engine.accumulate`` adds its clipped per-example gradients to the ``Window`` of
``Releases`` -> the ledger is charged -> ``release_`` adds noise once and divides by the public expected batch size ->
``.grad`` -> the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.callback import checks
from lightning_lap2.callback.data import Position
from lightning_lap2.callback.feedback import FeedbackWatch
from lightning_lap2.callback.preparing import training_data
from lightning_lap2.callback.probe import Claim
from lightning_lap2.callback.release import replicas
from lightning_lap2.callback.release.releases import Releases
from lightning_lap2.callback.run import Run
from lightning_lap2.callback.trainer.batches import step_arguments
from lightning_lap2.callback.trainer.delivery import Delivery
from lightning_lap2.callback.trainer.limits import DeferredStop, stop
from lightning_lap2.callback.trainer.patches import muted_loggers, withheld_metrics
from lightning_lap2.callback.trainer.shadows import shadow_steps
from lightning_lap2.callback.trainer.user_hooks import HookWatch
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients import ParameterLayout, StepCall, StepRunner
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.step.state import StateMemory
from lightning_lap2.gradients.trial import Trial, identical_views, try_step
from lightning_lap2.sampling import Part

NEVER_RELEASED = (
    "a draw was never released: the optimizer did not step on it (an optimizer_step override that skips steps, or does "
    "not call its closure?). Which draws are released must not depend on what they hold: step on every batch, or use "
    "Trainer(accumulate_grad_batches=...)"
)
# records that are looked at before training
_TRIAL_RECORDS = 8


class FitSession:
    """The steps of one ``trainer.fit``.

    Args:
        run: the fit as it was planned.

    Attributes:
        in_step: the user's ``training_step`` runs, where ranks must not meet.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.data = run, run.data
        fit = run.fit
        self._settings, self._trainer, self._module = fit.settings, fit.trainer, fit.module
        engines = [make_engine(name, fit.module, chunk_size=fit.settings.chunk_size) for name in fit.settings.engines]
        self.runner = StepRunner(fit.module, engines)
        self.releases = Releases(run, fit.ranks)
        self.delivery = Delivery(fit.trainer, fit.module, fit.pl)
        self.trial = Trial()
        self.in_step = False
        self._part: Part | None = None
        self._output: Any = None
        self._failed: Exception | None = None
        self._hooks: HookWatch | None = None
        self._feedback: FeedbackWatch | None = None
        self._stop = DeferredStop(fit.trainer)
        self._lost_warned = False
        self._reach = run.data.reach()
        shadow_steps(fit.patches, fit.trainer, fit.module, self)

    @property
    def engine_name(self) -> str:
        """What has run so far, or would be tried first."""
        return " and ".join(self.runner.used) or self._settings.engines[0]

    @property
    def layout(self) -> ParameterLayout:
        """The parameters that are trained now."""
        return self.releases.window.layout

    def settle_weights(self) -> None:
        """Sharded layers that something outside a step has gathered hold their shards again."""
        self.layout.begin_pass()

    def reload(self, loader: Any) -> Any:
        """The loader that is trained on instead of ``loader``, which Lightning made anew for another epoch.

        Raises:
            UnsupportedSettingError: it holds other data, or as much of it, as the plan was made for.
        """
        data = training_data(self.run.fit, loader)
        if data.facts != self.run.facts:
            raise UnsupportedSettingError(
                "the train data changed between epochs (reload_dataloaders_every_n_epochs): "
                f"{self.run.facts} became {data.facts}; N and the batch size are public constants of a run"
            )
        self.data = data
        self._look_after_data()
        data.start(Position(release=self.run.fit.ledger.releases, batch=0))
        return data.loader

    def begin_audit(self) -> None:
        """Tells an audit what this fit claims of its releases.

        Raises:
            UnsupportedSettingError: several processes, or another clipping than an audit can repeat.
        """
        run, probe = self.run, self.run.fit.probe
        if probe is None:
            return
        if run.fit.ranks.size > 1:
            raise UnsupportedSettingError(
                f"an audit sees one process, but the Trainer has {run.fit.ranks.size}: use Trainer(devices=1)"
            )
        if self._settings.clipping != "flat":
            raise UnsupportedSettingError(
                f"an audit repeats flat clipping by code of its own, but clipping={self._settings.clipping!r}: audit "
                "with clipping='flat'"
            )
        run.fit.ledger.add_caveat("an audit took part in this fit: records were left out or replaced by canaries")
        probe.begin(
            Claim(
                mechanism=self.releases.mechanism,
                sample_rate=run.facts.sample_rate,
                normaliser=run.facts.expected_batch_size,
                steps=run.planned_steps,
                layout=self.layout,
            )
        )

    # -- before training ------------------------------------------------------------------------------------------

    def check_before_training(self) -> None:
        """Everything that needs the optimizers and real records, before any data is spent.

        Raises:
            UnsupportedSettingError, UnsupportedModelError: naming the setting, layer or line.
        """
        self.settle_weights()
        checks.check_optimizers(self._trainer.optimizers, self._module)
        checks.check_parameter_hooks(self._module)
        replicas.equalise(self._module, self._trainer.strategy)
        self._feedback = FeedbackWatch(self._trainer, self.run.fit.ledger, allowed=self._settings.allow_feedback)
        if not self.run.planned_steps:
            return
        lost = checks.not_finite(self._module)
        if not self.layout.everywhere(lost is None):
            lost = lost or "(in another rank's shard)"
            raise UnsupportedSettingError(
                f"the parameter {lost} holds NaN or infinite values before the first step: every gradient would be "
                "dropped and the budget spent on noise; initialise it, or load a sound checkpoint"
            )
        self._watch_state()
        probe = self.run.fit.probe
        if probe is not None and probe.trial is not None:
            self.trial = probe.trial
        else:
            self.trial = self._try_step()
        if probe is not None:
            probe.trial = self.trial
        self._feedback.check(self.trial.logged_names)

    def _watch_state(self) -> None:
        """From here on the module's state is known to be clean, or withheld from the step."""
        fit = self.run.fit
        self.runner.memory = memory = StateMemory(fit.module)
        memory.hold_back_named(fit.ledger.unprotected)
        self._look_after_data()
        self._hooks = HookWatch(
            fit.trainer,
            fit.module,
            fit.pl,
            memory,
            fit.ledger,
            data=lambda: [*self.data.holders(), ("datamodule", getattr(fit.trainer, "datamodule", None))],
            fetches=lambda on_fetch: self._reach.watched(on_fetch),
            public=fit.settings.public_state,
            warn=fit.warn,
            settle=self.settle_weights,
        )
        self._hooks.install(fit.patches)

    def _look_after_data(self) -> None:
        """The records are out of the step's reach, but for the one that it works on."""
        self._reach = self.data.reach()
        if self.runner.memory is not None:
            state = [*self._module.parameters(), *self._module.buffers()]
            self.runner.memory.hold_back_data(value for _, value in self._reach.memory(state))

    def note_state(self) -> None:
        """Tells the ledger which of the module's state holds records without noise, for whoever trains on from it."""
        if self.runner.memory is not None:
            self.run.fit.ledger.unprotected = self.runner.memory.names_held()

    def _try_step(self) -> Trial:
        """A few records through the step, which explains; see :mod:`~lightning_lap2.gradients.trial`."""
        found = self.data.peek(_TRIAL_RECORDS)
        if found is None:
            return Trial(("the step was not tried before training: a stream has no records to look at twice",))
        examples, plain = found
        examples = self.delivery.moved(examples)
        call = self._call(step_arguments(self._trainer, examples), examples.count - len(examples.lost))
        with muted_loggers(self._trainer, self.run.fit.pl), self._user_code():
            if plain is not None:
                plain = (self.delivery.plain(plain), *call.args[1:])
            trial = try_step(self.runner, self.layout, call, plain)
        self._tell_of(trial, examples)
        return trial

    def _tell_of(self, trial: Trial, examples: ExampleBatch) -> None:
        fit = self.run.fit
        for note in trial.notes:
            fit.say(note)
        if fit.settings.engine == "auto":
            passed = "".join(f"; {name!r} was passed over: {why}" for name, why in self.runner.passed_over.items())
            fit.say(f"engine='auto' chose {self.engine_name!r}{passed}")
        alike = fit.settings.augmentations > 1 and identical_views(examples)
        if alike and not trial.random and not self.delivery.transforms:
            fit.warn(
                f"augmentations={fit.settings.augmentations}, but all views of each record looked at are identical: "
                "every view costs time and adds nothing. Put random transforms into the data set's __getitem__, "
                "collate_fn or on_after_batch_transfer, or use augmentations=1"
            )

    # -- between steps --------------------------------------------------------------------------------------------

    def check_feedback(self, *, refuse: bool = True) -> None:
        """See :meth:`FeedbackWatch.check_logged`."""
        if self._feedback is not None:
            self._feedback.check_logged(refuse=refuse)

    def check_weights(self) -> None:
        """Says once that weights are lost: a diverged run spends its budget on nothing. (They are released, so that
        this is said tells nothing more.)"""
        self.settle_weights()
        replicas.check_equal(self._module, self._trainer.strategy)
        if not self._lost_warned and (lost := checks.not_finite(self._module)):
            self._lost_warned = True
            self.run.fit.warn(
                f"the parameter {lost} holds NaN or infinite values (too large a learning rate?): gradients that are "
                "not finite count as zero, so further steps spend the budget on noise alone"
            )

    def start_epoch(self, batch: int) -> bool:
        """The sampler's windows begin where the Trainer's do, at loader batch ``batch``; whether they had begun
        elsewhere."""
        self.releases.begin_pass()
        stale = self.data.position.batch != batch
        self.data.start(Position(release=self.run.fit.ledger.releases, batch=batch))
        return stale

    def check_trained(self) -> None:
        """
        Raises:
            UnsupportedSettingError: a batch was fetched, and the step never ran on it. Which draws are released must
                not depend on what they hold.
        """
        if self._part is not None:
            raise UnsupportedSettingError(
                "a batch was drawn and training_step never ran on it (on_train_batch_start returned -1, or "
                "optimizer_step did not call its closure): whether a draw is released must not depend on the "
                "records in it; let every batch train, and bound the length of an epoch by limit_train_batches"
            )

    def after_advance(self) -> None:
        """Every draw that was fetched must be on its way to a release.

        Raises:
            UnsupportedSettingError: all parts of a draw went through the step, and the optimizer did not step.
            Exception: what the engine raised, and the user's code swallowed.
        """
        self.check_trained()
        if self._failed is not None:
            raise self._failed
        if self.releases.window.complete:
            raise UnsupportedSettingError(NEVER_RELEASED)
        self._stop.look(midst=not self.releases.window.empty)

    # -- one step -------------------------------------------------------------------------------------------------

    def deliver(self, batch: Any, examples: ExampleBatch) -> Any:
        """In place of ``Strategy.batch_to_device`` for train batches: pairs the batch with what was drawn for it, and
        returns what hooks are shown.

        Raises:
            UnsupportedSettingError: the batch before was fetched, and the step never ran on it.
        """
        self.check_trained()
        part = self.data.next_part(examples.count)
        assert examples.count == max(part.count, 1)
        self._part = part
        return self.delivery.deliver(batch, examples)

    def training_step(self, *args: Any) -> Any:
        """In place of ``Strategy.training_step``: gradients by the engine. Lightning gets a constant for a loss, so
        that nothing but the noised gradient reaches the optimizer; see :meth:`take_output`."""
        part, self._part = self._part, None
        if part is None:
            raise RuntimeError(
                "training_step ran twice for the same batch (an optimizer or an optimizer_step override that calls "
                "its closure several times), so an example would enter one release twice; use an optimizer that "
                "calls the closure once"
            )
        if self.releases.window.begins(part) and self.releases.begin_window():
            raise UnsupportedSettingError(NEVER_RELEASED)
        call = self._call((self.delivery.take(), *args[1:]), part.count, self._key(part))
        if self.run.fit.probe is not None:
            call = self.run.fit.probe.drawn(part, call)
        total = self.releases.open(part)
        try:
            with self._suspended(), self._user_code():
                self._output = self.runner.accumulate(call, self.layout, self.releases.clipper, total)
        except Exception as error:
            self._failed = error  # one example must not decide over the others' gradients, should someone catch this
            raise
        return torch.zeros((), device=self.layout.device, requires_grad=True)

    def _call(self, args: tuple[Any, ...], count: int, key: bytes | None = None) -> StepCall:
        return StepCall(
            args,
            count,
            self._step_context,
            prepare=self.delivery.prepare,
            key=key,
            skip_errors=self._settings.on_record_error == "zero",
        )

    @contextmanager
    def _step_context(self) -> Iterator[None]:
        """Around the user's step alone."""
        with self._trainer.precision_plugin.train_step_context(), withheld_metrics(self._trainer):
            yield

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        self.in_step = True
        try:
            with self._reach.closed():
                yield
        finally:
            self.in_step = False

    def _suspended(self) -> AbstractContextManager[None]:
        return nullcontext() if self._hooks is None else self._hooks.suspended()

    def _key(self, part: Part) -> bytes | None:
        """What random numbers in the step are made from in a run that is repeatable."""
        if self._settings.noise_seed is None or self.data.sampler is None:
            return None
        return self.data.sampler.secret(f"step|part={part.index:d}", part.release)

    def take_output(self) -> dict[str, Any]:
        """The step's own output, as Lightning hands it to ``on_train_batch_end``."""
        output, self._output = self._output, None
        if output is None:
            return {}
        entries = dict(output) if isinstance(output, Mapping) else {"loss": output}
        return entries | {"loss": entries["loss"] / self.run.fit.accumulate}

    def release(self) -> None:
        """See :meth:`Releases.make`."""
        if self._failed is not None:
            raise self._failed
        checks.check_parameter_hooks(self._module)
        with self._suspended():
            going_on = self.releases.make()
        if self._hooks is not None:
            self._hooks.released(p.grad for p in self.layout.parameters if p.grad is not None)
        if not going_on:
            # last guard: reached only where the cap on steps did not bite (parameters were unfrozen meanwhile)
            stop(self.run.fit.patches, self._trainer)
