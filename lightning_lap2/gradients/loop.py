"""``engine="loop"``: plain autograd on the real module, one example at a time.

The slowest engine and the oracle of every gradient test: no ``torch.func``, no functional parameters. It runs what
the others cannot: ``.item()``, branches on data, packed sequences, ``checkpoint(use_reentrant=False)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lap2.batches import Examples
from lightning_lap2.errors import IsolationError, UnsupportedModelError
from lightning_lap2.gradients.clipped_sum import add_clipped_sum
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.marks import Marks
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.runner import Traced, UserStep


class LoopEngine(Engine):
    """One forward and one backward pass per example; ``chunk_size`` has no meaning here."""

    name = "loop"

    def add_clipped(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[Traced]:
        """See :meth:`Engine.add_clipped`."""
        own = total if total is None or examples.count == 1 else torch.zeros_like(total)
        traced: list[Traced] = []
        first: tuple[Tensor, bytes] | None = None
        for index in range(examples.count):
            loss, carried = _run(examples, index, step)
            if first is None and examples.count > 1:
                first = loss.detach(), step.secret
            if loss.requires_grad and own is not None:
                gradients = step.revised(index, _gradients(loss, layout))
                add_clipped_sum(gradients, layout, clipper, own)
            traced.append(Traced(step.trace, [t[None] for t in carried]))
        if first is not None:
            _check_repeatable(examples, step, *first)
        if total is not None and own is not None and own is not total:
            total += own
        return traced


def _run(
    examples: Examples, index: int, step: UserStep, *, again: bool | bytes = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    one = examples.apart(index, index + 1)
    with step.tracing(together=False, again=again), Marks(one.roots, vmapped=False):
        return step(one.example(0))


def _check_repeatable(examples: Examples, step: UserStep, loss: Tensor, secret: bytes) -> None:
    """The first example once more, behind all others and with its own random numbers: its loss must not have moved.

    Under ``vmap`` Python values cannot depend on an example. Here they can, and where a step keeps them out of the
    guards' sight (a closure over a generator, a cache of ``functools``, a file) one example would move the next one's
    gradient.

    Raises:
        IsolationError: it has moved.
    """
    trace = step.trace
    repeated, _ = _run(examples, 0, step, again=secret)  # with gradients: a step may take some of its own
    step.keep(trace)
    if not torch.allclose(repeated.detach(), loss, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise IsolationError(
            "training_step gives another loss for an example that it has seen before: it keeps something from one "
            "call to the next where it cannot be watched (a cache of a function, a generator of random numbers that "
            "is not made anew in the step, a file, a counter in a library's object). So one example moves the "
            "gradients of those behind it: keep nothing between calls, and draw from torch's, numpy's or Python's "
            "own generators"
        )


def _gradients(loss: Tensor, layout: ParameterLayout) -> list[Tensor]:
    """Gradients ``[1, *shape]`` of one example, zeros where the loss does not use a parameter."""
    try:
        leaves = layout.leaves()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise UnsupportedModelError(
                "activation checkpointing with use_reentrant=True cannot give gradients of one example; use "
                "checkpoint(..., use_reentrant=False), in Hugging Face models "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            ) from error
        raise
    return [
        torch.zeros(1, *p.shape, dtype=p.dtype, device=layout.device)
        if g is None
        else (g.to_dense() if g.is_sparse else g)[None]
        for g, p in zip(found, leaves, strict=True)
    ]
