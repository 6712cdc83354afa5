"""Every use of a trainable parameter in the graph of a loss.

The autograd graph is the ground truth of where gradients go: each path from the loss to a parameter ends in that
parameter's ``AccumulateGrad`` node, however the user's code got there (modules, functionals, raw parameters, tied
weights, modules called twice). A walk over it therefore misses no use. Nodes fall in three kinds:

* derived: depends on parameters only (:mod:`sources`);
* use: a derived tensor meets the data; needs a rule (:mod:`rules`), or is refused by name;
* anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.ghost.batchdims import NO_BATCH, BatchDims
from lightning_lap2.gradients.ghost.sources import Derived, Form, Node

_SAME = {"ToCopyBackward0", "AliasBackward0", "CloneBackward0", "ViewAsBackward0", "ContiguousBackward0"}
_MOVES = _SAME | {
    "TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "NumpyTBackward0",
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0", "UnfoldBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SliceBackward0", "SelectBackward0", "NarrowBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "UnsafeSplitBackward0", "ChunkBackward0", "UnbindBackward0", "DiagonalBackward0", "FlipBackward0",
    "RollBackward0", "MovedimBackward0",
}  # fmt: skip
"""Operations with one tensor operand that only move its entries."""
_LOOKUPS = {"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0"}
ELEMENTWISE = {
    "AddBackward0", "SubBackward0", "RsubBackward0", "MulBackward0", "DivBackward0", "WhereBackward0",
    "PreluKernelBackward0",
}  # fmt: skip
"""Operations that broadcast their operands against each other."""
_UNARY = {
    "MulBackward1", "AddBackward1", "SubBackward1", "DivBackward1", "NegBackward0", "PowBackward0", "SqrtBackward0",
    "RsqrtBackward0", "ExpBackward0", "LogBackward0", "AbsBackward0", "TanhBackward0", "SigmoidBackward0",
    "SoftplusBackward0", "ReluBackward0", "SoftmaxBackward0", "SumBackward0", "SumBackward1", "MeanBackward0",
    "MeanBackward1", "NormBackward0", "NormBackward1", "NormBackward2", "LinalgVectorNormBackward0",
    "ClampBackward0", "ClampBackward1", "ClampMinBackward0", "SquareBackward0", "VarBackward0",
    "ConstantPadNdBackward0", "TrilBackward0", "TriuBackward0",
}  # fmt: skip
_COMBINED = {"WeightNormInterfaceBackward0", "MmBackward0", "BmmBackward0", "CatBackward0", "StackBackward0"}
"""Operations on several tensors, data-free where each of them is derived."""
_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
Edges = tuple[tuple[Node | None, int], ...]
"""What lies below a node: for each of its inputs a node and which of that node's outputs it is."""
_OPAQUE = {
    "CheckpointFunctionBackward": "torch.utils.checkpoint(use_reentrant=True) hides parameters from the graph of "
    'the loss, so engine="ghost" cannot account for them. Use engine="loop", or no checkpointing.',
    "PackPaddedSequenceBackward0": "packed sequences hold the examples in an order of their own, which "
    'engine="ghost" cannot follow. Pass padded sequences, or use engine="loop".',
}
"""Operations that are refused wherever they occur."""


@dataclass
class Use:
    """A node where derived tensors meet the data.

    Attributes:
        operands: which of the node's inputs are derived.
        views: shapes that its flattened output is viewed in, then the one its input rows were flattened from.
        last: whether no other use lies below, so that autograd does not run this node.
    """

    node: Node
    name: str
    operands: dict[int, Derived]
    views: list[tuple[int, ...]]
    last: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node._input_metadata[0].shape)


@dataclass
class Walk:
    """State of one walk: which parameters lie below each derived node, and which nodes lie above a use."""

    index: dict[int, int]
    names: Sequence[str]
    dims: BatchDims
    covered: Callable[[str], bool]
    derived: dict[Node, tuple[Form, tuple[int, ...]]] = field(default_factory=dict)
    above_use: dict[Node, bool] = field(default_factory=dict)
    views: dict[Node, list[tuple[int, ...]]] = field(default_factory=dict)
    unflat: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    def run(self, root: Node) -> list[Use]:
        """Visits every node under ``root``, children first; returns the uses.

        Raises:
            UnsupportedModelError: a parameter is used by an operation without a rule.
        """
        above_use, stack = self.above_use, [(root, root.name(), None)]
        while stack:
            node, name, edges = stack.pop()
            if edges is not None:
                self._visit(node, name, edges)
                continue
            if node in above_use:
                continue
            above_use[node] = False
            edges = node.next_functions
            stack.append((node, name, edges))
            shape = tuple(node._input_metadata[0].shape) if name in _VIEWS else None
            for child, _ in edges:
                if child is not None:
                    if shape is not None:
                        self.views.setdefault(child, []).append(shape)
                    if child not in above_use:
                        stack.append((child, child.name(), None))
        if root in self.derived:
            self._refuse(root, root.name(), self.derived[root][1])
        return self.uses

    def _visit(self, node: Node, name: str, edges: Edges) -> None:
        if not edges and hasattr(node, "variable"):
            parameter = self.index.get(id(node.variable))
            if parameter is not None:
                self.derived[node] = (Form.PLAIN, (parameter,))
            return
        operands, below = {}, False
        for i, (child, output) in enumerate(edges):
            if child is None:
                continue
            if child in self.derived:
                operands[i] = Derived(child, output, *self.derived[child])
            elif self.above_use[child]:
                below = True
        if name in _OPAQUE:
            raise UnsupportedModelError(_OPAQUE[name])
        if operands:
            form = self._form(node, name, operands)
            if form is not None:
                parameters = sorted({p for d in operands.values() for p in d.parameters})
                self.derived[node] = (form, tuple(parameters))
                return
            if not self.covered(name) or math.prod(node._input_metadata[0].shape) == 1:
                self._refuse(node, name, [p for d in operands.values() for p in d.parameters])
        if name in _VIEWS or self.unflat:
            self._follow_rows(node, edges, name)
        if operands:
            views = list(self.views.get(node, []))
            if node in self.unflat:
                views.append(self.unflat[node])
            self.uses.append(Use(node, name, operands, views, last=not below))
        self.above_use[node] = below or bool(operands)

    def _follow_rows(self, node: Node, edges: Edges, name: str) -> None:
        """Notes which shape the rows of a matrix were flattened from, for as long as rows stay rows."""
        shape = tuple(node._input_metadata[0].shape)
        if len(shape) != 2:
            return
        for child, output in edges:
            if child is None or child in self.derived:
                continue
            before = tuple(child._input_metadata[output].shape)
            if name in _VIEWS and len(before) > 2:
                self.unflat[node] = before
            elif child in self.unflat and before[0] == shape[0]:
                self.unflat[node] = self.unflat[child]

    def _form(self, node: Node, name: str, operands: dict[int, Derived]) -> Form | None:
        """The form of the node's output if that depends on parameters only, else ``None``."""
        first = next(iter(operands.values()))
        edges = [child for child, _ in node.next_functions if child is not None]
        alone = len(operands) == len(edges)
        if not alone:
            return None
        if name in _SAME:
            return first.form
        if name == "TBackward0":
            swapped = {Form.PLAIN: Form.TRANSPOSED, Form.TRANSPOSED: Form.PLAIN}
            return swapped.get(first.form, first.form)
        copied = Form.COMPUTED if first.form is Form.COMPUTED else Form.COPIED
        if name in _MOVES:
            return copied
        if name in _LOOKUPS:
            return copied if self.lookup_batch(node, name, first) == NO_BATCH else None
        if name == "ExpandBackward0":
            return copied if self.broadcast_batch(node, name, first, optional=True) == NO_BATCH else None
        if name == "RepeatBackward0":
            return copied if self.repeat_batch(node, name, first) == NO_BATCH else None
        if name in _UNARY:
            return Form.COMPUTED
        if name in _COMBINED | ELEMENTWISE and len(operands) == len(node.next_functions):
            return Form.COMPUTED
        if name in ELEMENTWISE:
            # an operation with data that has a batch dimension broadcasts the parameter over it
            batch = [self.broadcast_batch(node, name, d, optional=True) for d in operands.values()]
            return Form.COMPUTED if all(b == NO_BATCH for b in batch) else None
        return None

    def lookup_batch(self, node: Node, name: str, derived: Derived) -> int:
        """Along which dimension of a lookup's index the examples lie.

        Raises:
            UnsupportedModelError: the lookup is not along dimension 0.
        """
        index = lookup_index(node, name)
        if index is None:
            self._refuse(node, f"{name} (not along dimension 0 by one index)", derived.parameters)
        return self.dims.find(
            (derived.parameters, name, index.dim()),
            [i for i, size in enumerate(index.shape) if size == self.dims.rows],
            str,
            optional=True,
        )

    def broadcast_batch(self, node: Node, name: str, derived: Derived, *, optional: bool = False) -> int:
        """Along which dimension of the node's output the examples lie: one that ``derived`` is repeated along."""
        shape = tuple(node._input_metadata[0].shape)
        lacking = len(shape) - len(derived.shape)
        own = (1,) * lacking + derived.shape
        return self.dims.find(
            (derived.parameters, name, len(shape)),
            [i for i, (n, o) in enumerate(zip(shape, own, strict=True)) if n == self.dims.rows != o],
            lambda: f"Parameter {self.names[derived.parameters[0]]!r} used by {name} with output shape {shape}",
            optional=optional,
        )

    def repeat_batch(self, node: Node, name: str, derived: Derived) -> int:
        """Along which dimension ``tensor.repeat`` makes one copy for each example."""
        repeats = tuple(node._saved_repeats)
        candidates = [i for i, times in enumerate(repeats) if times == self.dims.rows]
        return self.dims.find((derived.parameters, name, len(repeats)), candidates, str, optional=True)

    def _refuse(self, node: Node, name: str, parameters: Sequence[int]) -> NoReturn:
        shape = tuple(node._input_metadata[0].shape)
        names = ", ".join(repr(self.names[p]) for p in sorted(set(parameters)))
        if math.prod(shape) == 1:
            raise UnsupportedModelError(
                f"The loss uses parameter {names} itself ({name}), not per example (a weight penalty?): "
                f'engine="ghost" cannot share it out. Use the optimizer\'s weight decay or engine="vmap".'
            )
        raise UnsupportedModelError(
            f'Parameter {names} is used by {name}, which engine="ghost" does not cover. Use engine="vmap".'
        )


def lookup_index(node: Node, name: str) -> Any:
    """The index tensor of a lookup along dimension 0, or ``None`` where it is something else."""
    if name == "EmbeddingBackward0":
        return node._saved_indices
    if name == "IndexSelectBackward0":
        return node._saved_index if node._saved_dim == 0 else None
    indices = node._saved_indices
    if len([i for i in indices if i is not None]) == 1 and indices[0] is not None:
        return indices[0]
    return None
