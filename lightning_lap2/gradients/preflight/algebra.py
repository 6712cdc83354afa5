"""Which weighted sum of the examples' gradients the gradient of a batch is.

Only inner products of flat gradients are needed. They are formed in fp64 by blocks: fp32 dot products of long
vectors are off by more than the differences looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_BLOCK = 1 << 22


def inner(a: Tensor, b: Tensor) -> float:
    """Inner product of two flat vectors ``[n]``, in fp64."""
    return sum(float(x.double() @ y.double()) for x, y in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True))


def norm(a: Tensor) -> float:
    """l2 norm of a flat vector ``[n]``, in fp64."""
    return inner(a, a) ** 0.5


def distance(a: Tensor, b: Tensor) -> float:
    """l2 norm of ``a - b`` (``[n]`` each), in fp64."""
    pairs = zip(a.split(_BLOCK), b.split(_BLOCK), strict=True)
    return sum(float((x.double() - y.double()).square().sum()) for x, y in pairs) ** 0.5


def combine(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``sum_i weights[i] * vectors[i]`` (``[n]``), added up in fp64 block by block, in the vectors' dtype."""
    out = torch.empty_like(vectors[0])
    for blocks in zip(out.split(_BLOCK), *(v.split(_BLOCK) for v in vectors), strict=True):
        target, *parts = blocks
        target.copy_(sum(weight * part.double() for weight, part in zip(weights, parts, strict=True)))
    return out


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient.

    Attributes:
        loss: the value of the loss.
        gradient: ``[n]`` in the layout's order.
    """

    loss: float
    gradient: Tensor

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.gradient).all()) and abs(self.loss) < float("inf")


Reduction = Literal["mean", "sum", "weighted", "mixed"]


def reduction(parts: Sequence[Evaluation], batch_of: Callable[[list[int]], Evaluation], tolerance: float) -> Reduction:
    """How a batch's loss and gradient arise from those of its examples alone.

    .. math:: L_B = \\sum_i w_i L_i, \\qquad g_B = \\sum_i w_i g_i

    ``"mean"``: all w_i = 1/k fit. ``"sum"``: all w_i = 1 fit. ``"weighted"``: some w_i >= 0 that add to 1 fit, and
    without the heaviest example the others keep their proportions. ``"mixed"``: none of these, so that some
    example's share depends on the others.

    Args:
        parts: loss and gradient of each of the k >= 2 examples alone.
        batch_of: those of the batch of the examples of the given indices.
        tolerance: relative to the larger of the two sides, the terms of a sum counted in full.
    """
    k = len(parts)
    whole = batch_of(list(range(k)))
    if _fits(parts, whole, [1 / k] * k, tolerance):
        return "mean"
    if _fits(parts, whole, [1.0] * k, tolerance):
        return "sum"
    weights = _least_squares(parts, whole)
    rest = sorted(range(k), key=lambda i: weights[i])[:-1]
    left = sum(weights[i] for i in rest)
    if (
        min(weights) >= -tolerance
        and abs(sum(weights) - 1) <= k * tolerance
        and left > k * tolerance  # or one example stands for all, as in a maximum
        and _fits(parts, whole, weights, tolerance)
        and _fits([parts[i] for i in rest], batch_of(rest), [weights[i] / left for i in rest], tolerance)
    ):
        return "weighted"
    return "mixed"


def _fits(parts: Sequence[Evaluation], whole: Evaluation, weights: Sequence[float], tolerance: float) -> bool:
    terms = [weight * part.loss for weight, part in zip(weights, parts, strict=True)]
    if abs(whole.loss - sum(terms)) > tolerance * max(abs(whole.loss), sum(map(abs, terms))):
        return False
    gradients = [part.gradient for part in parts]
    # terms may cancel; their rounding errors do not
    scale = sum(abs(weight) * norm(g) for weight, g in zip(weights, gradients, strict=True))
    return distance(whole.gradient, combine(gradients, weights)) <= tolerance * max(norm(whole.gradient), scale)


def _least_squares(parts: Sequence[Evaluation], whole: Evaluation) -> list[float]:
    """Weights that fit gradient, loss and a sum of 1 best, the three on one scale; needs inner products only."""
    gradients = [part.gradient for part in parts]
    squares = torch.tensor([[inner(a, b) for b in gradients] for a in gradients], dtype=torch.float64)
    target = torch.tensor([inner(g, whole.gradient) for g in gradients], dtype=torch.float64)
    losses = torch.tensor([part.loss for part in parts], dtype=torch.float64)
    size = float(squares.diagonal().max()) or 1.0
    loss_size = float(losses.abs().max()) ** 2 or 1.0
    # normal equations of the stacked columns (g_i, loss_i, 1), each scaled to about 1: the last two decide
    # where gradients are parallel, or fewer than k parameters leave the weights open
    squares = squares / size + torch.outer(losses, losses) / loss_size + 1.0
    target = target / size + losses * whole.loss / loss_size + 1.0
    solution = torch.linalg.lstsq(squares, target, driver="gelsd", rcond=1e-12).solution
    return [float(w) for w in solution]
