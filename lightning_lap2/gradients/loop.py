"""``engine="loop"``: plain autograd on the real module, one example at a time.

The slowest engine and the oracle of every gradient test: no ``torch.func``, no functional parameters. It runs what
the others cannot: ``.item()``, branches on data, packed sequences, ``checkpoint(use_reentrant=False)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lap2.batches import Examples
from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.contraction import add_clipped_sum
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.marks import Marks
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.runner import Traced, UserStep


class LoopEngine(Engine):
    """One forward and one backward pass per example; ``chunk_size`` has no meaning here."""

    name = "loop"

    def add_clipped(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[Traced]:
        """See :meth:`Engine.add_clipped`."""
        own = total if total is None or examples.count == 1 else torch.zeros_like(total)
        traced = []
        for index in range(examples.count):
            one = examples.apart(index, index + 1)
            with step.tracing(together=False), Marks(one.roots, vmapped=False):
                loss, carried = step(one.example(0))
            if loss.requires_grad and own is not None:
                gradients = step.revised(index, _gradients(loss, layout))
                add_clipped_sum(gradients, layout, clipper, own)
            traced.append(Traced(step.trace, [t[None] for t in carried]))
        if total is not None and own is not None and own is not total:
            total += own
        return traced


def _gradients(loss: Tensor, layout: ParameterLayout) -> list[Tensor]:
    """Gradients ``[1, *shape]`` of one example, zeros where the loss does not use a parameter."""
    try:
        found = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise UnsupportedModelError(
                "activation checkpointing with use_reentrant=True cannot give gradients of one example; use "
                "checkpoint(..., use_reentrant=False), in Hugging Face models "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            ) from error
        raise
    return [
        torch.zeros_like(p)[None] if g is None else (g.to_dense() if g.is_sparse else g)[None]
        for g, p in zip(found, layout.parameters, strict=True)
    ]
