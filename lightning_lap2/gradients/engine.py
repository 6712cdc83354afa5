"""What an engine is: examples of one shape in, their clipped sum added to a flat vector.

Engines know nothing of noise, accounting or Lightning. They differ in speed, memory and in which models they can
run; their result is the same, and ``engine="loop"`` (plain autograd, one example at a time) is the oracle. None of them
ever shows the user's code more than one example at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.batches import Examples
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.runner import StepRunner, Traced, UserStep
from lightning_lap2.gradients.step.stepcall import StepCall


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
        self._runner: StepRunner | None = None

    @abstractmethod
    def add_clipped(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[Traced]:
        """Adds ``sum_i weight_i * grad_i`` over the examples to ``total`` (``[n]``, fp32 or fp64), once everything has
        run: an engine that raises leaves ``total`` as it was.

        ``grad_i`` is the gradient of the loss that ``training_step`` returns for the batch of example i alone; of its K
        views where it has several. Norms are of exactly the gradient that is summed and accumulated in fp64; sums are
        in ``total.dtype`` and never in TF32 or bf16; a non-finite example adds nothing. Where ``total`` has one entry
        more than n, the clipper's count is added to it.

        Args:
            step: the user's step, for one example's batch, also inside ``vmap``; each pass over it in ``step.tracing``.
            total: ``None`` for an empty draw, whose template runs for its log calls only.

        Returns:
            What was recorded: one entry for each run of the user's code, in the order of the examples.

        Raises:
            IsolationError: one example reached another.
            UnsupportedModelError: naming the layer, line or setting and what to use instead; another engine may do.
        """

    # -- by itself, without a fit ---------------------------------------------------------------------------------

    @property
    def runner(self) -> StepRunner:
        """A runner with this engine alone."""
        if self._runner is None:
            self._runner = StepRunner(self.module, [self])
        return self._runner

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        """See :meth:`StepRunner.accumulate`."""
        return self.runner.accumulate(call, layout, clipper, total)

    @property
    def logged_names(self) -> frozenset[str]:
        """Every name that ``training_step`` has logged so far."""
        return self.runner.logged_names


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
