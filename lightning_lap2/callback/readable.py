"""A callback apart from its hooks: what it was given, what it has spent, and what can be read of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.accounting.selection import RunLimit
from lightning_lap2.callback.adaptive import current_threshold
from lightning_lap2.callback.ledger.ledger import Account, Ledger
from lightning_lap2.callback.preparing import Preparing
from lightning_lap2.callback.probe import Probe
from lightning_lap2.callback.reporting import make_report
from lightning_lap2.callback.session import FitSession
from lightning_lap2.callback.settings import Settings
from lightning_lap2.callback.trainer.logged import EPSILON, THRESHOLD, StepValue
from lightning_lap2.choices import (
    Bound,
    ClippingName,
    EngineName,
    MechanismName,
    NoiseSourceName,
    OnRecordError,
    Sampling,
)
from lightning_lap2.report import PrivacyReport


class Readable:
    """The part of :class:`lightning_lap2.Lap2Privacy` that knows no Trainer."""

    is_lap2_privacy = True

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
        self._preparing: Preparing | None = None
        self._session: FitSession | None = None
        self._directory: Path | None = None
        self._probe: Probe | None = None
        self._logged = StepValue(EPSILON, prog_bar=True)
        self._logged_threshold = StepValue(THRESHOLD)

    @property
    def state_key(self) -> str:
        """Of the ledger in a checkpoint: one name for subclasses and in both namespaces, so that each finds it."""
        return "Lap2Privacy"

    @property
    def _ledger(self) -> Ledger:
        return self._account.ledger

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a fit that goes on stays with its own callback. A copy in this process shares ledger
        and facts; one from a pickle has them as they were."""
        own = {
            "_preparing": None,
            "_session": None,
            "_logged": self._logged.fresh(),
            "_logged_threshold": self._logged_threshold.fresh(),
        }
        # Lightning lends a callback its module's log and log_dict for each fit
        return {name: value for name, value in {**vars(self), **own}.items() if name not in ("log", "log_dict")}

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
        return session.layout.numel if session else int(self._fact("dimension"))

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
        return session.releases.spending.epsilon if session else self._ledger.epsilon()

    @property
    def accountant(self) -> MajorizedAccountant:
        return self._ledger.accountant

    def report(self) -> PrivacyReport:
        """What is guaranteed so far, and what is not."""
        return make_report(self.settings, self._ledger, self._account.facts)

    def _fact(self, name: str) -> Any:
        if self._account.facts is None:
            raise RuntimeError(f"{name} is known once fit has started")
        return getattr(self._account.facts, name)

    def attach(self, probe: Probe | None) -> None:
        """Lets an audit place canaries in the next fits and see their releases; ``None`` takes it off again."""
        self._probe = probe


def keep_within(privacy: Readable, limit: RunLimit) -> None:
    """Has a callback that was never fitted keep ``limit``, which is one for all runs of a search, in place of eps and
    delta."""
    privacy.settings = replace(privacy.settings, run_limit=limit)
    privacy._account = Account(Ledger(privacy.settings))
