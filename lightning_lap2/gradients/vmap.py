"""``engine="vmap"``: gradients of many examples at once by ``torch.func``, on the user's unmodified step.

``vmap(grad_and_value(step))`` over chunks of examples. A chunk's gradients are clipped, added to the sum and
dropped, so the memory is chunk x n, not batch x n.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from lightning_lap2.batches import Examples
from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipped_sum import add_clipped_sum
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.marks import Marks
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.physical import check_torch
from lightning_lap2.gradients.step.runner import Traced, UserStep
from lightning_lap2.gradients.step.tracing import check_layers, explain, way_through
from lightning_lap2.gradients.step.whole_batch import seen_by_rules_refused

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


class VmapEngine(Engine):
    """Per-example gradients by ``vmap(grad)`` in chunks.

    Args:
        module: see :class:`Engine`.
        chunk_size: examples per call; ``None``: :func:`choose_chunk`.
    """

    name = "vmap"

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        super().__init__(module, chunk_size=chunk_size)
        self._budget: int | None = None

    def add_clipped(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[Traced]:
        """See :meth:`Engine.add_clipped`."""
        check_torch(self.name)
        check_layers(self.module, step.layers, vmapped=True)
        chunk = self.chunk_size or self._chunk_size(examples.count, layout)
        names, traced = step.slot_names(layout), []
        # a sum of its own where a later chunk may still be refused
        own = total if total is None or examples.count <= chunk else torch.zeros_like(total)
        with way_through(step.layers, layout.device):
            for start in range(0, examples.count, chunk):
                part = examples if chunk >= examples.count else examples.apart(start, start + chunk)
                gradients, found = self._chunk(part, step, names, layout)
                traced.append(found)
                if own is not None:
                    add_clipped_sum(step.revised(start, gradients), layout, clipper, own)
                del gradients
        if total is not None and own is not None and own is not total:
            total += own
        return traced

    def _chunk_size(self, count: int, layout: ParameterLayout) -> int:
        if self._budget is None:
            # asked once: torch keeps what it has freed, so a GPU would seem fuller at every step
            self._budget = memory_budget(layout.device)
        largest = max(layout.sizes, default=0) if layout.device.type == "cpu" else 0
        return choose_chunk(count, layout.numel, largest, self._budget)

    def _chunk(
        self, examples: Examples, step: UserStep, names: list[list[str]], layout: ParameterLayout
    ) -> tuple[Sequence[Tensor], Traced]:
        """Gradients ``[b, *shape]`` per parameter of one chunk, and what was recorded."""
        shared = examples.shared()

        def loss_of(parameters: tuple[Tensor, ...], *leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            by_slot = {name: p for slots, p in zip(names, parameters, strict=True) for name in slots}
            return step(examples.rebuild(leaves, shared), by_slot)

        in_dims = (None, *(0 for _ in examples.tensors))
        function = vmap(grad_and_value(loss_of, has_aux=True), in_dims=in_dims, randomness="different")
        try:
            marks = Marks(examples.tensors, vmapped=True)
            with step.tracing(), marks, seen_by_rules_refused():
                parameters = tuple(layout.whole(k).detach() for k in range(len(layout.parameters)))
                gradients, (_, carried) = function(parameters, *examples.tensors)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if isinstance(error, UnsupportedModelError) or runs_alone(examples, step):
                explain(error, self.module)
            raise
        return gradients, Traced(step.trace, carried)


def runs_alone(examples: Examples, step: UserStep) -> bool:
    """Whether the step runs on one example without ``vmap``, or is refused there too: then the error is not the user's.

    Raises:
        Exception: the user's own error, which names the user's lines and nothing of ``torch.func``.
    """
    step.forget()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is warned of is not this run's matter
            step(examples.example(0))
    except UnsupportedModelError:
        return True
    except Exception as error:
        raise error from None
    finally:
        step.forget()
    return True
