"""Per-example gradients by a loop written here and nowhere else, and how far an engine is from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.gradients import Engine, StepCall
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.mechanism import Norm


def row(batch: Any, index: int) -> Any:
    """Row ``index`` as a batch of one."""
    if isinstance(batch, Tensor):
        return batch[index].unsqueeze(0)
    if isinstance(batch, Mapping) or type(batch).__name__ == "BatchEncoding":
        return {key: row(value, index) for key, value in batch.items()}
    return type(batch)(row(value, index) for value in batch)


def reference(module: nn.Module, batch: Any, count: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Losses ``[B]`` and, for each example, the gradients of all trainable parameters, by ``loss.backward()``."""
    losses, gradients = [], []
    parameters = [p for p in module.parameters() if p.requires_grad]
    for index in range(count):
        loss = module.training_step(row(batch, index), 0)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
        for p in parameters:
            p.grad = None
    return torch.stack(losses), gradients


class Weights:
    """A clipper that gives each example a weight of its own and keeps the norms it was shown."""

    norm: Norm = "l2"

    def __init__(self, weights: Tensor) -> None:
        self.given = weights.double()
        self.norms: list[Tensor] = []

    def weights(self, norms: Tensor) -> Tensor:
        start = sum(n.shape[1] for n in self.norms)
        self.norms.append(norms.clone())
        return self.given[start : start + norms.shape[1]].expand_as(norms)

    @property
    def seen(self) -> Tensor:
        """Norms ``[P, B]``."""
        return torch.cat(self.norms, dim=1)


def worst_error(engine: Engine, module: nn.Module, batch: Any, count: int, *, each: bool) -> float:
    """The largest relative error of ``engine``: norms, a weighted sum, the loss, and, where ``each``, every example's
    gradient by itself. Relative to the norm of the example's whole gradient."""
    losses, gradients = reference(module, batch, count)
    layout = ParameterLayout(module)
    # the loop's order of parameters is the module's own; the layout's is by name
    order = [[id(p) for p in module.parameters() if p.requires_grad].index(id(p)) for p in layout.parameters]
    exact = torch.stack([torch.cat([g[k].reshape(-1) for k in order]) for g in gradients]).double()
    norms = torch.stack([torch.stack([g[k].double().norm() for k in order]) for g in gradients], dim=1)
    size = exact.norm(dim=1)
    errors = []
    loss = losses.mean()

    def run(weights: Tensor) -> None:
        clipper, total = Weights(weights), layout.zeros()
        output = engine.accumulate(StepCall((batch, 0), count), layout, clipper, total)
        want = weights.double() @ exact
        errors.append((total.double() - want).norm() / (weights.double() @ size))
        errors.append(((clipper.seen - norms).abs() / size).max())
        errors.append((output - loss).abs() / loss.abs())

    run(torch.linspace(0.5, 1.5, count))
    if each:
        for index in range(count):
            run(torch.eye(count)[index])
    return float(torch.stack([e.double() for e in errors]).max())
