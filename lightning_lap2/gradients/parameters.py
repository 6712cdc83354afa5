"""The trainable scalars of a module in one flat order.

Everything that is clipped, summed, noised and written to ``.grad`` uses this order. n, the dimension that the
accountant is told, is its length: each trainable scalar counts once, however many names lead to it (tied weights).
"""

from __future__ import annotations

from collections.abc import Sequence

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

    @property
    def dtype(self) -> torch.dtype:
        """The type sums and noise are kept in: fp32, or fp64 where the parameters are fp64."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def same_as(self, other: ParameterLayout) -> bool:
        """Whether both hold the same parameter objects in the same order."""
        return len(self.parameters) == len(other.parameters) and all(
            a is b for a, b in zip(self.parameters, other.parameters, strict=True)
        )

    def zeros(self, beside: int = 0) -> Tensor:
        """A flat vector ``[n + beside]`` of zeros."""
        return torch.zeros(self.numel + beside, dtype=self.dtype, device=self.device)

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
