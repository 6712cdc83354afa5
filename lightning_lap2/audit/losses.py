"""The black-box score: how much training lowered the loss on a canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_lap2.callback.trainer.batches import step_arguments, transferred
from lightning_lap2.gradients.step.recorder import Recorder

Array = npt.NDArray[np.float64]


class LossWatch:
    """The losses of some records when training starts and when it has ended.

    Attributes:
        before, after: ``[K]``; NaN where a loss was not finite.
    """

    def __init__(self, records: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.records, self.collate = records, collate
        self.before = self.after = np.full(len(records), np.nan)

    def callback(self) -> Any:
        """A Lightning callback that fills both in."""
        import lightning.pytorch as pl

        watch = self

        class Watch(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                watch.before = record_losses(trainer, pl_module, watch.records, watch.collate)

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                watch.after = record_losses(trainer, pl_module, watch.records, watch.collate)

        return Watch()


def record_losses(trainer: Any, module: Any, records: Sequence[Any], collate: Callable[[list[Any]], Any]) -> Array:
    """``[K]``: the loss that ``training_step`` gives each record alone, in eval mode; nothing is logged.

    A loss that is not finite, or a step that returns none, gives NaN: no score.
    """
    recorder, found = Recorder(module), []
    training = module.training
    module.eval()
    try:
        with recorder.shadowing(), torch.no_grad():
            for record in records:
                trace = recorder.begin()
                arguments = step_arguments(trainer, transferred(trainer, module, collate([record])))
                with trainer.precision_plugin.train_step_context():
                    loss = trace.take_output(module.training_step(*arguments))
                found.append(np.nan if loss is None else float(loss))
    finally:
        module.train(training)
    values = np.asarray(found)
    return np.where(np.isfinite(values), values, np.nan)
