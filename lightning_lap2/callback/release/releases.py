"""The making of one release: clipped parts gathered, charged, noised once, divided, written to ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_lap2.accounting import Release
from lightning_lap2.callback.adaptive import AdaptiveThreshold
from lightning_lap2.callback.data import DataFacts
from lightning_lap2.callback.plan import affordable_charges
from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.callback.release.spending import Spending
from lightning_lap2.callback.release.window import Window, release_
from lightning_lap2.callback.run import Run
from lightning_lap2.callback.settings import Settings
from lightning_lap2.gradients import Clipper, ParameterLayout, make_clipper
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.sampling import Part


class Releases:
    """The releases of one fit, each by one specification: clipping, noise and charge all follow from it.

    Args:
        run: the fit as it was planned. Freezing or unfreezing parameters changes the next release.
        ranks: of the job.
    """

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._settings, self._ledger, self._module = run.fit.settings, run.fit.ledger, run.fit.module
        self.window = Window(run.layout, counted=run.threshold is not None)
        self.mechanism: Mechanism
        self.clipper: Clipper
        self._flags = _trainable(self._module)
        self._pass_charged = False
        self._specify(run.layout)
        self.spending = Spending(self._ledger, charges=run.plan.charges)
        self.spending.forecast_for(self.event(run.layout.numel))

    # -- what a release is ----------------------------------------------------------------------------------------

    def _specify(self, layout: ParameterLayout) -> None:
        """Sets what the next release is clipped and noised by."""
        run = self._run
        self.mechanism = specification(self._settings, run.facts, layout, run.threshold, run.plan.noise_multiplier)
        self.clipper = make_clipper(self._settings.clipping, self.mechanism, layout)

    def event(self, dimension: int) -> Release:
        """What the next release is to the accountant."""
        return self.mechanism.release(sample_rate=self._run.facts.sample_rate, dimension=dimension)

    # -- gathering ------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Where a charge covers a whole pass over the data, the next release is charged again."""
        self._pass_charged = False

    def open(self, part: Part) -> Tensor:
        """The buffer that the clipped gradients of ``part`` are added to."""
        return self.window.open(part)

    def begin_window(self) -> bool:
        """Starts to gather anew, for the parameters that are trainable now; whether a draw was dropped."""
        layout, flags = self.window.layout, _trainable(self._module)
        if flags != self._flags:
            layout, self._flags = layout.again(self._module), flags
            self._dimension_changed(layout)
        return self.window.restart(layout)

    def _dimension_changed(self, layout: ParameterLayout) -> None:
        """Freezing or unfreezing changes n: the rest of the budget is judged with the new one."""
        self._specify(layout)
        event = self.event(layout.numel)
        self.spending.limit(affordable_charges(self._settings, self._ledger.accountant, event))
        self.spending.forecast_for(event)

    # -- releasing ------------------------------------------------------------------------------------------------

    def make(self) -> bool:
        """Charges, noises, and writes ``.grad``; clears it where there is nothing to release or no budget left.

        Nothing but a charged and noised sum ever reaches the optimizer.

        Returns:
            False if a sum had to be thrown away since the budget is spent.
        """
        parts, total = self.window.size, self.window.take()
        layout = self.window.layout
        accounted = not (self._run.charges_a_pass and self._pass_charged)
        if total is None or (accounted and self.spending.exhausted):
            for parameter in self._module.parameters():
                parameter.grad = None
            return total is None
        self.spending.charge(self.event(layout.numel), accounted=accounted)
        self._pass_charged = True
        release_(
            total,
            noise=self._run.noise,
            scale=self.mechanism.scale,
            distribution=self.mechanism.distribution,
            normaliser=self._run.facts.expected_batch_size,
            release=self._ledger.releases - 1,
            last_factor=self.mechanism.count_factor,
            ranks=self._ranks.of(layout),
        )
        if self._run.fit.probe is not None:
            self._run.fit.probe.released(total[: layout.held])
        layout.write_grads(total)
        if self._run.threshold is not None:
            self._follow(self._run.threshold, total[layout.held], parts)
        return True

    def _follow(self, threshold: AdaptiveThreshold, released: Tensor, parts: int) -> None:
        """C of the next release, from the noised count of this one."""
        expected = self._run.facts.expected_batch_size
        count = float(released) * expected / self.mechanism.count_factor
        threshold.follow(count, expected, parts / self._run.fit.accumulate)
        self._ledger.clipping = threshold.state()
        self._specify(self.window.layout)


def specification(
    settings: Settings,
    facts: DataFacts,
    layout: ParameterLayout,
    threshold: AdaptiveThreshold | None,
    noise_multiplier: float,
) -> Mechanism:
    """What a release of these parameters is clipped, noised and charged by."""
    return settings.mechanism_with(
        noise_multiplier,
        max_grad_norm=None if threshold is None else threshold.value,
        layer_sizes=layout.layer_sizes,
        expected_batch_size=facts.expected_batch_size,
    ).for_sum(dimension=layout.numel, examples=facts.expected_batch_size, unit=torch.finfo(layout.dtype).eps / 2)


def _trainable(module: nn.Module) -> Sequence[bool]:
    return [p.requires_grad for p in module.parameters()]
