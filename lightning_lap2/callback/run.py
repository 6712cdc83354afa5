"""One fit as values: what it was called with, and what is known of it once its data is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from lightning_lap2.callback.adaptive import AdaptiveThreshold
from lightning_lap2.callback.data import DataFacts, TrainingData
from lightning_lap2.callback.ledger.ledger import Account, Ledger
from lightning_lap2.callback.plan import Plan
from lightning_lap2.callback.probe import Probe
from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.callback.settings import Settings
from lightning_lap2.callback.trainer.patches import Patches
from lightning_lap2.gradients import ParameterLayout
from lightning_lap2.noise import NoiseSource


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What ``trainer.fit`` was called with.

    Attributes:
        pl: the Lightning namespace (``lightning.pytorch`` or ``pytorch_lightning``).
        probe: what an audit places in this fit and sees of it; ``None`` in training.
        patches: of Trainer and module, undone when the fit ends.
    """

    settings: Settings
    account: Account
    trainer: Any
    module: Any
    pl: ModuleType
    probe: Probe | None = None
    patches: Patches = field(default_factory=Patches)

    @property
    def ledger(self) -> Ledger:
        """What this fit is charged to: the callback's, the loaded checkpoint's or the module's."""
        return self.account.ledger

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.trainer.global_rank, self.trainer.world_size)

    @property
    def accumulate(self) -> int:
        """Loader batches of a whole window."""
        return int(self.trainer.accumulate_grad_batches)

    def say(self, text: str) -> None:
        """To the user, once for all ranks."""
        self.pl.utilities.rank_zero_info(f"Lap2Privacy: {text}")

    def warn(self, text: str) -> None:
        """To the user, once for all ranks."""
        self.pl.utilities.rank_zero_warn(f"Lap2Privacy: {text}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A fit whose data and plan stand, and which has made no step.

    Attributes:
        data: of the first epoch; where loaders are made anew, each epoch has its own with the same facts.
        layout: the parameters that are trained at first; a finetuning callback may change which they are.
        planned_steps: optimizer steps, ``inf`` for a run without a last one.
        threshold: of adaptive clipping, else ``None``.
    """

    fit: Fit
    data: TrainingData
    layout: ParameterLayout
    plan: Plan
    planned_steps: float
    threshold: AdaptiveThreshold | None
    noise: NoiseSource

    @property
    def facts(self) -> DataFacts:
        """What is public of the data."""
        return self.data.facts

    @property
    def charges_a_pass(self) -> bool:
        """Whether a charge covers a whole pass over the data."""
        return charged_by_pass(self.fit.settings, self.facts)


def charged_by_pass(settings: Settings, facts: DataFacts) -> bool:
    """Whether a charge covers a whole pass over the data, and not one release."""
    return settings.sampling == "none" and facts.once_per_pass
