"""The trainable scalars of a module in one flat order.

Everything that is clipped, summed, noised and written to ``.grad`` uses this order. n, the dimension that the
accountant is told, is its length: each trainable scalar counts once, however many names lead to it (tied weights).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors


class ParameterLayout:
    """Flat layout of ``requires_grad`` parameters, tied ones once.

    Attributes:
        names: one name per parameter, the first that ``named_parameters`` gives.
        parameters: the parameters themselves, in the same order.
        slots: for each parameter every (module, attribute name) that holds it; more than one when tied.
        sizes, offsets: numel of each parameter and where it starts in the flat vector.
        numel: n, the number of trainable scalars.
        layers: for each parameter the number of the module that owns it (weight and bias together), counted from 0
            in the order of first appearance; a tied parameter belongs to its first owner.
        layer_sizes: trainable scalars of each layer.
    """

    def __init__(self, module: nn.Module) -> None:
        slots: dict[int, list[tuple[nn.Module, str]]] = {}
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        for prefix, owner in module.named_modules(remove_duplicate=True):
            for attribute, parameter in owner._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in slots:
                    slots[id(parameter)] = []
                    self.names.append(f"{prefix}.{attribute}" if prefix else attribute)
                    self.parameters.append(parameter)
                slots[id(parameter)].append((owner, attribute))
        self.slots = [slots[id(p)] for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        self.offsets = [0]
        for size in self.sizes:
            self.offsets.append(self.offsets[-1] + size)
        self.numel = self.offsets[-1]
        numbers: dict[int, int] = {}
        self.layers = tuple(numbers.setdefault(id(own[0][0]), len(numbers)) for own in self.slots)
        layer_sizes = [0] * len(numbers)
        for size, layer in zip(self.sizes, self.layers, strict=True):
            layer_sizes[layer] += size
        self.layer_sizes = tuple(layer_sizes)

    # -- where parameters are while a step runs: here every rank has them whole, see sharding -------------------------

    among_others = False
    """Whether a pass over the user's code takes part in what other ranks do."""
    scattered = False
    """Whether ranks hold different parts of some trainable parameters."""
    in_low_precision = False
    """Whether a pass computes in fewer bits than the parameters have."""
    own = 0
    """Entries of the flat vector of sums, its first, that are this rank's shards."""
    replicas: Any = None
    """The process group of the ranks that hold the same shards; ``None`` where no two do."""
    contributions = 0
    """How often something was added to sums that other ranks hold, which cannot be taken back."""

    def again(self, module: nn.Module) -> ParameterLayout:
        """The layout of what is trainable now."""
        return ParameterLayout(module)

    def meeting(self, total: Tensor | None = None) -> AbstractContextManager[None]:
        """Around what all ranks do together; ``total``: the flat vector that their sums go into."""
        return nullcontext()

    def everywhere(self, fact: bool) -> bool:
        """Whether it holds on all ranks that have to do the same; asked by all of them, outside a meeting."""
        return fact

    def begin_pass(self) -> None:
        """Before each pass over the user's code."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Inside, modules hold the parameters that they hold between steps."""
        return nullcontext()

    def leaves(self) -> Sequence[Tensor]:
        """For each parameter the tensor that the graph of a pass ends in."""
        return self.parameters

    def whole(self, number: int) -> Tensor:
        """A parameter with all its entries, until the end of the pass."""
        return self.parameters[number]

    def hold(self) -> None:
        """From here to the end of the pass no weights are freed."""

    def summand(self, views: Sequence[Tensor], number: int) -> AbstractContextManager[Tensor]:
        """What is added to one parameter's sum, in that parameter's shape; ``views`` of the flat vector of sums."""
        return nullcontext(views[number])

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Entries of the flat vector of sums on this rank."""
        return self.numel

    @property
    def dtype(self) -> torch.dtype:
        """The type sums and noise are kept in: fp32, or fp64 where the parameters are fp64."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def zeros(self, beside: int = 0) -> Tensor:
        """A flat vector ``[held + beside]`` of zeros; unless parameters are sharded, ``held`` is n."""
        return torch.zeros(self.held + beside, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` (``[n]``, or longer), one per parameter and in its shape."""
        flat = flat[: self.numel]
        if 0 in self.sizes:  # for which torch's own helper forgets the shape
            pieces = zip(self.parameters, flat.split(self.sizes), strict=True)
            return [piece.view(p.shape) for p, piece in pieces]
        return list(_unflatten_dense_tensors(flat, self.parameters))

    def write_grads(self, flat: Tensor) -> None:
        """Sets every trainable parameter's ``.grad`` from ``flat`` (``[n]``), sharing memory where types agree."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`views`: one flat ``[n]`` vector in :attr:`dtype`."""
        return torch.cat([t.reshape(-1).to(self.dtype) for t in tensors]) if tensors else self.zeros()


def make_layout(module: nn.Module) -> ParameterLayout:
    """The layout of a module, whole on every rank or sharded by ``fully_shard``, whose weights are in shards then.

    Raises:
        UnsupportedSettingError: parameters are sharded in another way, by name.
    """
    reshard(module)
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # loaded by whoever shards
    if tensors is None or not any(isinstance(p, tensors.DTensor) for p in module.parameters()):
        return ParameterLayout(module)
    from lightning_lap2.gradients.sharding import ShardedLayout, Sharding

    return ShardedLayout(module, Sharding(module))


def reshard(module: nn.Module) -> None:
    """Layers of ``fully_shard`` that something outside a step has gathered hold their shards again: after a forward
    pass the outermost keeps its weights whole, as parameters that are others."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for layer in module.modules() if hasattr(fsdp, "FSDPModule") else ():
        if isinstance(layer, fsdp.FSDPModule):
            layer.reshard()
