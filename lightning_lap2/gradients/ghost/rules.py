"""Per operation: the per-example gradients of its parameter operands from saved tensors and output gradient.

Each rule is the operation's weight gradient with the sum over examples left out. Saved tensors are read from the
autograd node; they are what its backward itself would use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.ghost.graph import ELEMENTWISE, Use, Walk, lookup_index
from lightning_lap2.gradients.ghost.sources import Derived
from lightning_lap2.gradients.ghost.terms import Convolution, ConvolutionSpec, Dense, Outer, Rows, Term

Terms = dict[int, Term]
"""From operand (position among the node's inputs) to its per-example gradients."""


@dataclass(frozen=True)
class Scope:
    """What rules need to know besides the node.

    Attributes:
        walk: resolves batch dimensions.
        dtype: type to compute in, fp32 or fp64.
    """

    walk: Walk
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.walk.dims.rows

    def describe(self, use: Use) -> str:
        names = {self.walk.names[p] for d in use.operands.values() for p in d.parameters}
        return f"Parameter {', '.join(repr(n) for n in sorted(names))} used by {use.name}"

    def refuse(self, use: Use, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f'{self.describe(use)}: {why}; engine="ghost" does not cover it. Use engine="vmap".'
        )

    def batch_of(self, use: Use, lead: tuple[int, ...]) -> int:
        """The batch dimension among the leading dimensions ``lead``."""
        parameters = tuple(sorted({p for d in use.operands.values() for p in d.parameters}))
        candidates = [i for i, size in enumerate(lead) if size == self.rows]
        return self.walk.dims.find(
            (parameters, use.name, len(lead)),
            candidates,
            lambda: f"{self.describe(use)} with leading dimensions {lead}",
        )


def examples_first(x: Tensor, batch: int, kept: int) -> Tensor:
    """``[.., B, .., *rest]``, B at dimension ``batch``, as ``[B, T, *rest]`` with ``kept`` trailing dimensions."""
    x = x.movedim(batch, 0)
    lead = x.dim() - kept
    return x.unsqueeze(1) if lead == 1 else x.flatten(1, lead - 1)


def reduce_to(grad: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    """Undoes broadcasting for each example: gradients in the broadcast shape to ``[B, *shape]``."""
    grad = grad.movedim(batch, 0).unsqueeze(batch + 1)
    lacking = grad.dim() - 1 - len(shape)
    own = (1,) * lacking + shape
    over = [i + 1 for i, size in enumerate(own) if size == 1 and grad.shape[i + 1] != 1]
    if over:
        grad = grad.sum(dim=over, keepdim=True)
    return grad.reshape(grad.shape[0], *shape)


def _lead(use: Use, scope: Scope, rows: int) -> tuple[int, ...]:
    """The leading dimensions that were flattened into rows, from how the output or the input is viewed."""
    found: list[tuple[int, ...]] = []
    for shape in use.views:
        for cut in range(1, len(shape)):
            if math.prod(shape[:cut]) == rows:
                found.append(shape[:cut])
                break
    with_batch = [lead for lead in found if scope.rows in lead]
    if with_batch:
        return with_batch[0]
    if rows == scope.rows or not found:
        return (rows,)
    return found[0]


def _rows_first(use: Use, scope: Scope, matrices: list[Tensor]) -> list[Tensor]:
    """Matrices ``[R, d]`` whose rows are the same positions, as ``[B, T, d]``."""
    lead = _lead(use, scope, matrices[0].shape[0])
    batch = scope.batch_of(use, lead)
    if len(lead) == 1:
        return [m.unsqueeze(1) for m in matrices]
    return [examples_first(m.reshape(*lead, m.shape[1]), batch, 1) for m in matrices]


def _bias(use: Use, scope: Scope, derived: Derived, grad: Tensor) -> Term:
    """``bias`` broadcast over rows; ``grad`` is ``[B, T, q]``."""
    if math.prod(derived.shape) != grad.shape[2]:
        raise scope.refuse(use, f"a bias of shape {derived.shape}")
    total = grad[:, 0] if grad.shape[1] == 1 else grad.sum(dim=1, dtype=scope.dtype)
    return Dense(total.reshape(-1, *derived.shape))


def matrix_product(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``beta bias + alpha X W`` with X ``[R, p]`` of the data and W ``[p, q]``: sum over rows of x (x) grad."""
    node = use.node
    first = 1 if use.name == "AddmmBackward0" else 0  # position of X
    if first in use.operands:
        raise scope.refuse(use, "the parameter is the left factor")
    alpha, beta = (node._saved_alpha, node._saved_beta) if first else (1, 1)
    terms: Terms = {}
    if first + 1 in use.operands:
        x = node._saved_mat1 if first else node._saved_self
        x, g = _rows_first(use, scope, [x, grad])
        terms[first + 1] = Outer(x, g if alpha == 1 else g * alpha, scope.dtype)
    else:
        (g,) = _rows_first(use, scope, [grad])
    if first and 0 in use.operands:
        terms[0] = _bias(use, scope, use.operands[0], g if beta == 1 else g * beta)
    return terms


def batched_product(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``X W`` with leading dimension 1 (einsum makes these)."""
    if 1 not in use.operands or 0 in use.operands or use.shape[0] != 1:
        raise scope.refuse(use, "a batched matrix product with the parameter")
    use.views = [shape[1:] if shape[0] == 1 and len(shape) > 2 else shape for shape in use.views]
    x, g = _rows_first(use, scope, [use.node._saved_self[0], grad[0]])
    outer = Outer(x, g, scope.dtype)
    return {1: Reshaped(outer, use.operands[1].shape)}


def matrix_vector(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``X v`` with X ``[R, p]`` of the data."""
    if 1 not in use.operands or 0 in use.operands:
        raise scope.refuse(use, "the parameter is the left factor")
    x, g = _rows_first(use, scope, [use.node._saved_self, grad[:, None]])
    return {1: Dense(torch.bmm(g.transpose(1, 2).to(scope.dtype), x.to(scope.dtype))[:, 0])}


def convolution(use: Use, scope: Scope, grad: Tensor) -> Terms:
    node = use.node
    scope.batch_of(use, use.shape[:1])
    terms: Terms = {}
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter is the input")
    if 1 in use.operands:
        spec = ConvolutionSpec(
            use.operands[1].shape, node._saved_stride, node._saved_padding, node._saved_dilation,
            node._saved_transposed, node._saved_output_padding, node._saved_groups,
        )  # fmt: skip
        terms[1] = Convolution(node._saved_input, grad, spec, scope.dtype)
    if 2 in use.operands:
        terms[2] = Dense(grad.flatten(2).sum(dim=2, dtype=scope.dtype))
    return terms


def lookup(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """Rows of a table by index: ``F.embedding``, ``table[index]``."""
    node, derived = use.node, use.operands[0]
    index = lookup_index(node, use.name)
    batch = scope.walk.lookup_batch(node, use.name, derived)
    width = math.prod(derived.shape[1:])
    values = examples_first(grad.reshape(*index.shape, width), batch, 1)
    index = examples_first(index, batch, 0)
    if use.name == "EmbeddingBackward0":
        if node._saved_scale_grad_by_freq:
            raise scope.refuse(use, "scale_grad_by_freq counts over the whole batch")
        if node._saved_padding_idx >= 0:
            values = values.masked_fill((index == node._saved_padding_idx)[..., None], 0)
    elif index.dtype == torch.bool:
        raise scope.refuse(use, "a boolean mask selects rows")
    height = derived.shape[0]
    rows = Rows(index.remainder(height), values, height, scope.dtype)
    return {0: rows if len(derived.shape) == 2 else Reshaped(rows, derived.shape)}


def layer_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """weight: sum of grad * (x - mean) / std over positions; bias: sum of grad."""
    node = use.node
    kept = len(node._saved_normalized_shape)
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter is the input")
    lead = use.shape[:-kept]
    lead = _lead(use, scope, lead[0]) if len(lead) == 1 else lead
    batch = scope.batch_of(use, lead)
    terms: Terms = {}
    grad = grad.to(scope.dtype)
    if 1 in use.operands:
        normal = (node._saved_input.to(scope.dtype) - node._saved_result1).mul_(node._saved_result2).mul_(grad)
        terms[1] = Dense(examples_first(normal.view(*lead, *use.shape[-kept:]), batch, kept).sum(dim=1))
    if 2 in use.operands:
        terms[2] = Dense(examples_first(grad.reshape(*lead, *use.shape[-kept:]), batch, kept).sum(dim=1))
    return terms


def group_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """weight, per channel of group j: (sum grad x - mean_j sum grad) / std_j, as PyTorch itself computes it."""
    node = use.node
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter is the input")
    scope.batch_of(use, use.shape[:1])
    shape = (node._saved_N, node._saved_C, -1)
    grad = grad.to(scope.dtype).reshape(shape)
    total = grad.sum(dim=2)
    terms: Terms = {}
    if 1 in use.operands:
        per_group = (node._saved_N, node._saved_group, -1)
        mean, scale = (x.to(scope.dtype).view(per_group) for x in (node._saved_result1, node._saved_result2))
        with_x = (grad * node._saved_input.reshape(shape)).sum(dim=2)
        weight = (with_x.view(per_group) - mean * total.view(per_group)) * scale
        terms[1] = Dense(weight.reshape(total.shape))
    if 2 in use.operands:
        terms[2] = Dense(total)
    return terms


def batch_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """With running statistics only: an affine map of each example."""
    node = use.node
    if node._saved_training:
        raise UnsupportedModelError(
            f"{scope.describe(use)}: BatchNorm in training mode mixes examples, and its running statistics leave "
            f"the model without noise. Use nn.GroupNorm, or put the layer in eval()."
        )
    scope.batch_of(use, use.shape[:1])
    grad = grad.to(scope.dtype).reshape(*use.shape[:2], -1)
    terms: Terms = {}
    if 1 in use.operands:
        mean, var = (x.to(scope.dtype)[:, None] for x in (node._saved_running_mean, node._saved_running_var))
        x = node._saved_input.to(scope.dtype).reshape(grad.shape)
        terms[1] = Dense(((x - mean).mul_(grad).sum(dim=2)) * torch.rsqrt(var + node._saved_eps)[:, 0])
    if 2 in use.operands:
        terms[2] = Dense(grad.sum(dim=2))
    return terms


def partial(use: Use, operand: int, grad: Tensor) -> Tensor:
    """Gradient of one operand of a broadcasting operation, in the broadcast shape.

    Written out because a node that is called while the backward runs leaves out the gradients of parameters.
    """
    node = use.node
    match use.name, operand:
        case ("ExpandBackward0" | "AddBackward0" | "SubBackward0", 0) | ("RsubBackward0", 1):
            return grad
        case "AddBackward0", 1:
            return grad if node._saved_alpha == 1 else grad * node._saved_alpha
        case ("SubBackward0", 1) | ("RsubBackward0", 0):
            return grad * -node._saved_alpha
        case "MulBackward0", 0:
            return grad * node._saved_other
        case "MulBackward0", 1:
            return grad * node._saved_self
        case "DivBackward0", 0:
            return grad / node._saved_other
        case "DivBackward0", 1:  # d(x / y) / dy = -x / y^2
            return grad * -(node._saved_self / node._saved_other / node._saved_other)
        case "WhereBackward0", 0:
            return torch.where(node._saved_condition, grad, 0.0)
        case "WhereBackward0", 1:
            return torch.where(node._saved_condition, 0.0, grad)
        case "PreluKernelBackward0", 1:
            return grad * node._saved_self.clamp_max(0)
    raise AssertionError(f"{use.name} has no operand {operand}")


def broadcast(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """Broadcasting operations: gradients in the broadcast shape, summed for each example."""
    terms: Terms = {}
    for operand, derived in use.operands.items():
        batch = scope.walk.broadcast_batch(use.node, use.name, derived)
        value = partial(use, operand, grad).to(scope.dtype)
        terms[operand] = Dense(reduce_to(value, derived.shape, batch))
    return terms


def repeat(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``parameter.repeat(B, 1, ...)``."""
    derived = use.operands[0]
    repeats = tuple(use.node._saved_repeats)
    own = (1,) * (len(repeats) - len(derived.shape)) + derived.shape
    # [r0, s0, r1, s1, ...]: summed over all r except the batch
    grad = grad.reshape([n for pair in zip(repeats, own, strict=True) for n in pair]).to(scope.dtype)
    batch = scope.walk.repeat_batch(use.node, use.name, derived)
    others = [2 * i for i, r in enumerate(repeats) if i != batch and r != 1]
    grad = grad.movedim(2 * batch, 0)
    others = [i + 1 if i < 2 * batch else i for i in others]
    if others:
        grad = grad.sum(dim=others)
    return {0: Dense(grad.reshape(scope.rows, *derived.shape))}


@dataclass
class Reshaped(Term):
    """Another term's gradients in another shape of as many entries."""

    term: Term
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.examples, self.device = self.term.examples, self.term.device

    def squares(self) -> Tensor:
        return self.term.squares()

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        if out.is_contiguous():
            self.term.add_weighted(out.view(self.term.shape), weight)
            return
        grad = torch.zeros(self.term.shape, dtype=out.dtype, device=out.device)
        self.term.add_weighted(grad, weight)
        out += grad.view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.term.rows(start, stop).view(stop - start, *self.shape)

    def discard(self, examples: Tensor) -> None:
        self.term.discard(examples)

    def folded(self, views: int) -> Reshaped:
        return Reshaped(self.term.folded(views), self.shape)


RULES: dict[str, Callable[[Use, Scope, Tensor], Terms]] = {
    "AddmmBackward0": matrix_product,
    "MmBackward0": matrix_product,
    "BmmBackward0": batched_product,
    "MvBackward0": matrix_vector,
    "ConvolutionBackward0": convolution,
    "EmbeddingBackward0": lookup,
    "IndexBackward0": lookup,
    "IndexSelectBackward0": lookup,
    "NativeLayerNormBackward0": layer_norm,
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
    "CudnnBatchNormBackward0": batch_norm,
    "ExpandBackward0": broadcast,
    "RepeatBackward0": repeat,
    **dict.fromkeys(ELEMENTWISE, broadcast),
}
