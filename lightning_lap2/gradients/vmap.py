"""``engine="vmap"``: gradients of many examples at once by ``torch.func``, on the user's unmodified step.

``vmap(grad_and_value(step))`` over chunks of examples. A chunk's gradients are clipped, added to the sum and
dropped, so the memory is chunk x n, not batch x n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from lightning_lap2.gradients.attributes import AttributeGuard
from lightning_lap2.gradients.batches import BatchParts, take_apart, untouchable
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.contraction import add_clipped_sum
from lightning_lap2.gradients.engine import Engine, StepCall
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.recorder import Recorder, Trace
from lightning_lap2.gradients.replay import Replay
from lightning_lap2.gradients.tracing import batch_statistics_refused, explain, refuse_layers, way_through

# glibc serves blocks below this from memory it keeps; larger ones are new pages each time, which must be cleared
KEPT_BLOCK = 2**25 - 2**16


def choose_chunk(count: int, numel: int, largest: int, budget: int) -> int:
    """Examples per call of ``vmap``, in chunks of nearly equal size.

    Per-example gradients take ``4 * numel`` bytes each and their backward pass about as much again. Few large
    calls are fastest while that fits: chunks of 8 made a small CNN's step four times slower than the whole batch.
    The exception is a wide model on a CPU, where most of the time goes into writing gradients: up to half is saved
    if each of a chunk's gradients is small enough for the allocator to reuse.

    Args:
        count: examples in the batch, at least 1.
        numel: trainable scalars.
        largest: scalars of the largest parameter; 0 where the allocator keeps blocks of every size (a GPU).
        budget: bytes that a chunk's gradients may take.
    """
    most = max(1, budget // max(1, 8 * numel))
    reusable = KEPT_BLOCK // (4 * largest) if largest else most
    if reusable >= 4:  # fewer per call cost more than they save
        most = min(most, reusable)
    return math.ceil(count / math.ceil(count / most))


def memory_budget(device: torch.device) -> int:
    """Bytes for one chunk's gradients: a quarter of what a GPU has free; 1 GiB elsewhere, since a CPU gains nothing
    by more and the operating system must first clear every page."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 4
    return 2**30


class _Step(nn.Module):
    """The user's module as a child, its ``training_step`` as ``forward``: what ``functional_call`` needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)  # type: ignore[operator]


class VmapEngine(Engine):
    """Per-example gradients by ``vmap(grad)`` in chunks.

    Args:
        module: see :class:`Engine`.
        chunk_size: examples per call; ``None``: :func:`choose_chunk`.

    Attributes:
        logged_names: every name that ``training_step`` has logged so far.
    """

    name = "vmap"

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        super().__init__(module, chunk_size=chunk_size)
        self._recorder = Recorder(module)
        self._step = _Step(module)
        self._budget: int | None = None

    @property
    def logged_names(self) -> frozenset[str]:
        return frozenset(self._recorder.names)

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        """See :meth:`Engine.accumulate`."""
        refuse_layers(self.module, vmapped=True)
        parts = take_apart(call.batch)
        examples = parts.examples(call.views)
        by_example = [t.unflatten(0, (examples, call.views)) for t in parts.tensors]
        chunk = self.chunk_size or self._chunk_size(examples, layout)
        guard = AttributeGuard(self.module, allow_plain=True)
        names = _slot_names(self.module, layout)
        traces: list[Trace] = []
        carried: list[Sequence[Tensor]] = []
        try:
            with (
                self._recorder.shadowing(),
                batch_statistics_refused(),
                way_through(self.module, layout.device),
                torch.enable_grad(),
            ):
                for start in range(0, examples, chunk):
                    guard.begin_call()
                    rows = [t[start : start + chunk] for t in by_example]
                    gradients, aux = self._chunk(call, parts, rows, names, layout)
                    guard.end_call()
                    traces.append(self._recorder.trace)
                    carried.append(aux)
                    if call.count > 0:
                        add_clipped_sum(call.revised(start, gradients), layout, clipper, total)
                    del gradients
        except BaseException:
            guard.undo()
            raise
        guard.close()
        return Replay(traces, carried, call.count).run()

    def _chunk_size(self, count: int, layout: ParameterLayout) -> int:
        if self._budget is None:
            # asked once: torch keeps what it has freed, so a GPU would seem fuller at every step
            self._budget = memory_budget(layout.device)
        largest = max(layout.sizes, default=0) if layout.device.type == "cpu" else 0
        return choose_chunk(count, layout.numel, largest, self._budget)

    def _chunk(
        self, call: StepCall, parts: BatchParts, rows: list[Tensor], names: list[list[str]], layout: ParameterLayout
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Gradients ``[b, *shape]`` per parameter and the carried-out tensors ``[b, ...]`` of one chunk, whose
        ``rows`` are ``[b, views, ...]``."""
        others = call.args[1:]

        def step(parameters: tuple[Tensor, ...], *row: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            trace = self._recorder.begin()
            batch = parts.rebuild(row, untouchable)
            by_slot = {name: p for slots, p in zip(names, parameters, strict=True) for name in slots}
            with call.context():
                output = functional_call(self._step, by_slot, (batch, *others), tie_weights=False)
                loss = trace.take_output(output)
            if loss is None:
                loss = torch.zeros((), device=layout.device)
            return loss, tuple(trace.tensors)

        in_dims = (None, *(0 for _ in rows))
        function = vmap(grad_and_value(step, has_aux=True), in_dims=in_dims, randomness="different")
        try:
            gradients, (_, aux) = function(tuple(p.detach() for p in layout.parameters), *rows)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._runs_alone(call, parts):
                explain(error, self.module)
            raise
        return gradients, aux

    def _runs_alone(self, call: StepCall, parts: BatchParts) -> bool:
        """Whether the step runs on one example without ``vmap``: then the error is not the user's."""
        self._recorder.begin()
        try:
            with call.context():
                self.module.training_step(parts.example(0, call.views), *call.args[1:])  # type: ignore[operator]
        except Exception:
            return False
        return True


def _slot_names(module: nn.Module, layout: ParameterLayout) -> list[list[str]]:
    """For each parameter the names of all its slots as children of :class:`_Step`, each slot once.

    A module that is reachable by two paths has one name here. With ``functional_call``'s own tying every path would
    be swapped, the second time for the traced tensor of the first, which would then stay in the user's module.
    """
    prefix = {
        id(owner): f"module.{path}." if path else "module."
        for path, owner in module.named_modules(remove_duplicate=True)
    }
    return [[prefix[id(owner)] + attribute for owner, attribute in slots] for slots in layout.slots]
