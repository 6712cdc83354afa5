"""What an engine is: one loader batch in, its clipped sum added to a flat vector, the step's output back.

Engines know nothing of noise, accounting or Lightning. They differ in speed, memory and in which models they can
run; their result is the same, and ``engine="loop"`` (plain autograd, one example at a time) is the oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.parameters import ParameterLayout


class UnsupportedModelError(RuntimeError):
    """The model, batch or loss cannot be trained privately as it is; the message says what to change."""


Revise = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class StepCall:
    """One call of the user's ``training_step(batch, batch_idx, ...)``.

    Attributes:
        args: the arguments, ``args[0]`` is the batch on the right device.
        count: how many examples the batch holds. 0 marks an empty draw: the batch is then a template of one
            record, run for its log calls only; it must add nothing to the sum.
        views: rows per example, side by side: example i is rows ``i * views`` to ``(i + 1) * views - 1``.
        context: entered around the user's code (autocast of the precision plugin).
        revise: ``None`` in training. An audit's ``revise(first, gradients)`` gives what is clipped and summed in
            place of the gradients ``[b, *shape]`` (one tensor per parameter) of examples first .. first + b - 1.
    """

    args: tuple[Any, ...]
    count: int
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    views: int = 1
    revise: Revise | None = None

    @property
    def batch(self) -> Any:
        return self.args[0]

    def revised(self, first: int, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """``gradients``, or what an audit puts in their place."""
        return gradients if self.revise is None else self.revise(first, gradients)


class Engine(ABC):
    """Computes clipped sums of per-example gradients of ``module.training_step``.

    Args:
        module: the LightningModule (any ``nn.Module`` with ``training_step``; ``log`` is shadowed while tracing).
        chunk_size: examples per call where the engine works in chunks; ``None``: chosen by the engine.
    """

    name: str

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        self.module = module
        self.chunk_size = chunk_size

    @abstractmethod
    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        """Adds ``sum_i weight_i * grad_i`` over the batch's examples to ``total`` (``[n]``, fp32 or fp64).

        Each ``grad_i`` is the gradient of the loss that ``training_step`` returns for example i alone (for
        engines that run the whole batch: of its share of the batch loss times the batch size). Example i alone is
        a batch of its ``call.views`` rows, so that a mean loss gives the mean of the views' gradients. Norms are of
        exactly the gradient that is summed and accumulated in fp64; sums are in ``total.dtype`` and never in TF32
        or bf16; a non-finite example adds nothing. Where ``total`` has one entry more than n, the clipper's count is
        added to it.

        Returns what ``training_step`` would have returned for the batch, detached: a 0-dim loss tensor, a
        mapping with ``"loss"``, or ``None``. The module's parameters, their ``.grad`` and its attributes are
        left as they were.

        Raises:
            UnsupportedModelError: naming the layer, line or setting and what to use instead.
        """


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 matrix products without TF32 or bf16 inside: ``torch.set_float32_matmul_precision`` is a user's
    setting for the model, and would let a clipped gradient exceed C by 1e-3."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
