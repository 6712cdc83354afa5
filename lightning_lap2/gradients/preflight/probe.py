"""The user's collate_fn and training_step as functions: records to a batch, a batch to a loss and its
gradient."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.batches import BatchParts, take_apart
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.engine import Engine, full_precision
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.preflight.algebra import Evaluation
from lightning_lap2.gradients.preflight.draws import still
from lightning_lap2.gradients.stepcall import StepCall

Collate = Callable[[list[Any]], Any]
MakeCall = Callable[[Any, int], StepCall]

_PACKAGE = str(Path(__file__).resolve().parents[2])


class Probe:
    """Runs the user's code with constant draws; changes nothing that ``untouched`` does not undo.

    Args:
        module, layout: what is trained.
        collate: a list of records to a batch.
        call: ``call(batch, count)`` is the step call for a batch of ``count`` examples.
        views: rows per example.

    Attributes:
        drew: whether ``training_step`` has asked torch for random numbers.
    """

    def __init__(
        self, module: nn.Module, layout: ParameterLayout, collate: Collate, call: MakeCall, views: int = 1
    ) -> None:
        self.module, self.layout, self.views, self.drew = module, layout, views, False
        self._collate, self._call = collate, call
        self.step = f"{type(module).__name__}.training_step"

    def batch(self, examples: list[list[Any]], seed: int = 0) -> BatchParts:
        """The batch of ``examples``, each given as its ``views`` records.

        Raises:
            UnsupportedModelError: where it has another number of rows, or a single record is not accepted.
        """
        records = [record for views in examples for record in views]
        try:
            with still(seed):
                batch = self._collate(records)
        except Exception as error:
            if len(examples) > 1 or isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(
                f"collate_fn fails on a single record ({where(error)}), and a Poisson draw may hold only "
                f"one: make it accept a list of {'one' if self.views == 1 else 'its views'}"
            ) from None
        parts = take_apart(batch)
        if parts.count != len(records):
            raise UnsupportedModelError(
                f"collate_fn returned {parts.count} rows for {len(records)} records, but the noise covers "
                "one row per record: split, repeat or drop records in the data set, before they are sampled"
            )
        return parts

    def count(self, batch: BatchParts) -> int:
        """Examples in ``batch``."""
        return batch.examples(self.views)

    def select(self, batch: BatchParts, examples: list[int]) -> BatchParts:
        """The batch of the given examples, repeats allowed."""
        return select(batch, [example * self.views + view for example in examples for view in range(self.views)])

    def sum_of(self, engine: Engine, batch: BatchParts, max_grad_norm: float) -> Tensor:
        """The engine's clipped sum ``[n]``."""
        total = self.layout.zeros()
        step_call = self._call(batch.batch, self.count(batch))
        engine.accumulate(step_call, self.layout, FlatClipper(max_grad_norm), total)
        return total

    def low_precision(self, batch: BatchParts) -> bool:
        """Whether parameters or autocast round to fewer bits than fp32."""
        with self._call(batch.batch, self.count(batch)).context():
            autocast = torch.is_autocast_enabled(self.layout.device.type)
        wide = (torch.float32, torch.float64)
        return autocast or any(p.dtype not in wide for p in self.module.parameters() if p.is_floating_point())

    def evaluate(self, batch: BatchParts, seed: int = 0) -> Evaluation:
        """Loss and gradient of one call of ``training_step`` on the whole batch, by plain autograd.

        A step that returns no loss counts as one with an infinite loss: it is not finite.
        """
        with still(seed) as draws, torch.enable_grad(), full_precision():
            step_call = self._call(batch.batch, self.count(batch))
            with step_call.context():
                output = self.module.training_step(*step_call.args)  # type: ignore[operator]
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                return Evaluation(float("inf"), self.layout.zeros())
            gradients = self._gradients(loss)
        self.drew |= draws.any
        return Evaluation(float(loss.detach()), self.layout.flatten(gradients))

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        parameters = self.layout.parameters
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        return [torch.zeros_like(p) if g is None else g for g, p in zip(dense, parameters, strict=True)]

    def evaluate_alone(self, batch: BatchParts) -> Evaluation:
        """:meth:`evaluate` for a batch of one, of whose mates the step may turn out to be in need.

        Raises:
            UnsupportedModelError: naming the type of the error and where it arose.
        """
        try:
            return self.evaluate(batch)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.step} runs on a batch but not on one example alone ({where(error)}): its loss needs "
                "batch mates, but per-example gradients need a loss of each example by itself"
            ) from None


def select(batch: BatchParts, indices: list[int]) -> BatchParts:
    """The batch of the given rows, repeats allowed."""
    tensors = [t[indices] for t in batch.tensors]
    return take_apart(batch.rebuild(tensors, lambda _path, values: [values[i] for i in indices]))


def where(error: Exception) -> str:
    """Type and place of an error, without its text, which may quote data: the user's innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_PACKAGE)]
    frame = (users or frames)[-1]
    return f"{type(error).__name__} in {frame.name}, line {frame.lineno} of {Path(frame.filename).name}"
