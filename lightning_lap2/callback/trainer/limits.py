"""When training ends: what of it is set from here."""

from __future__ import annotations

from typing import Any

from lightning_lap2.callback.trainer.patches import Patches


def cap_steps(patches: Patches, trainer: Any, last: int) -> None:
    """No global step beyond ``last``, as if by ``max_steps``: schedules built from ``estimated_stepping_batches`` see
    it."""
    patches.shadow(trainer.fit_loop.epoch_loop, "max_steps", last)


def stop(patches: Patches, trainer: Any) -> None:
    """Training ends with this step, whatever the Trainer's minima say."""
    patches.shadow(trainer.fit_loop, "min_epochs", 0)
    patches.shadow(trainer.fit_loop.epoch_loop, "min_steps", None)
    trainer.should_stop = True


class DeferredStop:
    """A stop that was asked for in the midst of a draw waits until the draw is released: how many releases there are
    is a matter of whole draws."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._asked = trainer, False

    def look(self, *, midst: bool) -> None:
        """After a loader batch; ``midst``: of a draw."""
        if midst and self._trainer.should_stop:
            self._asked, self._trainer.should_stop = True, False
        elif not midst and self._asked:
            self._asked, self._trainer.should_stop = False, True
