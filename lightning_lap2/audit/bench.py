"""Short runs of the user's training, each with canaries by coins of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_lap2.batches.generators import seeded_generators
from lightning_lap2.callback.probe import Probe
from lightning_lap2.gradients import ParameterLayout
from lightning_lap2.gradients.trial import Trial
from lightning_lap2.report import PrivacyReport

Array = npt.NDArray[np.float64]

# Set by the audit: a run leaves nothing behind and shows nothing.
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training that is audited.

    Attributes:
        model: makes a fresh LightningModule; called once per run, under the run's own seed.
        loader: the train ``DataLoader``, map-style.
        privacy: arguments of :class:`lightning_lap2.Lap2Privacy`, without ``noise_seed``: the audit gives each run one.
        trainer: arguments of ``lightning.Trainer`` that say how long and how to train (``max_steps``, ``precision``,
            ``accumulate_grad_batches``, ...). Loggers, checkpoints, progress bar and validation are left out.
    """

    model: Callable[[], Any]
    loader: DataLoader[Any]
    privacy: Mapping[str, Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {*QUIET, "callbacks"} & set(self.trainer)
        if own:
            raise ValueError(f"the audit sets the Trainer's {', '.join(sorted(own))} itself: leave them out")
        if self.privacy.get("noise_seed") is not None:
            raise ValueError(
                f"noise_seed={self.privacy['noise_seed']!r} would give all runs one noise: leave it None and give the "
                "audit's seed"
            )


class Bench:
    """Runs one training many times.

    The first run calibrates, checks the module and makes the claim. Further runs have its noise multiplier and its
    number of steps, skip the trial of the step (module and data are the same), and must end with an equal ledger.

    Args:
        training: what is run.
        seed: all randomness of run k is a function of (seed, k).

    Attributes:
        claim: the privacy report of the first run; its ``epsilon`` and ``delta`` are what is audited.
    """

    def __init__(self, training: Training, seed: int) -> None:
        self.training, self.seed = training, seed
        self.claim: PrivacyReport | None = None
        self._trial: Trial | None = None
        self._accountant: Any = None

    def generator(self, run: int) -> np.random.Generator:
        """Coins of run ``run``; independent of its noise and of its initial weights."""
        return np.random.default_rng([self.seed, run, 0])

    def run(
        self, run: int, probe: Probe, *, loader: DataLoader[Any] | None = None, callbacks: Sequence[Any] = ()
    ) -> None:
        """One fit with ``probe`` attached.

        Raises:
            RuntimeError: the ledger differs from the first run's, so the runs have no common claim.
        """
        import lightning.pytorch as pl

        from lightning_lap2.lightning import Lap2Privacy

        noise_seed, model_seed = (
            int(word) for word in np.random.default_rng([self.seed, run, 1]).integers(0, 2**32, size=2)
        )
        privacy = Lap2Privacy(**{**self.training.privacy, **self._fixed_privacy(), "noise_seed": noise_seed})
        probe.trial = self._trial
        privacy.attach(probe)
        with seeded_generators(model_seed), quiet():
            trainer = pl.Trainer(
                **{**self.training.trainer, **self._fixed_trainer(), **QUIET}, callbacks=[privacy, *callbacks]
            )
            trainer.fit(self.training.model(), self.training.loader if loader is None else loader)
        self._trial = probe.trial
        self._agree(privacy)

    def claim_at(self, delta: float | None) -> tuple[float, float]:
        """(delta, claimed epsilon) at ``delta``, or at the training's own."""
        assert self.claim is not None
        if delta is None or delta == self.claim.delta:
            return self.claim.delta, self.claim.epsilon
        return delta, float(self._accountant.epsilon(delta=delta))

    def layout(self) -> ParameterLayout:
        """The trainable parameters of a fresh model."""
        with seeded_generators(self.seed):
            model = self.training.model()
            model.configure_model()
        return ParameterLayout(model)

    def _fixed_privacy(self) -> dict[str, Any]:
        return {} if self.claim is None else {"eps": math.inf, "noise_multiplier": self.claim.noise_multiplier}

    def _fixed_trainer(self) -> dict[str, Any]:
        return {} if self.claim is None else {"max_steps": self.claim.steps, "max_epochs": -1}

    def _agree(self, privacy: Any) -> None:
        if self.claim is None:
            if not privacy.steps:
                raise RuntimeError("the training made no release, so there is nothing to audit: raise max_steps or eps")
            self.claim, self._accountant = privacy.report(), privacy.accountant
        elif privacy.accountant != self._accountant:
            raise RuntimeError(
                f"a run's ledger {privacy.accountant} differs from the first run's {self._accountant}: the audited "
                "runs must be alike; take what varies (early stopping, random schedules) out of the training"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's start-up lines once per run would bury the audit's own."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
