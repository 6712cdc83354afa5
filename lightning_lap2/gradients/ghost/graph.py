"""Every use of a trainable parameter in the graph of the summed losses.

The autograd graph is the ground truth of where gradients go: each path from the loss to a parameter ends in that
parameter's ``AccumulateGrad`` node, however the user's code got there (modules, functionals, raw parameters, tied
weights, modules called twice). A walk over it therefore misses no use. Nodes fall in three kinds:

* derived: depends on parameters and on no example (:mod:`sources`);
* use: a derived tensor meets what carries examples; needs a rule (:mod:`rules`);
* anything else.

Which nodes carry examples is given (:mod:`lightning_lap2.gradients.marks`). Those do along their leading dimension,
where ``vmap``'s batching rules put it; a rule that finds another size there does not apply. Where no rule applies, and
where a batching rule has itself expanded a parameter, :class:`NotCovered` names the parameters: with an examples'
dimension of their own, *spread*, they can be used by anything, since then only that first expansion is a use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_lap2.gradients.ghost.sources import Derived, Form, Node

_SAME = {"ToCopyBackward0", "AliasBackward0", "CloneBackward0", "ViewAsBackward0", "ContiguousBackward0"}
_MOVES = _SAME | {
    "TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "NumpyTBackward0",
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0", "UnfoldBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SliceBackward0", "SelectBackward0", "NarrowBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "UnsafeSplitBackward0", "ChunkBackward0", "UnbindBackward0", "DiagonalBackward0", "FlipBackward0",
    "RollBackward0", "MovedimBackward0", "EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0",
    "ExpandBackward0", "RepeatBackward0",
}  # fmt: skip
"""Operations with one tensor operand whose output is made of its entries."""
ELEMENTWISE = {
    "AddBackward0", "SubBackward0", "RsubBackward0", "MulBackward0", "DivBackward0", "WhereBackward0",
    "PreluKernelBackward0",
}  # fmt: skip
"""Operations that broadcast their operands against each other."""
_OPAQUE = {
    "PackPaddedSequenceBackward0": "packed sequences hold the steps of all sequences in an order of their own, which "
    "cannot be followed: pass padded sequences",
}
"""Operations that are refused wherever they occur."""
Edges = tuple[tuple[Node | None, int], ...]
"""What lies below a node: for each of its inputs a node and which of that node's outputs it is."""


class NotCovered(Exception):
    """Parameters whose per-example gradients cannot be read off the graph as it is.

    Attributes:
        parameters: their indices; empty where spreading would not help.
    """

    def __init__(self, parameters: Iterable[int], why: str) -> None:
        super().__init__(why)
        self.parameters = frozenset(parameters)


@dataclass
class Use:
    """A node where derived tensors meet the examples.

    Attributes:
        operands: which of the node's inputs are derived.
        last: whether no other use lies below, so that autograd does not run this node.
    """

    node: Node
    name: str
    operands: dict[int, Derived]
    last: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.node, 0)

    @property
    def parameters(self) -> set[int]:
        return {p for derived in self.operands.values() for p in derived.parameters}


class _Origin(NamedTuple):
    """What is known of a derived node, see :class:`Derived`; and whether some dimension was expanded to B on the
    way."""

    form: Form
    parameters: tuple[int, ...]
    widened: bool


@dataclass
class Walk:
    """One walk.

    Attributes:
        index: from the ``id`` of a parameter to its number.
        rows: B.
        carrying: the nodes whose outputs carry examples.
        slices: those among them whose outputs are of one example alone.
        spread: the nodes that gave parameters an examples' dimension before the forward pass.
        covered: whether there is a rule for an operation.
    """

    index: dict[int, int]
    rows: int
    carrying: Set[Node]
    slices: Set[Node]
    spread: Set[Node]
    covered: Callable[[str], bool]
    derived: dict[Node, _Origin] = field(default_factory=dict)
    above_use: dict[Node, bool] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    def run(self, root: Node) -> list[Use]:
        """Visits every node under ``root``, children first; returns the uses.

        Raises:
            NotCovered: see above.
        """
        above_use: dict[Node, bool] = self.above_use
        stack: list[tuple[Node, Edges | None]] = [(root, None)]
        while stack:
            node, edges = stack.pop()
            if edges is not None:
                self._visit(node, edges)
                continue
            if node in above_use:
                continue
            above_use[node] = False
            edges = node.next_functions
            stack.append((node, edges))
            stack += [(child, None) for child, _ in edges if child is not None and child not in above_use]
        return self.uses

    def _visit(self, node: Node, edges: Edges) -> None:
        if not edges:
            parameter = self.index.get(id(node.variable)) if hasattr(node, "variable") else None
            if parameter is not None:
                self.derived[node] = _Origin(Form.PLAIN, (parameter,), False)
            return
        name = node.name()
        if name in _OPAQUE:
            raise NotCovered((), _OPAQUE[name])
        operands, below = {}, False
        for i, (child, output) in enumerate(edges):
            if child is None:
                continue
            origin = self.derived.get(child)
            if origin is not None:
                operands[i] = Derived(child, output, origin.form, origin.parameters)
            elif self.above_use[child]:
                below = True
        if operands:
            if node not in self.carrying and node not in self.spread:
                self.derived[node] = self._origin(node, name, edges, operands)
                return
            use = Use(node, name, operands, last=not below)
            self._check(use)
            self.uses.append(use)
        self.above_use[node] = below or bool(operands)

    def _origin(self, node: Node, name: str, edges: Edges, operands: dict[int, Derived]) -> _Origin:
        parameters = tuple(sorted({p for d in operands.values() for p in d.parameters}))
        widened = any(self.derived[d.node].widened for d in operands.values())
        widened = widened or (name in ("ExpandBackward0", "RepeatBackward0") and self._widens(node, operands[0]))
        alone = len(operands) == sum(child is not None for child, _ in edges) == 1
        form = next(iter(operands.values())).form
        if not alone or (name not in _MOVES):
            form = Form.COMPUTED
        elif name == "TBackward0":
            form = {Form.PLAIN: Form.TRANSPOSED, Form.TRANSPOSED: Form.PLAIN}.get(form, form)
        elif name not in _SAME:
            form = Form.COMPUTED if form is Form.COMPUTED else Form.COPIED
        return _Origin(form, parameters, widened)

    def _widens(self, node: Node, derived: Derived) -> bool:
        """Whether a dimension of size B is new: a batching rule may have made it for the examples."""
        shape = _shape(node, 0)
        before = (1,) * (len(shape) - len(derived.shape)) + derived.shape
        return any(n % self.rows == 0 and n != m for n, m in zip(shape, before, strict=True))

    def _check(self, use: Use) -> None:
        if use.node in self.spread:
            return
        if use.node in self.slices:
            raise NotCovered(use.parameters, f"used by {use.name} for one example after the other")
        if not self.covered(use.name):
            raise NotCovered(use.parameters, f"used by {use.name}, for which there is no rule")
        if any(self.derived[d.node].widened for d in use.operands.values()):
            raise NotCovered(use.parameters, f"expanded to {self.rows} before it is used by {use.name}")


def _shape(node: Node, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)


def lookup_index(node: Node, name: str) -> Any:
    """The index tensor of a lookup along dimension 0, or ``None`` where it is something else."""
    if name == "EmbeddingBackward0":
        return node._saved_indices
    indices = node._saved_indices
    if len([i for i in indices if i is not None]) == 1 and indices[0] is not None:
        return indices[0]
    return None
