"""Per-example gradients by plain autograd, one example at a time, and the comparison with the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.ghost import GhostEngine


class Step(nn.Module):
    """A module with the ``training_step`` of a classifier: mean cross entropy over the batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x, y = batch
        out = self.net(x)
        return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def example(batch: Any, i: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[i : i + 1]
    if isinstance(batch, Mapping):
        return {k: example(v, i) for k, v in batch.items()}
    return type(batch)(example(v, i) for v in batch)


def size(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch.shape[0]


def per_example(module: nn.Module, layout: ParameterLayout, batch: Any) -> Tensor:
    """``[B, n]`` in fp64."""
    rows = []
    for i in range(size(batch)):
        loss = module.training_step(example(batch, i), 0)
        loss = loss["loss"] if isinstance(loss, Mapping) else loss
        grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros(p.numel()).double() if g is None else g.double().reshape(-1)
                    for g, p in zip(grads, layout.parameters, strict=True)
                ]
            )
        )
    return torch.stack(rows)


class Recording:
    """A flat clipper that keeps the norms it was given."""

    norm = "l2"

    def __init__(self, max_grad_norm: float) -> None:
        self.inner = FlatClipper(max_grad_norm)
        self.norms = torch.empty(0)

    def weights(self, norms: Tensor) -> Tensor:
        self.norms = norms.clone()
        return self.inner.weights(norms)


def assert_equals_loop(module: nn.Module, batch: Any, *, rel: float = 1e-5, engine: Any = None) -> Tensor:
    """The engine's sum and norms against the loop's, clipped at the median norm so that clipping matters."""
    layout = ParameterLayout(module)
    reference = per_example(module, layout, batch)
    count = len(reference)
    norms = reference.norm(dim=1)
    bound = norms.median().item()
    expected = ((bound / norms).clamp_max(1.0)[:, None] * reference).sum(0)
    clipper = Recording(bound)
    total = layout.zeros()
    engine = engine or GhostEngine(module)
    engine.accumulate(StepCall((batch, 0), count), layout, clipper, total)
    for k, (start, stop) in enumerate(zip(layout.offsets[:-1], layout.offsets[1:], strict=True)):
        own = reference[:, start:stop].norm(dim=1)
        # some biases have a gradient of exactly 0: compare with the example's whole gradient there
        error = (clipper.norms[k] - own).abs() / torch.maximum(own, 0.3 * norms)
        assert error.max() < rel, f"norm of {layout.names[k]}: relative error {error.max():.1e}"
        part = (total[start:stop].double() - expected[start:stop]).norm()
        scale = max(expected[start:stop].norm().item(), 0.3 * expected.norm().item())
        assert part / scale < rel, f"sum of {layout.names[k]}: relative error {part / scale:.1e}"
    assert all(p.grad is None for p in module.parameters())
    return total
