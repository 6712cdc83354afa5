"""What the user's step leaves on its module.

The step runs once per batch here, on real values. A tensor or a float that it keeps (a running mean of the loss, a
memory bank, a list of losses) holds unclipped data, and fed back into a later loss it carries examples past the
clipping. So both are refused, wherever they are kept on the module. Allowed are counters and flags (integers,
booleans, strings) and tensors kept as attributes that were not there before (a mask made on first use): replaced at a
later step they are refused. Metrics keep state by design and are read only for logging.

Not seen: an integer that was computed from the data, and what a step keeps in globals, closures or objects of other
classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_lap2.gradients.engine import UnsupportedModelError

# Lightning's own on a LightningModule, and what is walked by itself
_SKIPPED = {"_trainer", "_fabric", "_parameters", "_buffers", "_modules"}

Kept = dict[str, tuple[Tensor | float, int]]


def kept_values(module: nn.Module) -> Kept:
    """Every floating tensor and every float of ``module``, at any depth of its containers: by name, with the tensor's
    version."""
    return {name: (value, _version(value)) for name, value in _values(module, "self")}


def refuse_written(module: nn.Module, before: Kept) -> None:
    """Compares with the state before the step.

    Raises:
        UnsupportedModelError: naming what the step wrote in place, replaced or added to a container.
    """
    for name, value in _values(module, "self"):
        old, version = before.get(name, (None, 0))
        if old is value and version == _version(value):
            continue
        if old is None and not name.endswith("]"):
            continue
        raise UnsupportedModelError(
            f"training_step writes {name}, which then holds data that no noise protects and could carry examples "
            f"past the clipping into a later loss: use self.log, or update it in on_train_batch_end from public "
            f"quantities"
        )


def _version(value: Tensor | float) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _values(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor | float]]:
    if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
        return
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_floating_point() and not tensor.is_inference():
                yield f"{path}.{name}", tensor
    for name, value in vars(module).items():
        if not name.startswith("__") and name not in _SKIPPED and not isinstance(value, nn.Module):
            yield from _inside(value, f"{path}.{name}")
    for name, child in module._modules.items():
        if child is not None:
            yield from _values(child, f"{path}.{name}")


def _inside(value: Any, path: str) -> Iterator[tuple[str, Tensor | float]]:
    """``value`` itself or, in containers, what it holds."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_inference():
            yield path, value
    elif isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _inside(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | deque | set):
        for index, inner in enumerate(value):
            yield from _inside(inner, f"{path}[{index}]")
