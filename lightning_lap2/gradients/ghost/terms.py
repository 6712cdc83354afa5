"""What a layer keeps for each use of a parameter, and what can be computed from it.

A term is the per-example gradients g_1 .. g_B of one use, in a form smaller than ``[B, *shape]`` where there is
one. It answers: the squared norms |g_b|^2, and out += sum_b w_b g_b.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_lap2.gradients.ghost.numerics import (
    CANCELLATION,
    gram_product,
    gram_squares,
    root,
    row_norms,
    row_squares,
)


class Term(ABC):
    """Per-example gradients of one use.

    Attributes:
        shape: shape of one example's gradient.
        examples: B.
        device: where they are computed.
    """

    shape: tuple[int, ...]
    examples: int
    device: torch.device

    @abstractmethod
    def squares(self) -> Tensor:
        """|g_b|^2, ``[B]`` in fp64; non-finite where the gradient is."""

    def norms(self) -> Tensor:
        """|g_b|, ``[B]`` in fp64; non-finite where the gradient is."""
        return root(self.squares())

    @abstractmethod
    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        """``out += sum_b weight[b] g_b``; ``out`` in :attr:`shape`, ``weight`` ``[B]`` of its dtype."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """The gradients of examples ``start`` to ``stop`` themselves, ``[stop - start, *shape]``."""

    @abstractmethod
    def discard(self, examples: Tensor) -> None:
        """Makes the gradients of these examples (indices, ``[K]``) zero: a weight of 0 does not, since 0 * nan is
        nan."""

    def compact(self) -> Term:
        """The same gradients in the form that is cheapest to keep."""
        return self


def zero_rows(x: Tensor, examples: Tensor, dim: int = 0) -> Tensor:
    """A copy of ``x`` with zeros at these indices of ``dim``."""
    return x.index_fill(dim, examples, 0)


@dataclass
class Dense(Term):
    """The gradients themselves, ``grads`` ``[B, *shape]``, for small parameters."""

    grads: Tensor

    def __post_init__(self) -> None:
        self.examples = self.grads.shape[0]
        self.shape = tuple(self.grads.shape[1:])
        self.device = self.grads.device

    def _flat(self) -> Tensor:
        return self.grads if len(self.shape) == 1 else self.grads.reshape(self.examples, -1)

    def squares(self) -> Tensor:
        return row_squares(self._flat())

    def norms(self) -> Tensor:
        return row_norms(self._flat())

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        flat = self._flat()
        if flat.dtype != out.dtype:
            flat = flat.to(out.dtype)
        if out.is_contiguous():
            (out if out.dim() == 1 else out.view(-1)).addmv_(flat.t(), weight)
        else:
            out += torch.mv(flat.t(), weight).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.grads[start:stop]

    def discard(self, examples: Tensor) -> None:
        self.grads = zero_rows(self.grads, examples)


@dataclass
class Outer(Term):
    r""":math:`g_b = \sum_t \mathrm{left}_{bt} \otimes \mathrm{right}_{bt}`, shape ``[p, q]``: a matrix product.

    Attributes:
        left, right: ``[B, T, p]``, ``[B, T, q]``; any strides (batch-first or sequence-first).
        dtype: the type to compute in.
    """

    left: Tensor
    right: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.examples, self.length = self.left.shape[:2]
        self.shape = (self.left.shape[2], self.right.shape[2])
        self.device = self.left.device

    def transposed(self) -> Outer:
        return Outer(self.right, self.left, self.dtype)

    def direct_is_faster(self) -> bool:
        """Whether forming each g_b costs less than two Gram matrices of all positions.

        Multiply-adds: T p q against T^2 (p + q); writing and reading an entry of g_b, or of the Gram matrices,
        costs about as much as ``_TOUCH`` of them.
        """
        t, (p, q) = self.length, self.shape
        return (t + _TOUCH) * p * q < t * t * (p + q + 2 * _TOUCH)

    def norms(self) -> Tensor:
        if self.length > 1:
            return root(self.squares())
        left, right = self.left.to(self.dtype), self.right.to(self.dtype)
        return row_norms(left[:, 0]).mul_(row_norms(right[:, 0]))

    def squares(self) -> Tensor:
        if self.length == 1:
            return self.norms().square_()
        left, right = self.left.to(self.dtype), self.right.to(self.dtype)
        if self.direct_is_faster():
            return self._direct_squares(left, right)
        squares, own = gram_squares(left, right)
        # a non-finite example compares false and stays non-finite
        cancelled = own > CANCELLATION * squares
        if cancelled.any():
            index = cancelled.nonzero()[:, 0]
            squares[index] = gram_squares(left[index].double(), right[index].double())[0]
        return squares

    def _direct_squares(self, left: Tensor, right: Tensor) -> Tensor:
        step = scratch_examples(self)
        parts = [
            row_squares(torch.bmm(a.transpose(1, 2), b).flatten(1))
            for a, b in zip(left.split(step), right.split(step), strict=True)
        ]
        return torch.cat(parts)

    def product(self, other: Outer) -> Tensor:
        """Inner products with another use's gradients, ``[B]`` in fp64."""
        a, b, c, d = (x.to(self.dtype) for x in (self.left, self.right, other.left, other.right))
        return gram_product(a, b, c, d)

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        left, right = self.left.to(out.dtype), self.right.to(out.dtype)
        weight = weight.view(-1, 1, 1)
        if left.shape[2] <= right.shape[2]:
            left = left * weight
        else:
            right = right * weight
        out.addmm_(_flat(left).t(), _flat(right))

    def rows(self, start: int, stop: int) -> Tensor:
        left, right = (x[start:stop].to(self.dtype) for x in (self.left, self.right))
        return torch.bmm(left.transpose(1, 2), right)

    def discard(self, examples: Tensor) -> None:
        self.left, self.right = zero_rows(self.left, examples), zero_rows(self.right, examples)


_TOUCH = 24


def scratch_examples(term: Term) -> int:
    """How many gradients to form at a time where only their norms are needed: a megabyte of them on a CPU, which
    stays in cache and in memory already mapped (8 MB took four times as long), more on a GPU."""
    entries = 1 << 18 if term.device.type == "cpu" else 1 << 25
    return max(1, entries // max(1, math.prod(term.shape)))


def _flat(x: Tensor) -> Tensor:
    """``[B, T, d] -> [B T, d]`` in whichever order needs no copy (all rows are summed over)."""
    if x.shape[1] == 1:
        return x[:, 0]
    if x.stride(0) < x.stride(1):
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[2])


@dataclass
class Rows(Term):
    """A table's gradients, shape ``[V, d]``: row ``index[b, t]`` receives ``values[b, t]``.

    Attributes:
        index: ``[B, T]`` integers.
        values: ``[B, T, d]``.
        height: V.
    """

    index: Tensor
    values: Tensor
    height: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.examples = self.index.shape[0]
        self.shape = (self.height, self.values.shape[2])
        self.device = self.values.device

    def squares(self) -> Tensor:
        """Adds up values that meet in one row of one example first: norm of the sum, not sum of norms."""
        owner = torch.arange(self.examples, device=self.index.device)[:, None]
        keys, slot = torch.unique(owner * self.height + self.index, return_inverse=True)
        width = self.shape[1]
        rows = torch.zeros(len(keys), width, dtype=self.dtype, device=keys.device)
        rows.index_add_(0, slot.reshape(-1), self.values.reshape(-1, width).to(self.dtype))
        squares = torch.zeros(self.examples, dtype=torch.float64, device=keys.device)
        return squares.index_add_(0, keys.div(self.height, rounding_mode="floor"), row_squares(rows))

    def product(self, other: Outer) -> Tensor:
        """Inner products with ``other``'s gradients ``[V, d]``: sum over t, s of
        left_s[index_t] (values_t . right_s); ``[B]`` in fp64."""
        picked = torch.gather(
            other.left.to(self.dtype), 2, self.index[:, None, :].expand(-1, other.length, -1)
        )  # [B, S, T]
        products = torch.bmm(other.right.to(self.dtype), self.values.to(self.dtype).transpose(1, 2)).mul_(picked)
        return products.sum(dim=2).double().sum(dim=1)

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        values = self.values.to(out.dtype) * weight[:, None, None]
        out.index_add_(0, self.index.reshape(-1), values.reshape(-1, self.shape[1]))

    def rows(self, start: int, stop: int) -> Tensor:
        count = stop - start
        out = torch.zeros(count * self.height, self.shape[1], dtype=self.dtype, device=self.values.device)
        owner = torch.arange(count, device=self.index.device)[:, None] * self.height
        values = self.values[start:stop].reshape(-1, self.shape[1]).to(self.dtype)
        out.index_add_(0, (self.index[start:stop] + owner).reshape(-1), values)
        return out.view(count, *self.shape)

    def discard(self, examples: Tensor) -> None:
        self.values = zero_rows(self.values, examples)


def _without_tf32(device: torch.device) -> AbstractContextManager[None]:
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False)


@dataclass(frozen=True)
class ConvolutionSpec:
    """The arguments of a convolution, as ``aten::convolution_backward`` takes them."""

    weight_shape: tuple[int, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def weight_gradient(self, x: Tensor, grad: Tensor, fold: int = 1) -> Tensor:
        """Gradient of the weight, summed over dimension 0 of ``x`` ``[N, C, ...]`` and ``grad`` ``[N, O, ...]``.

        With ``fold`` = B the channels hold B examples side by side, as groups: the result is then ``[B, *weight]``.
        """
        # only the shape of the weight matters: no memory for it
        shape = (fold * self.weight_shape[0], *self.weight_shape[1:])
        weight = x.new_zeros(1).expand(shape)
        with _without_tf32(x.device):
            out = torch.ops.aten.convolution_backward(
                grad, x, weight, None, self.stride, self.padding, self.dilation, self.transposed,
                self.output_padding, self.groups * fold, [False, True, False],
            )[1]  # fmt: skip
        return out.reshape(fold, *self.weight_shape) if fold > 1 else out

    def per_example(self, x: Tensor, grad: Tensor, views: int = 1) -> Tensor:
        """``[B, *weight]``, summed over the ``views`` consecutive rows of each example: one convolution with B times
        the groups, three times faster than unfolding. On a CPU oneDNN's kernels want 8 channels or more; the images'
        own 3 go by another way."""
        count = x.shape[0] // views
        if count == 1:
            return self.weight_gradient(x, grad)[None]
        if x.device.type == "cpu" and self.groups == 1 and x.shape[1] <= 3 and not self.transposed:
            work = math.prod(self.weight_shape) * math.prod(grad.shape[2:])
            if work > 2_000_000:
                return torch.cat(
                    [self.weight_gradient(a, b)[None] for a, b in zip(x.split(views), grad.split(views), strict=True)]
                )
            if work > 100_000:
                return self._by_correlation(x, grad).unflatten(0, (count, views)).sum(dim=1)
        # examples side by side as channels, their views as the rows that are summed over
        if views == 1:
            x, grad = (t.reshape(1, -1, *t.shape[2:]) for t in (x, grad))
        else:
            x, grad = (t.unflatten(0, (count, views)).transpose(0, 1).flatten(1, 2) for t in (x, grad))
        return self.weight_gradient(x, grad, fold=count)

    def _by_correlation(self, x: Tensor, grad: Tensor) -> Tensor:
        """The same as a forward convolution of each example's input with its output gradient as the kernel, stride
        and dilation changing places; the input channels take the place of the batch."""
        count, kernel = x.shape[0], self.weight_shape[2:]
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(kernel) - 1]
        out = convolve(
            x.transpose(0, 1), grad.flatten(0, 1)[:, None], None, self.dilation, self.padding, self.stride, count
        )  # [C, B O, *at least kernel]: a stride that does not fit leaves a rest
        for i, size in enumerate(kernel):
            out = out.narrow(2 + i, 0, size)
        return out.unflatten(1, (count, -1)).movedim(0, 2)


@dataclass
class Convolution(Term):
    """A convolution's weight: input and output gradient, for weights larger than those.

    Attributes:
        x: ``[B views, C, ...]``.
        grad: ``[B views, O, ...]``.
        views: rows of one example, side by side.
    """

    x: Tensor
    grad: Tensor
    spec: ConvolutionSpec
    dtype: torch.dtype
    views: int = 1

    def __post_init__(self) -> None:
        self.examples = self.x.shape[0] // self.views
        self.shape = self.spec.weight_shape
        self.device = self.x.device

    def compact(self) -> Term:
        """The gradients themselves, which saves forming them twice, where they need no more memory than the two
        tensors they come from."""
        if self.examples * math.prod(self.shape) <= self.x.numel() + self.grad.numel():
            return Dense(self.rows(0, self.examples))
        return self

    def squares(self) -> Tensor:
        step = scratch_examples(self)
        starts = range(0, self.examples, step)
        return torch.cat([row_squares(self.rows(i, min(i + step, self.examples)).flatten(1)) for i in starts])

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        weight = weight.repeat_interleave(self.views)
        grad = self.grad.to(out.dtype) * weight.view(-1, *[1] * (self.grad.dim() - 1))
        out += self.spec.weight_gradient(self.x.to(out.dtype), grad)

    def rows(self, start: int, stop: int) -> Tensor:
        rows = slice(start * self.views, stop * self.views)
        return self.spec.per_example(self.x[rows].to(self.dtype), self.grad[rows].to(self.dtype), self.views)

    def discard(self, examples: Tensor) -> None:
        rows = (examples[:, None] * self.views + torch.arange(self.views, device=examples.device)).flatten()
        self.x, self.grad = zero_rows(self.x, rows), zero_rows(self.grad, rows)
