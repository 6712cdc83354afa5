"""Runs the user's step on a few records: which engine takes it, and how it will differ from plain training.

Isolation does not rest on this. Every engine shows the step one example at a time whatever is found here; but a loss
that needs its batch mates then trains otherwise than its author means, and that is better said before the first step.

Nothing that depends on the values of the records reaches a message, a log or an attribute: messages hold names and
lines. That a run is refused, or gets a note, is itself a fact about the records looked at.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.engine import full_precision
from lightning_lap2.gradients.exchange import OtherRankError
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.recorder import Trace
from lightning_lap2.gradients.step.runner import StepRunner
from lightning_lap2.gradients.step.stepcall import StepCall
from lightning_lap2.gradients.trial.draws import still
from lightning_lap2.gradients.trial.state import untouched

# relative difference between a batch's gradient and the mean of its examples', in fp32 and with as few as 8 bits
_TOLERANCE, _LOW_PRECISION = 1e-3, 5e-2
_PACKAGE = str(Path(__file__).resolve().parents[2])

SUMMED = (
    "training_step returns the sum of its examples' losses, not their mean; the private gradient is divided "
    "by the expected batch size all the same, so the learning rate acts as it does for a mean"
)
DIFFERENT = (
    "the gradient of a batch is not the mean of its examples' gradients (a mean over tokens, class weights, pairs, "
    "mixup or statistics of the batch?); privately each example's loss is computed from that example alone, so "
    "training differs from plain training in this"
)
RAGGED = (
    "the batches that collate_fn makes of single records have different shapes, and each shape runs by itself: a draw "
    "with many of them is slow. Let collate_fn pad each record to a multiple of some length (pad_to_multiple_of)"
)


@dataclass(frozen=True)
class Trial:
    """What the trial learnt.

    Attributes:
        notes: sentences for the user and the report.
        random: ``training_step`` draws random numbers, so that equal records may differ in it.
        logged_names: every name that it logged.
    """

    notes: tuple[str, ...] = ()
    random: bool = False
    logged_names: frozenset[str] = frozenset()


def try_step(runner: StepRunner, layout: ParameterLayout, call: StepCall, plain: tuple[Any, ...] | None) -> Trial:
    """Runs the step on the examples of ``call``, spending none of the data: nothing is kept, logged or counted.

    Costs four passes over them, a flat gradient or two, and a copy of the module's tensors.

    Args:
        call: of a few examples, as training will make them.
        plain: the step's arguments for all of them in one batch, as plain training would make it; ``None`` where
            the user's ``collate_fn`` could not.

    Raises:
        UnsupportedModelError: no engine takes the step; it runs on a batch and not on one example; or no example has a
            gradient by itself although the batch has one (a contrastive loss).
        Exception: whatever the user's own code raises for a whole batch.
    """
    with runner.comparing():
        return _try(runner, layout, call, plain)


def _try(runner: StepRunner, layout: ParameterLayout, call: StepCall, plain: tuple[Any, ...] | None) -> Trial:
    module = runner.module
    with untouched(module):
        try:
            gradient = _alone(runner, layout, call)
            # and again, where what the first pass left on the module may be in the way
            _alone(runner, layout, call)
        except (UnsupportedModelError, OtherRankError):
            raise
        except Exception as error:
            if plain is not None and not layout.among_others and _runs(module, call, plain):
                raise UnsupportedModelError(
                    f"{type(module).__name__}.training_step runs on a batch but not on one example alone "
                    f"({where(error)}): private training takes each example's gradient by itself, so the loss must be "
                    "one that a single example has"
                ) from error
            raise
    found = Trial()
    if layout.everywhere(plain is not None) and plain is not None:
        with untouched(module):
            found = _compare(runner, layout, call, plain, gradient)
    ragged = (RAGGED,) if len(call.examples.groups) > 1 else ()
    return replace(found, notes=(*found.notes, *ragged), logged_names=runner.logged_names)


def _alone(runner: StepRunner, layout: ParameterLayout, call: StepCall) -> Tensor:
    """Sum of the examples' gradients, unclipped: ``[n]``. Examples without a finite one add nothing."""
    total = layout.zeros()
    runner.accumulate(call, layout, FlatClipper(float("inf")), total)
    return total


def _runs(module: nn.Module, call: StepCall, plain: tuple[Any, ...]) -> bool:
    try:
        with call.context():
            module.training_step(*plain)  # type: ignore[operator]
    except Exception:
        return False
    return True


def _compare(
    runner: StepRunner, layout: ParameterLayout, call: StepCall, plain: tuple[Any, ...], gradient: Tensor
) -> Trial:
    """Plain autograd on the whole batch against the examples one by one, every draw of torch a constant."""
    module = runner.module
    with still(0) as draws, runner.recording() as trace:
        try:
            with layout.meeting():
                whole = _gradient(module, layout, call, plain, trace)
        except Exception:  # the batch as a whole may be what the step cannot take; its examples did run
            return Trial(random=draws.any)
    if layout.scattered:  # no rank has room for the whole gradient of a batch
        runner.learn(trace)
        return Trial(random=draws.any)
    if not layout.everywhere(whole is not None and bool(torch.isfinite(whole).all())) or whole is None:
        return Trial(random=draws.any)
    if not layout.everywhere(not draws.any):
        with still(0):
            gradient = _alone(runner, layout, replace(call, key=b"trial"))
    runner.learn(trace)
    size = float(whole.double().norm())
    if size > 0 and not bool(gradient.any()):
        raise UnsupportedModelError(
            f"the loss of {type(module).__name__}.training_step has no gradient for any example alone, only for a "
            "batch (a contrastive loss, pairs within the batch?): private training takes each example's gradient by "
            "itself, so nothing would be learnt; use a loss of single examples, with several views in one record"
        )
    tolerance = _LOW_PRECISION if _low_precision(module, layout, call) else _TOLERANCE
    if _near(whole, gradient / call.count, tolerance * size):
        return Trial(random=draws.any)
    note = SUMMED if _near(whole, gradient, tolerance * size) else DIFFERENT
    return Trial((note,), random=draws.any)


def _gradient(
    module: nn.Module, layout: ParameterLayout, call: StepCall, plain: tuple[Any, ...], trace: Trace
) -> Tensor | None:
    """Gradient ``[n]`` of one call of ``training_step`` on the whole batch, recorded; ``None`` without a loss."""
    with torch.enable_grad(), full_precision():
        with call.context():
            loss = trace.take_output(module.training_step(*plain))  # type: ignore[operator]
        if loss is None or not loss.requires_grad or layout.scattered:
            return None
        leaves = layout.leaves()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    return layout.flatten([torch.zeros_like(p) if g is None else g for g, p in zip(dense, leaves, strict=True)])


def _near(a: Tensor, b: Tensor, distance: float) -> bool:
    return float((a.double() - b.double()).norm()) <= distance


def _low_precision(module: nn.Module, layout: ParameterLayout, call: StepCall) -> bool:
    """Whether parameters or autocast round to fewer bits than fp32."""
    with call.context():
        autocast = torch.is_autocast_enabled(layout.device.type)
    wide = (torch.float32, torch.float64)
    return (
        autocast
        or layout.in_low_precision
        or any(p.dtype not in wide for p in module.parameters() if p.is_floating_point())
    )


def identical_views(batch: ExampleBatch) -> bool:
    """Whether the views of every example are the same to the bit: tensors ``[n, K, ...]`` do not differ along K."""
    return all(bool((t == t[:, :1]).all()) for group in batch for t in group.tensors if t.dim() > 1 and t.shape[1] > 1)


def where(error: Exception) -> str:
    """Type and place of an error, without its text, which may quote data: the user's innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_PACKAGE)]
    frame = (users or frames)[-1]
    return f"{type(error).__name__} in {frame.name}, line {frame.lineno} of {Path(frame.filename).name}"
