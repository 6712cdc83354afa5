"""What is set on a Trainer or its module for a while, and undone in one place; which attributes those are, and why,
is in :mod:`~lightning_lap2.callback.trainer.shadows`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lightning_lap2.errors import IsolationError, UnsupportedSettingError
from lightning_lap2.gradients.step.withheld import Withheld

_MISSING = object()


class Patches:
    """Instance attributes set on foreign objects, with what was there before.

    ``undo`` may be called any number of times, after success and after an exception.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def shadow(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name`` on the instance, hiding the class's attribute until :meth:`undo`."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)


def withhold_loss(closure: Any, trainer: Any) -> Any:
    """``closure`` of one batch, as Lightning made it, whose value an optimizer may return and not use.

    Plain training gives the batch's exact loss. A step size made from it (Polyak's, a line search) would carry every
    record into the weights past clipping and noise.
    """
    step = closure._step_fn

    def without_loss() -> Any:
        result = step()
        if result.loss is not None:
            result.loss = Withheld(_closure_refused(trainer.optimizers), UnsupportedSettingError)
        return result

    closure._step_fn = without_loss
    return closure


def _closure_refused(optimizers: Sequence[Any]) -> str:
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    return (
        f"the optimizer {names} (or an optimizer_step override) uses the loss that its closure returns. It is computed "
        "from the records without noise, so a step size or decision made from it is not private and the loss is "
        "withheld: use an optimizer that takes gradients only (SGD, Adam, AdamW)"
    )


@contextmanager
def muted_loggers(trainer: Any, pl: ModuleType) -> Iterator[None]:
    """Dummies in place of the Trainer's loggers while a trial runs the user's step on real records: what it
    computes must not reach a log, not even through ``self.logger.experiment``."""
    loggers = trainer.loggers
    trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


@contextmanager
def withheld_metrics(trainer: Any) -> Iterator[None]:
    """Inside, ``trainer.callback_metrics`` and the like cannot be read: they are computed from earlier batches."""
    before = trainer._logger_connector
    trainer._logger_connector = Withheld(
        "training_step reads the trainer's metrics (callback_metrics, logged_metrics, progress_bar_metrics), which "
        "hold values of earlier batches without noise: fed into a loss they would carry records past clipping and "
        "noise. Watch them in a callback, or compute what the step needs from the weights",
        IsolationError,
    )
    try:
        yield
    finally:
        trainer._logger_connector = before
