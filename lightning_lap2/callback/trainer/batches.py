"""From a loader's batch to the arguments of ``training_step``, as Lightning itself goes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


def transferred(trainer: Any, module: Any, batch: Any) -> Any:
    """``batch`` in the Trainer's precision and on its device, through the batch transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._call_batch_hook("on_before_batch_transfer", batch, 0)
    return module._apply_batch_transfer_handler(batch, device=trainer.strategy.root_device, dataloader_idx=0)


def step_arguments(trainer: Any, batch: Any) -> tuple[Any, ...]:
    """``(batch,)``, or ``(batch, batch_idx)`` where the step takes both."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())
