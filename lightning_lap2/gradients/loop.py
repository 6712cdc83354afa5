"""``engine="loop"``: plain autograd on the real module, one example at a time.

The slowest engine and the oracle of every gradient test: no ``torch.func``, no functional parameters. It runs what
the others cannot: ``.item()``, branches on data, packed sequences, ``checkpoint(use_reentrant=False)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.gradients.attributes import AttributeGuard
from lightning_lap2.gradients.batches import take_apart
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.contraction import add_clipped_sum
from lightning_lap2.gradients.engine import Engine, StepCall, UnsupportedModelError
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.recorder import Recorder, Trace
from lightning_lap2.gradients.replay import Replay
from lightning_lap2.gradients.tracing import batch_statistics_refused, refuse_layers


class LoopEngine(Engine):
    """One forward and one backward pass per example; ``chunk_size`` has no meaning here.

    Attributes:
        logged_names: every name that ``training_step`` has logged so far.
    """

    name = "loop"

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        super().__init__(module, chunk_size=chunk_size)
        self._recorder = Recorder(module)

    @property
    def logged_names(self) -> frozenset[str]:
        return frozenset(self._recorder.names)

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        """See :meth:`Engine.accumulate`."""
        refuse_layers(self.module, vmapped=False)
        parts = take_apart(call.batch)
        examples = parts.examples(call.views)
        guard = AttributeGuard(self.module, allow_plain=False)
        traces: list[Trace] = []
        try:
            with self._recorder.shadowing(), batch_statistics_refused(), torch.enable_grad():
                for index in range(examples):
                    trace = self._recorder.begin()
                    with call.context():
                        output = self.module.training_step(parts.example(index, call.views), *call.args[1:])  # type: ignore[operator]
                        loss = trace.take_output(output)
                    traces.append(trace)
                    guard.end_call()
                    if loss is not None and loss.requires_grad and call.count > 0:
                        gradients = call.revised(index, _gradients(loss, layout))
                        add_clipped_sum(gradients, layout, clipper, total)
        except BaseException:
            guard.undo()
            raise
        return Replay(traces, [[t[None] for t in trace.tensors] for trace in traces], call.count).run()


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
