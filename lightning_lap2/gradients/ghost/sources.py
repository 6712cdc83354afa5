"""The parameter side of the autograd graph: nodes that depend on parameters and on no data.

A weight seldom meets the data as it is: ``F.linear`` transposes it, attention cuts q, k and v out of one matrix,
autocast casts it, ``weight_norm`` computes it. Such a *derived* tensor W = D(parameters) is the same for every
example, so the per-example gradients of the parameters are those of W pulled back through D, which is linear in
the gradient. Nodes are pulled back by calling them: no rule of ours can then disagree with autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from lightning_lap2.gradients.ghost.numerics import row_squares
from lightning_lap2.gradients.ghost.terms import Dense, Outer, Term, scratch_examples
from lightning_lap2.gradients.physical import quiet_fallback

Node = Any  # torch.autograd.graph.Node; its saved tensors are attributes that type checkers do not know


class Form(Enum):
    """How a derived tensor relates to its parameter."""

    PLAIN = auto()
    """Entry for entry the parameter, up to type."""
    TRANSPOSED = auto()
    """Its matrix transpose."""
    COPIED = auto()
    """Made of entries of it, each left out, taken once, or repeated."""
    COMPUTED = auto()
    """Anything else, or from several parameters."""


class Derived(NamedTuple):
    """One output of a node that depends on parameters only.

    Attributes:
        node, output: the node and which of its outputs.
        form: relation to the parameter.
        parameters: indices of the parameters it depends on.
    """

    node: Node
    output: int
    form: Form
    parameters: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node._input_metadata[self.output].shape)


def pull_back(node: Node, output: int, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the leaf tensors below one output of ``node``, as (leaf, gradient); a leaf may come twice.

    Not while a backward runs: nodes then leave out what that backward does not need.
    """
    meta = node._input_metadata
    if hasattr(node, "variable"):
        return [(node.variable, grad)]
    grads: list[Tensor | None] = [None] * len(meta)
    grads[output] = grad.to(meta[output].dtype)
    results = node(*grads)
    results = results if isinstance(results, tuple) else (results,)
    leaves: list[tuple[Tensor, Tensor]] = []
    for (child, index), result in zip(node.next_functions, results, strict=True):
        if child is not None:
            # what the autograd engine does between nodes: undo broadcasting
            leaves += pull_back(child, index, result.sum_to_size(child._input_metadata[index].shape))
    return leaves


@dataclass
class Pulled(Term):
    """A parameter's gradients from those of a tensor derived from it.

    Attributes:
        term: per-example gradients of the derived tensor.
        parameter: whose gradients these are.
    """

    term: Term
    derived: Derived
    parameter: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.examples = self.term.examples
        self.shape = tuple(self.parameter.shape)
        self.device = self.parameter.device
        self._cover: Tensor | None = None

    def _pull(self, grad: Tensor) -> Tensor:
        leaves = pull_back(self.derived.node, self.derived.output, grad.reshape(self.derived.shape))
        own = [value.to(self.dtype) for leaf, value in leaves if leaf is self.parameter]
        return sum(own[1:], own[0]) if own else grad.new_zeros(self.shape, dtype=self.dtype)

    def cover(self) -> Tensor:
        """How often the derived tensor holds each entry of the parameter; only for ``Form.COPIED``."""
        if self._cover is None:
            self._cover = self._pull(torch.ones(self.derived.shape, device=self.device))
        return self._cover

    def keeps_norms(self) -> bool:
        """Whether pulling back only moves entries, so that norms stay what they are: every entry of the derived
        tensor goes to an entry of the parameter of its own."""
        if self.derived.form is not Form.COPIED:
            return False
        cover = self.cover()
        return bool(cover.max() <= 1) and int(cover.sum()) == math.prod(self.derived.shape)

    def squares(self) -> Tensor:
        return self.term.squares() if self.keeps_norms() else squares_by_rows([self])

    def add_weighted(self, out: Tensor, weight: Tensor) -> None:
        grad = torch.zeros(self.term.shape, dtype=out.dtype, device=out.device)
        self.term.add_weighted(grad, weight)
        out += self._pull(grad)

    def rows(self, start: int, stop: int) -> Tensor:
        with quiet_fallback():
            pulled: Tensor = vmap(self._pull)(self.term.rows(start, stop))
        return pulled

    def discard(self, examples: Tensor) -> None:
        self.term.discard(examples)


def squares_by_rows(terms: list[Term]) -> Tensor:
    """Squared norms of the sum of several uses, the gradients formed a few examples at a time: ``[B]``, fp64."""
    examples = terms[0].examples
    step = scratch_examples(terms[0])
    parts = []
    for start in range(0, examples, step):
        stop = min(start + step, examples)
        total = terms[0].rows(start, stop)
        for term in terms[1:]:
            total = total + term.rows(start, stop)
        parts.append(row_squares(total.reshape(stop - start, -1)))
    return torch.cat(parts)


def term_of_parameter(term: Term, derived: Derived, parameter: Tensor, dtype: torch.dtype) -> Term:
    """From the gradients of a derived tensor to those of the parameter, in its shape."""
    if derived.form is Form.PLAIN:
        return term
    if derived.form is Form.TRANSPOSED:
        if isinstance(term, Outer):
            return term.transposed()
        if isinstance(term, Dense):
            return Dense(term.grads.transpose(1, 2))
    return Pulled(term, derived, parameter, dtype)
