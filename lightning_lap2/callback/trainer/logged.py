"""What training has logged: read, and added to at every step.

``log`` checks its arguments, the hook it is called from and the names logged so far at every call, which takes half a
millisecond: more than everything else the callback does in a step. All of that comes out the same at every step of an
epoch, so it is left to ``log`` at the epoch's first step; the others hand the number to the result that ``log`` made
then. From there on Lightning itself carries it to loggers (every ``log_every_n_steps``), progress bar and callbacks.
"""

from __future__ import annotations

from typing import Any

import torch

# what the callback itself logs
EPSILON, THRESHOLD = "privacy/epsilon", "privacy/max_grad_norm"


def _key(name: str) -> str:
    """How Lightning's collection of results calls a value logged in ``on_train_batch_end``."""
    return f"on_train_batch_end.{name}"


_OWN = frozenset({_key(EPSILON), _key(THRESHOLD)})


def count_logged(trainer: Any) -> int:
    """How many values training has logged so far."""
    return len(trainer.fit_loop.epoch_loop._results)


def names_logged(trainer: Any) -> set[str]:
    """Their names, without those of the callback's own."""
    return {result.meta.name for key, result in trainer.fit_loop.epoch_loop._results.items() if key not in _OWN}


class StepValue:
    """``self.log(name, value, on_step=True, on_epoch=False, prog_bar=...)`` of an
    ``on_train_batch_end``, at every training step.

    Not on_epoch: that would be an average over the epoch.

    Args:
        name: as it is logged.
        prog_bar: whether it is on the progress bar.
    """

    def __init__(self, name: str, *, prog_bar: bool = False) -> None:
        self._name, self._prog_bar = name, prog_bar
        self._key = _key(name)
        self._result: Any = None

    def fresh(self) -> StepValue:
        """The same for another fit."""
        return StepValue(self._name, prog_bar=self._prog_bar)

    def log(self, trainer: Any, module: Any, value: float) -> None:
        """Called in every ``on_train_batch_end``, whichever Lightning ``trainer`` and ``module`` come from."""
        results = trainer.fit_loop.epoch_loop._results
        result = results.get(self._key)
        # reset at the end of an epoch: the next step begins anew, as every result does
        if result is None or result is not self._result or result.has_reset:
            module.log(self._name, value, on_step=True, on_epoch=False, prog_bar=self._prog_bar)
            self._result = results.get(self._key)
            return
        tensor = torch.tensor(value, dtype=result.value.dtype, device=result.value.device)
        results.update_metrics(self._key, tensor, 1)
