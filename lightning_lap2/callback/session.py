"""One fit, from its first check to its last release.

One batch: ``TrainingData`` drew it -> ``Engine.accumulate`` adds its clipped per-example gradients to the ``Window`` of
``Releases`` -> the ledger is charged -> ``release_`` adds noise once and divides by the public expected batch size ->
``.grad`` -> the user's optimizer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_lap2.accounting import Release
from lightning_lap2.batches import ExampleBatch
from lightning_lap2.callback import marks, refusals
from lightning_lap2.callback.adaptive import AdaptiveThreshold, expensive_count
from lightning_lap2.callback.data import DataFacts, Position, TrainingData
from lightning_lap2.callback.delivery import Delivery, find_examples
from lightning_lap2.callback.feedback import FeedbackWatch
from lightning_lap2.callback.hooks import HookWatch
from lightning_lap2.callback.journal import local_path
from lightning_lap2.callback.ledger import UNLINKED, Account, Ledger
from lightning_lap2.callback.patches import Patches, muted_loggers, withheld_metrics, withhold_loss
from lightning_lap2.callback.plan import Horizon, KeptPlan, Plan, changes, horizon, make_plan
from lightning_lap2.callback.probe import Claim, Probe
from lightning_lap2.callback.releases import Releases, by_pass, specification
from lightning_lap2.callback.resume import NO_JOURNAL, Resumed, accept_untracked, settle
from lightning_lap2.callback.settings import Settings
from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.gradients import ParameterLayout, StepCall, StepRunner
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.state import StateMemory
from lightning_lap2.gradients.trial import Trial, identical_views, try_step
from lightning_lap2.noise import make_noise_source
from lightning_lap2.noise.grid import CELLS
from lightning_lap2.sampling import Part

NEVER_RELEASED = (
    "a draw was never released: the optimizer did not step on it (an optimizer_step override that skips steps, or does "
    "not call its closure?). Which draws are released must not depend on what they hold: step on every batch, or use "
    "Trainer(accumulate_grad_batches=...)"
)
# records that are looked at before training
_TRIAL_RECORDS = 8


class FitSession:
    """Everything that lives for one ``trainer.fit``.

    Args:
        pl: the Lightning namespace (``lightning.pytorch`` or ``pytorch_lightning``).
        on_plan: called once the plan stands, before the first step.
        probe: what an audit places in this fit and sees of it; ``None`` in training.
    """

    def __init__(
        self,
        settings: Settings,
        account: Account,
        trainer: Any,
        module: Any,
        pl: ModuleType,
        on_plan: Callable[[FitSession], None],
        probe: Probe | None = None,
    ) -> None:
        self.settings, self.account, self.trainer, self.module, self.pl = settings, account, trainer, module, pl
        self._on_plan, self._probe = on_plan, probe
        self.resumed: Resumed | None = None
        self.checkpoint_seen = False
        self.patches = Patches()
        self.data: TrainingData | None = None
        self.facts: DataFacts | None = None
        self.plan: Plan | None = None
        self.threshold: AdaptiveThreshold | None = None
        self.runner: StepRunner
        self.releases: Releases
        self.delivery = Delivery(trainer, module, pl)
        self.directory: Path | None = None
        self.trial = Trial()
        self._part: Part | None = None
        self._output: Any = None
        self._in_step = False
        self._failed: Exception | None = None
        self._hooks: HookWatch | None = None
        self._stop_after_draw = False
        self._feedback: FeedbackWatch | None = None
        self._lost_warned = False

    @property
    def ledger(self) -> Ledger:
        """What this fit is charged to: the callback's, the loaded checkpoint's or the module's."""
        return self.account.ledger

    # -- patches --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Checks what can be checked before data and checkpoint, then patches (see ``patches``).

        Raises:
            UnsupportedSettingError: naming the setting and what to use instead.
        """
        refusals.check_trainer(self.trainer, self.pl)
        refusals.check_module(self.module, self.pl)
        marks.note_unknown_training(self.module, self.ledger)
        strategy, fit_loop = self.trainer.strategy, self.trainer.fit_loop
        process, setup, gather = strategy.process_dataloader, fit_loop.setup_data, strategy.all_gather

        def process_dataloader(loader: Any) -> Any:
            loader = process(loader)
            return self.replace_loader(loader) if self.trainer.training else loader

        def setup_data() -> None:
            before = fit_loop._combined_loader
            setup()
            if fit_loop._combined_loader is not None and fit_loop._combined_loader is not before:
                self.data_ready()

        def all_gather(*args: Any, **options: Any) -> Any:
            if self._in_step and self.trainer.world_size > 1:
                raise UnsupportedModelError(
                    "training_step calls self.all_gather, which mixes the examples of all ranks (and would wait for "
                    "ranks that drew fewer): log with sync_dist=True, or gather in on_train_batch_end"
                )
            return gather(*args, **options)

        optimization = fit_loop.epoch_loop.automatic_optimization
        run, make_closure, to_device, before_transfer = (
            optimization.run,
            optimization._make_closure,
            strategy.batch_to_device,
            self.module._on_before_batch_transfer,
        )

        def batch_to_device(batch: Any, *args: Any, **options: Any) -> Any:
            examples = find_examples(batch)
            return to_device(batch, *args, **options) if examples is None else self.deliver(batch, examples)

        def on_before_batch_transfer(batch: Any, *args: Any, **options: Any) -> Any:
            return batch if find_examples(batch) is not None else before_transfer(batch, *args, **options)

        def run_optimization(*args: Any, **options: Any) -> Any:
            run(*args, **options)
            return self.take_output()

        def _make_closure(*args: Any, **options: Any) -> Any:
            return withhold_loss(make_closure(*args, **options), self.trainer)

        self.patches.shadow(strategy, "batch_to_device", batch_to_device)
        self.patches.shadow(self.module, "_on_before_batch_transfer", on_before_batch_transfer)
        self.patches.shadow(optimization, "run", run_optimization)
        self.patches.shadow(optimization, "_make_closure", _make_closure)
        self.patches.shadow(strategy, "process_dataloader", process_dataloader)
        self.patches.shadow(fit_loop, "setup_data", setup_data)
        self.patches.shadow(strategy, "training_step", self.training_step)
        self.patches.shadow(strategy, "all_gather", all_gather)
        self.patches.shadow(fit_loop.epoch_loop, "on_run_start", self._epoch_starter(fit_loop.epoch_loop))
        for name in ("advance", "on_advance_end"):
            self.patches.shadow(fit_loop.epoch_loop, name, self._draws_watched(getattr(fit_loop.epoch_loop, name)))

    def end(self) -> None:
        self.note_state()
        self.patches.undo()

    # -- data and plan --------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> Resumed:
        """Where the Trainer stands: the checkpoint's word while its loops are not yet restored, else its own."""
        if self.resumed is not None:
            return self.resumed
        loop = self.trainer.fit_loop
        return Resumed(self.trainer.global_step, loop.epoch_progress.current.processed, 0)

    def replace_loader(self, loader: Any) -> Any:
        """The loader that is trained on instead of ``loader``.

        Raises:
            TypeError, ValueError: a loader whose sampling rate is not known or not proven, by name.
        """
        trainer = self.trainer
        if self.plan is None:
            self._settle_ledger()
        data = TrainingData(
            loader,
            sampling=self.settings.sampling,
            limit=trainer.limit_train_batches,
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            seed=self.settings.noise_seed,
            views=self.settings.augmentations,
            skip_errors=self.settings.on_record_error == "zero",
            unit=self.settings.unit,
            records_per_unit=self.settings.rows_per_unit,
        )
        if self.plan is not None and data.facts != self.facts:
            raise UnsupportedSettingError(
                "the train data changed between epochs (reload_dataloaders_every_n_epochs): "
                f"{self.facts} became {data.facts}; N and the batch size are public constants of a run"
            )
        first = trainer.strategy.broadcast(data.facts)
        # on every rank: one that went on alone would wait for the others
        if not trainer.strategy.reduce_boolean_decision(data.facts.same_rows(first)):
            units = "" if self.settings.unit is None else ", with the same unit ids in the same order"
            raise UnsupportedSettingError(
                f"the ranks train on different data (rank {trainer.global_rank} on {data.facts}, rank 0 on {first}): "
                "one sampling rate and one ledger hold for all ranks; give every rank the same whole data set and "
                f"batch size{units} (the draws are shared out)"
            )
        self.data, self.facts = data, data.facts
        if self._probe is not None:
            data.leave_out(self._probe.absent)
        batch = self._progress.batches_done if self.plan is None else 0
        data.start(Position(release=self.ledger.releases, batch=batch))
        return data.loader

    def _settle_ledger(self) -> None:
        if self.trainer.ckpt_path is not None and not self.checkpoint_seen:
            self.untracked_checkpoint()
        if self.checkpoint_seen:  # the module's weights are the checkpoint's now
            if branch := self.ledger.branched_off(marks.spent(self.module)):
                self._warn(branch)
        elif new := marks.adopt(self.module, self.account, self._restored):
            self._say(
                f"the module was trained privately before: its {new} releases are in the ledger from now on (weights "
                "that have nothing to do with those belong into a new module)"
            )
        settle(self.ledger, self.trainer, self._say, self._warn)

    def _restored(self, state: Mapping[str, Any]) -> Ledger:
        """The ledger of a module that came out of a pickle."""
        ledger = Ledger(self.settings)
        ledger.load_state_dict(state, of="the module's mark")
        return ledger

    def untracked_checkpoint(self) -> None:
        """See :func:`~lightning_lap2.callback.resume.accept_untracked`."""
        accept_untracked(self.settings, self.ledger)

    def data_ready(self) -> None:
        """After Lightning set its train data up: one loader, and (once a fit) the plan and the cap on steps."""
        loader = self.trainer.fit_loop._combined_loader
        if len(loader.flattened) != 1:
            raise UnsupportedSettingError(
                f"{len(loader.flattened)} train loaders give one example several ways into a step; "
                "combine the data sets into one (torch.utils.data.ConcatDataset)"
            )
        assert self.facts is not None
        if self.facts.batches_per_epoch != self.trainer.fit_loop.max_batches:
            raise RuntimeError(
                f"Lightning plans {self.trainer.fit_loop.max_batches} batches per epoch, the sampler "
                f"{self.facts.batches_per_epoch}; please report this"
            )
        if self.plan is None:
            self._make_plan()

    def _make_plan(self) -> None:
        assert self.facts is not None
        facts, trainer, settings = self.facts, self.trainer, self.settings
        refusals.check_delta(settings.delta, facts.num_examples)
        refusals.check_parameter_types(self.module)
        layout = ParameterLayout(self.module)
        if not layout.numel:
            raise UnsupportedSettingError(f"{type(self.module).__name__} has no trainable parameters")
        progress = self._progress
        ahead = horizon(
            global_step=progress.global_step,
            max_steps=trainer.max_steps,
            max_epochs=-1 if trainer.fit_loop.max_epochs is None else trainer.fit_loop.max_epochs,
            epochs_done=progress.epochs_done,
            batches_done=progress.batches_done,
            batches_per_epoch=facts.batches_per_epoch,
            accumulate=trainer.accumulate_grad_batches,
        )
        if settings.clipping == "adaptive":
            self.threshold = AdaptiveThreshold(settings, self.ledger.clipping)
        plan = make_plan(
            settings,
            self.ledger.accountant,
            release=self._planned_release(layout),
            charges=ahead.passes if by_pass(settings, facts) else ahead.steps,
            end=ahead.global_end,
            previous=self.ledger.plan,
        )
        self._warn_of_noisy_rest(plan)
        if self.threshold is not None and (expensive := expensive_count(plan.release)):
            self._warn(expensive)
        if plan.charges:
            specified = specification(settings, facts, layout, self.threshold, plan.noise_multiplier)
            for clip in (settings.max_grad_norm,) if self.threshold is None else self.threshold.ends:
                refusals.check_range(
                    replace(specified, max_grad_norm=clip),
                    layout.dtype,
                    facts.num_examples,
                    facts.expected_batch_size,
                )
        engines = [make_engine(name, self.module, chunk_size=settings.chunk_size) for name in settings.engines]
        self.runner = StepRunner(self.module, engines)
        noise = make_noise_source(
            settings.noise_source,
            layout.device,
            seed=settings.noise_seed,
            rank=trainer.global_rank,
            cells=CELLS if self._probe is None else self._probe.cells,
        )
        self.releases = Releases(
            settings,
            self.ledger,
            facts,
            self.module,
            layout,
            noise_multiplier=plan.noise_multiplier,
            charges=plan.charges,
            threshold=self.threshold,
            noise=noise,
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            probe=self._probe,
        )
        self.plan = plan  # from here on there is something to report
        self._note_plan(KeptPlan(settings.eps, plan.release, ahead.global_end))
        self.ledger.reproducible |= settings.noise_seed is not None
        self.planned_steps = self._steps_for(plan, ahead)
        self._cap(progress.global_step, ahead)
        if self._probe is not None:
            self._begin_audit(self._probe)
        self._on_plan(self)

    def _note_plan(self, plan: KeptPlan) -> None:
        ledger = self.ledger
        resumed = self.resumed is not None or self.trainer.global_step > 0
        if ledger.releases and ledger.plan is not None and (words := changes(ledger.plan, plan, resumed=resumed)):
            ledger.changes.append(f"from release {ledger.releases + 1} on: {words}")
        ledger.plan = plan

    def _begin_audit(self, probe: Probe) -> None:
        assert self.facts is not None
        if self.trainer.world_size > 1:
            raise UnsupportedSettingError(
                f"an audit sees one process, but the Trainer has {self.trainer.world_size}: use Trainer(devices=1)"
            )
        if self.settings.clipping != "flat":
            raise UnsupportedSettingError(
                f"an audit repeats flat clipping by code of its own, but clipping={self.settings.clipping!r}: audit "
                "with clipping='flat'"
            )
        self.ledger.add_caveat("an audit took part in this fit: records were left out or replaced by canaries")
        probe.begin(
            Claim(
                mechanism=self.releases.mechanism,
                sample_rate=self.facts.sample_rate,
                normaliser=self.facts.expected_batch_size,
                steps=self.planned_steps,
                layout=self.layout,
            )
        )

    def _warn_of_noisy_rest(self, plan: Plan) -> None:
        """Stretching what is left of a budget over more steps makes them noisy, which nobody would notice in time."""
        before = None if self.ledger.plan is None else self.ledger.plan.release.noise_multiplier
        if self.settings.noise_multiplier is not None or not before or plan.exhausted or not plan.charges:
            return
        if plan.noise_multiplier > 2 * before:
            self._warn(
                f"what is left of eps={self.settings.eps:g} over the further steps takes a noise multiplier of "
                f"{plan.noise_multiplier:.4g} instead of {before:.4g}: they may undo what was learnt; raise eps or "
                "plan fewer steps"
            )

    @property
    def engine_name(self) -> str:
        """What has run so far, or would be tried first."""
        return " and ".join(self.runner.used) or self.settings.engines[0]

    @property
    def layout(self) -> ParameterLayout:
        """The parameters that are trained now."""
        return self.releases.window.layout

    def _planned_release(self, layout: ParameterLayout) -> Release:
        """What each step will release, with the given noise multiplier, or ``inf`` where it is to be calibrated. Where
        a finetuning callback may unfreeze parameters later: that of all of them clipped as one vector, which under the
        tight bound never costs less than some of them in any layers.

        Raises:
            UnsupportedSettingError: layers that may be unfrozen, under another bound.
        """
        assert self.facts is not None
        given = self.settings.noise_multiplier
        specified = specification(
            self.settings, self.facts, layout, self.threshold, math.inf if given is None else given
        )
        release = specified.release(sample_rate=self.facts.sample_rate, dimension=layout.numel)
        finetuning = self.pl.callbacks.BaseFinetuning
        if not any(isinstance(callback, finetuning) for callback in self.trainer.callbacks):
            return release
        if release.layers and self.settings.bound != "tight":
            raise UnsupportedSettingError(
                f"bound={self.settings.bound!r} with clipping='per_layer' and a finetuning callback: layers can "
                "cost more than one vector under this bound, so what is frozen now cannot be planned for; use "
                "bound='tight', or clipping='flat'"
            )
        return replace(release, dimension=sum(p.numel() for p in self.module.parameters()), layers=())

    def _steps_for(self, plan: Plan, ahead: Horizon) -> float:
        assert self.facts is not None
        if not by_pass(self.settings, self.facts):
            return min(plan.charges, ahead.steps)
        if math.isinf(plan.charges):
            return ahead.steps
        per_pass = math.ceil(self.facts.batches_per_epoch / self.trainer.accumulate_grad_batches)
        return min(ahead.steps, plan.charges * per_pass)

    def _cap(self, global_step: int, ahead: Horizon) -> None:
        """The Trainer's own last step becomes the last affordable one, whatever its minima say."""
        loop = self.trainer.fit_loop
        if self.planned_steps < ahead.steps:
            self.patches.shadow(loop.epoch_loop, "max_steps", global_step + int(self.planned_steps))
        if self.plan is not None and self.plan.exhausted:
            self._warn(
                f"the privacy budget eps={self.settings.eps:g} at delta={self.settings.delta:g} is already spent "
                f"({self.ledger.releases} releases): no step is taken"
            )

    # -- before training ------------------------------------------------------------------------------------------

    def check_before_training(self) -> None:
        """Everything that needs the optimizers and real records, before any data is spent.

        Raises:
            UnsupportedSettingError, UnsupportedModelError: naming the setting, layer or line.
        """
        refusals.check_optimizers(self.trainer.optimizers, self.module)
        refusals.check_parameter_hooks(self.module)
        self._feedback = FeedbackWatch(self.trainer, self.ledger, allowed=self.settings.allow_feedback)
        if not self.planned_steps:
            return
        if lost := refusals.not_finite(self.module):
            raise UnsupportedSettingError(
                f"the parameter {lost} holds NaN or infinite values before the first step: every gradient would be "
                "dropped and the budget spent on noise; initialise it, or load a sound checkpoint"
            )
        self._watch_state()
        told = None if self._probe is None else self._probe.trial
        if told is None:
            self._try_step()
        else:
            self.trial = told
        if self._probe is not None:
            self._probe.trial = self.trial
        self._feedback.check(self.trial.logged_names)

    def _watch_state(self) -> None:
        """From here on the module's state is known to be clean, or withheld from the step."""
        self.runner.memory = memory = StateMemory(self.module)
        memory.hold_back_named(self.ledger.unprotected)
        self._hooks = HookWatch(
            self.trainer, self.module, self.pl, memory, self.ledger, public=self.settings.public_state, warn=self._warn
        )
        self._hooks.install(self.patches)

    def note_state(self) -> None:
        """Tells the ledger which of the module's state holds records without noise, for whoever trains on from it."""
        if self.plan is not None and self.runner.memory is not None:
            self.ledger.unprotected = self.runner.memory.names_held()

    def _suspended(self) -> AbstractContextManager[None]:
        return nullcontext() if self._hooks is None else self._hooks.suspended()

    def _try_step(self) -> None:
        """A few records through the step, which explains; see :mod:`~lightning_lap2.gradients.trial`."""
        assert self.data is not None
        found = self.data.peek(_TRIAL_RECORDS)
        if found is None:
            self.trial = Trial(("the step was not tried before training: a stream has no records to look at twice",))
            return
        examples, plain = found
        examples = self.delivery.moved(examples)
        arguments = self.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), examples, 0)
        call = self._call(tuple(arguments.values()), examples.count - len(examples.lost))
        with muted_loggers(self.trainer, self.pl), self._user_code():
            if plain is not None:
                plain = (self.delivery.plain(plain), *call.args[1:])
            self.trial = try_step(self.runner, self.releases.window.layout, call, plain)
        for note in self.trial.notes:
            self._say(note)
        if self.settings.engine == "auto":
            passed = "".join(f"; {name!r} was passed over: {why}" for name, why in self.runner.passed_over.items())
            self._say(f"engine='auto' chose {self.engine_name!r}{passed}")
        alike = self.settings.augmentations > 1 and identical_views(examples)
        if alike and not self.trial.random and not self.delivery.transforms:
            self._warn(
                f"augmentations={self.settings.augmentations}, but all views of each record looked at are identical: "
                "every view costs time and adds nothing. Put random transforms into the data set's __getitem__, "
                "collate_fn or on_after_batch_transfer, or use augmentations=1"
            )

    def _call(self, args: tuple[Any, ...], count: int, key: bytes | None = None) -> StepCall:
        return StepCall(
            args,
            count,
            self._step_context,
            prepare=self.delivery.prepare,
            key=key,
            skip_errors=self.settings.on_record_error == "zero",
        )

    @contextmanager
    def _step_context(self) -> Iterator[None]:
        """Around the user's step alone."""
        with self.trainer.precision_plugin.train_step_context(), withheld_metrics(self.trainer):
            yield

    def open_journal(self) -> None:
        """The write-ahead journal lies beside the logs, or the checkpoints."""
        if self.trainer.is_global_zero and not self.ledger.open_journal(self.directory):
            self._warn(UNLINKED)

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be saved: from now on releases must be in a journal, wherever it lies."""
        self.note_state()
        if not self.trainer.is_global_zero or self.ledger.has_journal:
            return
        self.ledger.open_journal(local_path(self.trainer.default_root_dir))
        if not self.ledger.has_journal and self.ledger.add_caveat(NO_JOURNAL):
            self._warn(
                f"{NO_JOURNAL} (default_root_dir={str(self.trainer.default_root_dir)!r} is a URL too). Give a logger "
                "with a local folder, or Trainer(default_root_dir=...) on a local disk"
            )

    def check_feedback(self, *, refuse: bool = True) -> None:
        """See :meth:`FeedbackWatch.check_logged`."""
        if self._feedback is not None:
            self._feedback.check_logged(refuse=refuse)

    def check_weights(self) -> None:
        """Says once that weights are lost: a diverged run spends its budget on nothing. (They are released, so that
        this is said tells nothing more.)"""
        if not self._lost_warned and (lost := refusals.not_finite(self.module)):
            self._lost_warned = True
            self._warn(
                f"the parameter {lost} holds NaN or infinite values (too large a learning rate?): gradients that are "
                "not finite count as zero, so further steps spend the budget on noise alone"
            )

    # -- steps ----------------------------------------------------------------------------------------------------

    def _epoch_starter(self, epoch_loop: Any) -> Callable[[Any], None]:
        """``on_run_start`` of the epoch loop, with the sampler's windows aligned to the Trainer's.

        Lightning counts windows from ``batch_progress.current.ready``, which a resumed run only knows here; the
        loader's iterator may have been made before, for another position.
        """
        on_run_start = epoch_loop.on_run_start

        def aligned(fetcher: Any) -> None:
            assert self.data is not None
            self.releases.begin_pass()
            ready = epoch_loop.batch_progress.current.ready
            iterator, stale = fetcher.iterator, self.data.position.batch != ready
            self.data.start(Position(release=self.ledger.releases, batch=ready))
            on_run_start(fetcher)
            if stale and fetcher.iterator is iterator:
                iter(fetcher)
                fetcher.fetched += ready

        return aligned

    def deliver(self, batch: Any, examples: ExampleBatch) -> Any:
        """In place of ``Strategy.batch_to_device`` for train batches: pairs the batch with what was drawn for it, and
        returns what hooks are shown.

        Raises:
            UnsupportedSettingError: the batch before was fetched, and the step never ran on it.
        """
        assert self.data is not None
        self.check_trained()
        part = self.data.next_part(examples.count)
        assert examples.count == max(part.count, 1)
        self._part = part
        return self.delivery.deliver(batch, examples)

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

    def _draws_watched(self, advance: Callable[[Any], None]) -> Callable[[Any], None]:
        """A part of the epoch loop, after which every draw that was fetched must be on its way to a release.

        A stop that was asked for in the midst of a draw waits until the draw is released: how many releases there are
        is a matter of whole draws.
        """

        def watched(fetcher: Any) -> None:
            try:
                advance(fetcher)
            except StopIteration:  # on_train_batch_start returned -1
                self.check_trained()
                raise
            self.check_trained()
            self.check_released()
            if not self.releases.window.empty and self.trainer.should_stop:
                self._stop_after_draw, self.trainer.should_stop = True, False
            elif self.releases.window.empty and self._stop_after_draw:
                self._stop_after_draw, self.trainer.should_stop = False, True

        return watched

    def check_released(self) -> None:
        """
        Raises:
            UnsupportedSettingError: all parts of a draw went through the step, and the optimizer did not step.
            Exception: what the engine raised, and the user's code swallowed.
        """
        if self._failed is not None:
            raise self._failed
        if self.releases.window.complete:
            raise UnsupportedSettingError(NEVER_RELEASED)

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
        if self.releases.window.begins(part):
            self._new_window()
        call = self._call((self.delivery.take(), *args[1:]), part.count, self._key(part))
        if self._probe is not None:
            call = self._probe.drawn(part, call)
        total = self.releases.open(part)
        try:
            with self._suspended(), self._user_code():
                self._output = self.runner.accumulate(call, self.layout, self.releases.clipper, total)
        except Exception as error:
            self._failed = error  # one example must not decide over the others' gradients, should someone catch this
            raise
        return torch.zeros((), device=self.layout.device, requires_grad=True)

    def _key(self, part: Part) -> bytes | None:
        """What random numbers in the step are made from in a run that is repeatable."""
        sampler = None if self.data is None else self.data.sampler
        if self.settings.noise_seed is None or sampler is None:
            return None
        return sampler.secret(f"step|part={part.index:d}", part.release)

    def take_output(self) -> dict[str, Any]:
        """The step's own output, as Lightning hands it to ``on_train_batch_end``."""
        output, self._output = self._output, None
        if output is None:
            return {}
        entries = dict(output) if isinstance(output, Mapping) else {"loss": output}
        return entries | {"loss": entries["loss"] / self.trainer.accumulate_grad_batches}

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        """Marks that the user's ``training_step`` runs, where ranks must not meet."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _new_window(self) -> None:
        """
        Raises:
            UnsupportedSettingError: the draw before was never released.
        """
        if self.releases.begin_window():
            raise UnsupportedSettingError(NEVER_RELEASED)

    def release(self) -> None:
        """See :meth:`Releases.make`."""
        if self._failed is not None:
            raise self._failed
        refusals.check_parameter_hooks(self.module)
        with self._suspended():
            going_on = self.releases.make()
        if self._hooks is not None:
            self._hooks.released(p.grad for p in self.layout.parameters if p.grad is not None)
        if not going_on:
            self._stop()

    def _stop(self) -> None:
        """Last guard: reached only where the cap on steps did not bite (parameters were unfrozen meanwhile)."""
        loop = self.trainer.fit_loop
        self.patches.shadow(loop, "min_epochs", 0)
        self.patches.shadow(loop.epoch_loop, "min_steps", None)
        self.trainer.should_stop = True

    # -- words ----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.pl.utilities.rank_zero_info(f"Lap2Privacy: {text}")

    def _warn(self, text: str) -> None:
        self.pl.utilities.rank_zero_warn(f"Lap2Privacy: {text}")
