"""Per operation: the per-example gradients of its parameter operands from saved tensors and output gradient.

Each rule is the operation's weight gradient with the sum over examples left out. Saved tensors are read from the
autograd node; they are what its backward itself would use. Examples lie along the leading dimension, each with as many
rows as the batch of one example has: B at the front, or B times as many rows, those of an example side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lap2._registry import Registry
from lightning_lap2.gradients.ghost.graph import ELEMENTWISE, NotCovered, Use, lookup_index
from lightning_lap2.gradients.ghost.sources import Derived
from lightning_lap2.gradients.ghost.terms import Convolution, ConvolutionSpec, Dense, Outer, Rows, Term

Terms = dict[int, Term]
"""From operand (position among the node's inputs) to its per-example gradients."""


@dataclass(frozen=True)
class Scope:
    """What rules need to know besides the node.

    Attributes:
        rows: B.
        dtype: type to compute in, fp32 or fp64.
    """

    rows: int
    dtype: torch.dtype

    def apart(self, use: Use, x: Tensor) -> Tensor:
        """``[B k, ...]`` as ``[B, k, ...]``, the k rows of an example together.

        Raises:
            NotCovered: the leading dimension does not hold B examples.
        """
        count, rest = divmod(x.shape[0] if x.dim() else 0, self.rows)
        if rest or not count:
            raise self.refuse(use, f"a leading dimension that is no multiple of {self.rows}")
        return x.view(self.rows, count, *x.shape[1:])

    def refuse(self, use: Use, why: str) -> NotCovered:
        return NotCovered(use.parameters, f"used by {use.name} with {why}")


def _leads(use: Use, scope: Scope, shape: tuple[int, ...]) -> None:
    """Raises :class:`NotCovered` unless ``shape`` is ``[B, ...]``."""
    if shape[:1] != (scope.rows,):
        raise scope.refuse(use, f"shape {shape}, whose leading dimension is not {scope.rows}")


def _positions(x: Tensor, kept: int) -> Tensor:
    """``[B, .., *rest]`` as ``[B, T, *rest]`` with ``kept`` trailing dimensions."""
    lead = x.dim() - kept
    return x.unsqueeze(1) if lead == 1 else x.flatten(1, lead - 1)


def reduce_to(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undoes broadcasting for each example: ``[B, ...]`` in the broadcast shape to ``[B, *shape]``."""
    grad = grad.unsqueeze(1)
    own = (1,) * (grad.dim() - 1 - len(shape)) + shape
    over = [i + 1 for i, size in enumerate(own) if size == 1 and grad.shape[i + 1] != 1]
    if over:
        grad = grad.sum(dim=over, keepdim=True)
    return grad.reshape(grad.shape[0], *shape)


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
        raise scope.refuse(use, "the parameter as its left factor")
    alpha, beta = (node._saved_alpha, node._saved_beta) if first else (1, 1)
    terms: Terms = {}
    if first + 1 in use.operands:
        x = node._saved_mat1 if first else node._saved_self
        x, g = scope.apart(use, x), scope.apart(use, grad)
        terms[first + 1] = Outer(x, g if alpha == 1 else g * alpha, scope.dtype)
    else:
        g = scope.apart(use, grad)
    if first and 0 in use.operands:
        terms[0] = _bias(use, scope, use.operands[0], g if beta == 1 else g * beta)
    return terms


def batched_product(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``X W`` with leading dimension 1 (einsum makes these)."""
    if 1 not in use.operands or 0 in use.operands or use.shape[0] != 1:
        raise scope.refuse(use, "a batch of matrices")
    x, g = scope.apart(use, use.node._saved_self[0]), scope.apart(use, grad[0])
    return {1: Reshaped(Outer(x, g, scope.dtype), use.operands[1].shape)}


def matrix_vector(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """``X v`` with X ``[R, p]`` of the data."""
    if 1 not in use.operands or 0 in use.operands:
        raise scope.refuse(use, "the parameter as its left factor")
    x, g = scope.apart(use, use.node._saved_self), scope.apart(use, grad[:, None])
    return {1: Dense(torch.bmm(g.transpose(1, 2).to(scope.dtype), x.to(scope.dtype))[:, 0])}


def convolution(use: Use, scope: Scope, grad: Tensor) -> Terms:
    node = use.node
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter as its input")
    own = scope.apart(use, grad)  # [B, k, O, ...]
    terms: Terms = {}
    if 1 in use.operands:
        spec = ConvolutionSpec(
            use.operands[1].shape, node._saved_stride, node._saved_padding, node._saved_dilation,
            node._saved_transposed, node._saved_output_padding, node._saved_groups,
        )  # fmt: skip
        terms[1] = Convolution(node._saved_input, grad, spec, scope.dtype, own.shape[1])
    if 2 in use.operands:
        over = [1, *range(3, own.dim())]
        terms[2] = Dense(own.sum(dim=over, dtype=scope.dtype))
    return terms


def lookup(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """Rows of a table by index: ``F.embedding``, ``table[index]``."""
    node, derived = use.node, use.operands[0]
    index = lookup_index(node, use.name)
    if index is None or index.dtype == torch.bool:
        raise scope.refuse(use, "an index that is not one of whole rows")
    _leads(use, scope, tuple(index.shape))
    width = math.prod(derived.shape[1:])
    values = _positions(grad.reshape(*index.shape, width), 1)
    index = _positions(index, 0)
    if use.name == "EmbeddingBackward0":
        if node._saved_scale_grad_by_freq:
            raise scope.refuse(use, "scale_grad_by_freq")
        if node._saved_padding_idx >= 0:
            values = values.masked_fill((index == node._saved_padding_idx)[..., None], 0)
    height = derived.shape[0]
    rows = Rows(index.remainder(height), values, height, scope.dtype)
    return {0: rows if len(derived.shape) == 2 else Reshaped(rows, derived.shape)}


def layer_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """weight: sum of grad * (x - mean) / std over positions; bias: sum of grad."""
    node = use.node
    kept = len(node._saved_normalized_shape)
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter as its input")
    _leads(use, scope, use.shape[: len(use.shape) - kept])
    terms: Terms = {}
    grad = grad.to(scope.dtype)
    if 1 in use.operands:
        normal = (node._saved_input.to(scope.dtype) - node._saved_result1).mul_(node._saved_result2).mul_(grad)
        terms[1] = Dense(_positions(normal, kept).sum(dim=1))
    if 2 in use.operands:
        terms[2] = Dense(_positions(grad, kept).sum(dim=1))
    return terms


def group_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """weight, per channel of group j: (sum grad x - mean_j sum grad) / std_j, as PyTorch itself computes it."""
    node = use.node
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter as its input")
    shape = (node._saved_N, node._saved_C, -1)
    grad = grad.to(scope.dtype).reshape(shape)
    total = grad.sum(dim=2)
    terms: Terms = {}
    if 1 in use.operands:
        per_group = (node._saved_N, node._saved_group, -1)
        mean, scale = (x.to(scope.dtype).view(per_group) for x in (node._saved_result1, node._saved_result2))
        with_x = (grad * node._saved_input.reshape(shape)).sum(dim=2)
        weight = (with_x.view(per_group) - mean * total.view(per_group)) * scale
        terms[1] = Dense(scope.apart(use, weight.reshape(total.shape)).sum(dim=1))
    if 2 in use.operands:
        terms[2] = Dense(scope.apart(use, total).sum(dim=1))
    return terms


def batch_norm(use: Use, scope: Scope, grad: Tensor) -> Terms:
    """With running statistics only: an affine map of each example."""
    node = use.node
    if node._saved_training:
        raise scope.refuse(use, "statistics of its input")
    if 0 in use.operands:
        raise scope.refuse(use, "the parameter as its input")
    grad = grad.to(scope.dtype).reshape(*use.shape[:2], -1)
    terms: Terms = {}
    if 1 in use.operands:
        mean, var = (x.to(scope.dtype)[:, None] for x in (node._saved_running_mean, node._saved_running_var))
        x = node._saved_input.to(scope.dtype).reshape(grad.shape)
        weight = ((x - mean).mul_(grad).sum(dim=2)) * torch.rsqrt(var + node._saved_eps)[:, 0]
        terms[1] = Dense(scope.apart(use, weight).sum(dim=1))
    if 2 in use.operands:
        terms[2] = Dense(scope.apart(use, grad.sum(dim=2)).sum(dim=1))
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
    _leads(use, scope, use.shape)
    terms: Terms = {}
    for operand, derived in use.operands.items():
        if len(derived.shape) == len(use.shape) and derived.shape[0] != 1:
            raise scope.refuse(use, f"the parameter in shape {derived.shape}, along the examples")
        terms[operand] = Dense(reduce_to(partial(use, operand, grad).to(scope.dtype), derived.shape))
    return terms


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


Rule = Callable[[Use, Scope, Tensor], Terms]

_OWN: dict[str, Rule] = {
    "AddmmBackward0": matrix_product,
    "MmBackward0": matrix_product,
    "BmmBackward0": batched_product,
    "MvBackward0": matrix_vector,
    "ConvolutionBackward0": convolution,
    "EmbeddingBackward0": lookup,
    "IndexBackward0": lookup,
    "NativeLayerNormBackward0": layer_norm,
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
    "CudnnBatchNormBackward0": batch_norm,
    "ExpandBackward0": broadcast,
    **dict.fromkeys(ELEMENTWISE, broadcast),
}

RULES: Registry[Rule] = Registry("ghost rule", _OWN, on_trust=True)


def register_ghost_rule(node: str, rule: Rule) -> None:
    """Lets ``engine="ghost"`` answer for an operation that it would otherwise run spread, in this process.

    A rule that answers with too small a norm lets a gradient through that is longer than C: compare it with plain
    autograd, example by example (docs/extending.md). The report of every run in this process names it.

    Args:
        node: the name of the operation's autograd node, such as ``"AddmmBackward0"``.
        rule: from the use of a parameter, the scope and the gradient of the node's output to the per-example gradients
            of each operand that is a parameter.

    Raises:
        TypeError, ValueError: there is a rule for it.
    """
    RULES.add(node, rule)
