"""What un-noised training values steer while training runs: refused, or named in the report."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from lightning_lap2.callback import checks
from lightning_lap2.callback.ledger.ledger import Ledger
from lightning_lap2.callback.trainer.logged import count_logged, names_logged


class FeedbackWatch:
    """Callbacks and schedulers that watch a metric, against the names that the training step logs.

    Args:
        trainer: whose callbacks and schedulers are looked at, once.
        allowed: ``Lap2Privacy(allow_feedback=...)``: what is found is a caveat then, not an error.
    """

    def __init__(self, trainer: Any, ledger: Ledger, *, allowed: bool) -> None:
        self._trainer, self._ledger, self._allowed = trainer, ledger, allowed
        self._watched: dict[str, str] = checks.monitors(trainer)
        self._logged = 0

    def check(self, logged: AbstractSet[str], *, refuse: bool = True) -> None:
        """Raises or notes for each name in ``logged`` that something watches.

        Raises:
            UnsupportedSettingError: naming what watches which metric, or a name that is the ledger's.
        """
        checks.check_names(logged)
        sentences = checks.feedback(self._watched, logged)
        if refuse and not self._allowed:
            checks.check_unwatched(sentences)
        for sentence in sentences:
            self._ledger.add_caveat(f"{sentence}, which is computed from training data without noise")

    def check_logged(self, *, refuse: bool = True) -> None:
        """The same for the names that training has logged so far, beyond those that the trial of the step saw.

        Args:
            refuse: False once training is over: what was watched is then only noted in the report.
        """
        logged = count_logged(self._trainer)
        if logged == self._logged:
            return
        self._logged = logged
        self.check(names_logged(self._trainer), refuse=refuse)
