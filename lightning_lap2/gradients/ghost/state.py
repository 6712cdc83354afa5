"""Tensors that the user's step leaves on its module.

The step runs once per batch, so lists and counters simply have their plain effect. A floating tensor that is
written anew at each step (a running mean of the loss, a memory bank) is another matter: it holds unclipped data, and
fed back into a later loss it carries examples past the clipping. Metrics keep such state by design and are read
only for logging.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_lap2.gradients.engine import UnsupportedModelError

Kept = dict[str, tuple[Tensor, int]]


def kept_tensors(module: nn.Module) -> Kept:
    """Every floating tensor of ``module``: parameters, buffers, plain attributes; by name, with its version."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(module, "")}


def refuse_written(module: nn.Module, before: Kept) -> None:
    """Compares with the state before the step.

    Raises:
        UnsupportedModelError: naming a tensor that the step wrote in place or replaced by one of the same shape.
    """
    for name, tensor in _tensors(module, ""):
        if name not in before:
            continue  # made on first use: a mask, a table of positions
        old, version = before[name]
        if (tensor is old and tensor._version == version) or tensor.shape != old.shape:
            continue
        raise UnsupportedModelError(
            f"training_step writes {name!r}, which then holds data that no noise protects and could carry examples "
            f"past the clipping into a later loss: update it in on_train_batch_end from public quantities, or drop it"
        )


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
        return
    for held in (vars(module), module._buffers, module._parameters):
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not value.is_inference():
                yield prefix + name, value
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")
