"""A fit until its plan stands: what is refused, whose ledger it is charged to, what it trains on, how much noise.

Lightning sets the train data up once the checkpoint is loaded and before a batch is fetched. Everything that a plan
depends on is known there: N, batch size, dimension, ledger and the Trainer's limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_lap2.accounting import Release
from lightning_lap2.callback import checks
from lightning_lap2.callback.adaptive import AdaptiveThreshold, expensive_count
from lightning_lap2.callback.data import DataFacts, Position, TrainingData
from lightning_lap2.callback.ledger import module_mark
from lightning_lap2.callback.ledger.ledger import Ledger
from lightning_lap2.callback.ledger.resume import Resumed, accept_untracked, settle
from lightning_lap2.callback.plan import Horizon, KeptPlan, Plan, changes, horizon, make_plan
from lightning_lap2.callback.release.releases import specification
from lightning_lap2.callback.run import Fit, Run, charged_by_pass
from lightning_lap2.callback.trainer.limits import cap_steps
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients import ParameterLayout, make_layout, reshard
from lightning_lap2.noise import NoiseSource, make_noise_source
from lightning_lap2.noise.grid import CELLS


class Preparing:
    """From the first check of a fit to its :class:`~lightning_lap2.callback.run.Run`.

    Attributes:
        resumed: the Trainer's progress in the checkpoint that the fit resumes from.
        data: what is trained on, once Lightning made its loader.
    """

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.resumed: Resumed | None = None
        self.data: TrainingData
        self._checkpoint_seen = False

    def check(self) -> None:
        """Checks what can be checked before data and checkpoint.

        Raises:
            UnsupportedSettingError: naming the setting and what to use instead.
        """
        fit = self.fit
        checks.check_trainer(fit.trainer, fit.pl)
        checks.check_module(fit.module, fit.pl)
        reshard(fit.module)
        module_mark.note_unknown_training(fit.module, fit.ledger)

    # -- ledger ---------------------------------------------------------------------------------------------------

    def checkpoint_loaded(self, checkpoint: Mapping[str, Any], *, tracked: bool) -> None:
        """The fit resumes from ``checkpoint``; ``tracked``: it holds a ledger of ours.

        Raises:
            UnsupportedSettingError: see :func:`~lightning_lap2.callback.ledger.resume.accept_untracked`.
        """
        self.resumed, self._checkpoint_seen = Resumed.from_checkpoint(checkpoint), True
        if not tracked:
            accept_untracked(self.fit)

    def _settle_ledger(self) -> None:
        fit = self.fit
        if fit.trainer.ckpt_path is not None and not self._checkpoint_seen:
            accept_untracked(fit)
        if self._checkpoint_seen:  # the module's weights are the checkpoint's now
            if branch := fit.ledger.branched_off(module_mark.spent(fit.module)):
                fit.warn(branch)
        elif new := module_mark.adopt(fit.module, fit.account, self._restored):
            fit.say(
                f"the module was trained privately before: its {new} releases are in the ledger from now on (weights "
                "that have nothing to do with those belong into a new module)"
            )
        settle(fit)

    def _restored(self, state: Mapping[str, Any]) -> Ledger:
        """The ledger of a module that came out of a pickle."""
        ledger = Ledger(self.fit.settings)
        ledger.load_state_dict(state, of="the module's mark")
        return ledger

    # -- data -----------------------------------------------------------------------------------------------------

    def replace_loader(self, loader: Any) -> Any:
        """The loader that is trained on instead of ``loader``, at the place where the fit goes on.

        Raises:
            TypeError, ValueError: a loader whose sampling rate is not known or not proven, by name.
        """
        reshard(self.fit.module)  # marks are of shards
        self._settle_ledger()
        self.data = training_data(self.fit, loader)
        self.data.start(Position(release=self.fit.ledger.releases, batch=self._progress.batches_done))
        return self.data.loader

    @property
    def _progress(self) -> Resumed:
        """Where the Trainer stands: the checkpoint's word while its loops are not yet restored, else its own."""
        if self.resumed is not None:
            return self.resumed
        trainer = self.fit.trainer
        return Resumed(trainer.global_step, trainer.fit_loop.epoch_progress.current.processed, 0)

    # -- plan -----------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Plans the fit on its data, notes the plan in the ledger and caps the Trainer's steps.

        Raises:
            UnsupportedSettingError, ValueError: nothing to train, a delta, type or scale that is not proven, or a
                budget that no finite noise keeps; by name.
        """
        fit, facts = self.fit, self.data.facts
        checks.check_delta(fit.settings.delta, facts.num_examples)
        checks.check_parameter_types(fit.module)
        layout = make_layout(fit.module)
        if not layout.numel:
            raise UnsupportedSettingError(f"{type(fit.module).__name__} has no trainable parameters")
        ahead = self._ahead(facts)
        adaptive = fit.settings.clipping == "adaptive"
        threshold = AdaptiveThreshold(fit.settings, fit.ledger.clipping) if adaptive else None
        plan = self._plan(facts, layout, threshold, ahead)
        run = Run(
            fit=fit,
            data=self.data,
            layout=layout,
            plan=plan,
            planned_steps=_planned_steps(fit, facts, plan, ahead),
            threshold=threshold,
            noise=_noise(fit, layout),
        )
        self._note(KeptPlan(fit.settings.eps, plan.release, ahead.global_end))
        self._cap(run, ahead)
        return run

    def _ahead(self, facts: DataFacts) -> Horizon:
        trainer, progress = self.fit.trainer, self._progress
        return horizon(
            global_step=progress.global_step,
            max_steps=trainer.max_steps,
            max_epochs=-1 if trainer.fit_loop.max_epochs is None else trainer.fit_loop.max_epochs,
            epochs_done=progress.epochs_done,
            batches_done=progress.batches_done,
            batches_per_epoch=facts.batches_per_epoch,
            accumulate=self.fit.accumulate,
        )

    def _plan(
        self, facts: DataFacts, layout: ParameterLayout, threshold: AdaptiveThreshold | None, ahead: Horizon
    ) -> Plan:
        fit, settings = self.fit, self.fit.settings
        plan = make_plan(
            settings,
            fit.ledger.accountant,
            release=_planned_release(fit, facts, layout, threshold),
            charges=ahead.passes if charged_by_pass(settings, facts) else ahead.steps,
            end=ahead.global_end,
            previous=fit.ledger.plan,
        )
        self._warn_of_noisy_rest(plan)
        if threshold is not None and (expensive := expensive_count(plan.release)):
            fit.warn(expensive)
        if plan.charges:
            specified = specification(settings, facts, layout, threshold, plan.noise_multiplier)
            for clip in (settings.max_grad_norm,) if threshold is None else threshold.ends:
                checks.check_range(
                    replace(specified, max_grad_norm=clip),
                    layout.dtype,
                    facts.num_examples,
                    facts.expected_batch_size,
                )
        return plan

    def _warn_of_noisy_rest(self, plan: Plan) -> None:
        """Stretching what is left of a budget over more steps makes them noisy, which nobody would notice in time."""
        settings, kept = self.fit.settings, self.fit.ledger.plan
        if settings.noise_multiplier is not None or kept is None or plan.exhausted or not plan.charges:
            return
        before = kept.release.noise_multiplier
        if before and plan.noise_multiplier > 2 * before:
            self.fit.warn(
                f"what is left of eps={settings.eps:g} over the further steps takes a noise multiplier of "
                f"{plan.noise_multiplier:.4g} instead of {before:.4g}: they may undo what was learnt; raise eps or "
                "plan fewer steps"
            )

    def _note(self, plan: KeptPlan) -> None:
        """In the ledger, with what changed since the plan before."""
        ledger = self.fit.ledger
        resumed = self.resumed is not None or self.fit.trainer.global_step > 0
        if ledger.releases and ledger.plan is not None and (words := changes(ledger.plan, plan, resumed=resumed)):
            ledger.changes.append(f"from release {ledger.releases + 1} on: {words}")
        ledger.plan = plan
        ledger.reproducible |= self.fit.settings.noise_seed is not None

    def _cap(self, run: Run, ahead: Horizon) -> None:
        """The Trainer's own last step becomes the last affordable one, whatever its minima say."""
        fit = self.fit
        if run.planned_steps < ahead.steps:
            cap_steps(fit.patches, fit.trainer, self._progress.global_step + int(run.planned_steps))
        if run.plan.exhausted:
            fit.warn(
                f"the privacy budget eps={fit.settings.eps:g} at delta={fit.settings.delta:g} is already spent "
                f"({fit.ledger.releases} releases): no step is taken"
            )


def training_data(fit: Fit, loader: Any) -> TrainingData:
    """The data of ``loader`` as this fit samples it, the same on all ranks.

    Raises:
        TypeError, ValueError: a loader whose sampling rate is not known or not proven, by name.
        UnsupportedSettingError: the ranks have different data.
    """
    trainer, settings, ranks = fit.trainer, fit.settings, fit.ranks
    data = TrainingData(
        loader,
        sampling=settings.sampling,
        limit=trainer.limit_train_batches,
        accumulate=fit.accumulate,
        rank=ranks.rank,
        world_size=ranks.size,
        seed=settings.noise_seed,
        views=settings.augmentations,
        skip_errors=settings.on_record_error == "zero",
        unit=settings.unit,
        records_per_unit=settings.rows_per_unit,
    )
    first = trainer.strategy.broadcast(data.facts)
    # on every rank: one that went on alone would wait for the others
    if not trainer.strategy.reduce_boolean_decision(data.facts.same_rows(first)):
        units = "" if settings.unit is None else ", with the same unit ids in the same order"
        raise UnsupportedSettingError(
            f"the ranks train on different data (rank {ranks.rank} on {data.facts}, rank 0 on {first}): one sampling "
            "rate and one ledger hold for all ranks; give every rank the same whole data set and batch "
            f"size{units} (the draws are shared out)"
        )
    if fit.probe is not None:
        data.leave_out(fit.probe.absent)
    return data


def _planned_release(
    fit: Fit, facts: DataFacts, layout: ParameterLayout, threshold: AdaptiveThreshold | None
) -> Release:
    """What each step will release, with the given noise multiplier, or ``inf`` where it is to be calibrated. Where a
    finetuning callback may unfreeze parameters later: that of all of them clipped as one vector, which under the tight
    bound never costs less than some of them in any layers.

    Raises:
        UnsupportedSettingError: layers that may be unfrozen, under another bound.
    """
    settings = fit.settings
    multiplier = math.inf if settings.noise_multiplier is None else settings.noise_multiplier
    specified = specification(settings, facts, layout, threshold, multiplier)
    release = specified.release(sample_rate=facts.sample_rate, dimension=layout.numel)
    finetuning = fit.pl.callbacks.BaseFinetuning
    if not any(isinstance(callback, finetuning) for callback in fit.trainer.callbacks):
        return release
    if release.layers and settings.bound != "tight":
        raise UnsupportedSettingError(
            f"bound={settings.bound!r} with clipping='per_layer' and a finetuning callback: layers can "
            "cost more than one vector under this bound, so what is frozen now cannot be planned for; use "
            "bound='tight', or clipping='flat'"
        )
    return replace(release, dimension=sum(p.numel() for p in fit.module.parameters()), layers=())


def _planned_steps(fit: Fit, facts: DataFacts, plan: Plan, ahead: Horizon) -> float:
    """Optimizer steps that the budget and the Trainer's limits allow."""
    if not charged_by_pass(fit.settings, facts):
        return min(plan.charges, ahead.steps)
    if math.isinf(plan.charges):
        return ahead.steps
    per_pass = math.ceil(facts.batches_per_epoch / fit.accumulate)
    return min(ahead.steps, plan.charges * per_pass)


def _noise(fit: Fit, layout: ParameterLayout) -> NoiseSource:
    return make_noise_source(
        fit.settings.noise_source,
        layout.device,
        seed=fit.settings.noise_seed,
        rank=fit.ranks.rank,
        cells=CELLS if fit.probe is None else fit.probe.cells,
    )
