"""``engine="ghost"``: one forward under ``vmap``, one backward, no per-example gradients."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_lap2.batches import Examples
from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipped_sum import add_count, round_down
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.engine import Engine, full_precision
from lightning_lap2.gradients.ghost.calls import physical_calls
from lightning_lap2.gradients.ghost.combine import merge, norms_of_sum
from lightning_lap2.gradients.ghost.graph import NotCovered, Use, Walk
from lightning_lap2.gradients.ghost.rules import RULES, Scope
from lightning_lap2.gradients.ghost.sources import Form, Node, Pulled, term_of_parameter
from lightning_lap2.gradients.ghost.terms import Dense, Term
from lightning_lap2.gradients.marks import Marks
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.physical import check_torch, for_all, plain_checkpoints
from lightning_lap2.gradients.step.runner import Traced, UserStep
from lightning_lap2.gradients.step.tracing import explain, traceable
from lightning_lap2.gradients.step.whole_batch import seen_by_backward_refused, seen_by_rules_refused
from lightning_lap2.gradients.vmap import runs_alone


class GhostEngine(Engine):
    """Clipped sums from one forward and one backward pass over all examples.

    The user's step runs under ``vmap``, so it sees one example at a time, but on the module's own parameters. The graph
    of the summed losses tells every use of every trainable parameter. The backward computes gradients of activations
    only; at each use the output gradient is caught, and from it and the saved input come each example's squared norm,
    and after clipping the weighted sum. Per-example gradients are held only where they are no larger than the
    activations, and for parameters that are used in a way without a rule: those are *spread*, used as B copies.

    Args:
        module: as for every engine.
        chunk_size: examples per forward and backward pass; ``None``: all of one shape together.
    """

    name = "ghost"

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        super().__init__(module, chunk_size=chunk_size)
        self._spread = _Parameters()

    def add_clipped(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[Traced]:
        """See :meth:`Engine.add_clipped`."""
        check_torch(self.name)
        if clipper.norm != "l2":
            raise UnsupportedModelError(
                f'engine="ghost" computes l2 norms, but clipping is by {clipper.norm}. Use engine="vmap".'
            )
        if step.call.revise is not None:
            raise UnsupportedModelError(
                'engine="ghost" holds no gradients of single examples, so a gradient canary cannot take part. '
                'Use engine="vmap", or canaries that are records.'
            )
        for layer in step.layers:
            if isinstance(layer, nn.EmbeddingBag) and layer.sparse:
                raise UnsupportedModelError(
                    "EmbeddingBag has sparse=True, which engine='ghost' cannot run: use sparse=False, or engine='loop'"
                )
        chunk = self.chunk_size or examples.count
        if chunk >= examples.count:
            return [self._chunk(examples, step, layout, clipper, total)]
        own = None if total is None else torch.zeros_like(total)
        traced = []
        for start in range(0, examples.count, chunk):
            traced.append(self._chunk(examples.apart(start, start + chunk), step, layout, clipper, own))
        if total is not None and own is not None:
            total += own
        return traced

    def _chunk(
        self, examples: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> Traced:
        """One forward and backward pass; a second forward pass where parameters turn out to need spreading."""
        again, spare = False, examples.apart(0, examples.count) if step.may_repeat else examples
        while True:
            run = self._forward(examples, step, layout, again=again)
            if total is None or not run.losses.requires_grad:
                return run.traced
            try:
                collected = run.collect(layout, total.dtype)
            except NotCovered as found:
                new = [layout.parameters[k] for k in found.parameters if layout.parameters[k] not in self._spread]
                if not new:
                    raise _not_covered(found, layout) from None
                self._spread.add(new)
                del run
                again, examples, spare = True, spare, spare.apart(0, spare.count)
                continue
            collected.add_clipped(layout, clipper, total, examples.count)
            return run.traced

    def _forward(self, examples: Examples, step: UserStep, layout: ParameterLayout, *, again: bool) -> _Run:
        """The losses of all examples; ``again``: with the random numbers of the last pass."""
        count, shared = examples.count, examples.shared()
        chosen = [k for k, p in enumerate(layout.parameters) if p in self._spread]
        names = step.slot_names(layout) if chosen else []

        def loss_of(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves, own = tensors[: len(examples.tensors)], tensors[len(examples.tensors) :]
            by_slot = {name: p for k, p in zip(chosen, own, strict=True) for name in names[k]}
            loss, carried = step(examples.rebuild(leaves, shared), by_slot or None)
            return loss, *carried

        try:
            with step.tracing(again=again), _surroundings(step.layers):
                # of memory of their own: a mark on the parameter's would outlast the step
                copies = [p.clone().expand(count, *p.shape) for p in map(layout.whole, chosen)]
                inputs = (*examples.tensors, *copies)
                with Marks(inputs, vmapped=True, graph=True) as marks, seen_by_rules_refused():
                    losses, *carried = for_all(loss_of, inputs, count)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if isinstance(error, UnsupportedModelError) or runs_alone(examples, step):
                explain(error, self.module, engine=self.name)
            raise
        spread = {copy.grad_fn for copy in copies}
        return _Run(losses, marks.nodes, marks.slices, spread, Traced(step.trace, carried))


@contextmanager
def _surroundings(layers: Sequence[nn.Module]) -> Iterator[None]:
    """What is replaced or refused while the user's step runs."""
    with traceable(layers), physical_calls(layers), plain_checkpoints(), seen_by_backward_refused(layers):
        yield


class _Parameters:
    """A set of parameters by identity, which keeps none of them alive."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def add(self, parameters: Sequence[Tensor]) -> None:
        self._held.update({id(p): weakref.ref(p) for p in parameters})

    def __contains__(self, parameter: Tensor) -> bool:
        held = self._held.get(id(parameter))
        return held is not None and held() is parameter


def _not_covered(found: NotCovered, layout: ParameterLayout) -> UnsupportedModelError:
    names = ", ".join(repr(layout.names[k]) for k in sorted(found.parameters))
    what = f"Parameter {names} is {found}" if names else str(found)
    return UnsupportedModelError(f"{what}; engine='ghost' cannot take it. Use engine='auto', which goes on to the next")


@dataclass
class _Run:
    """One forward pass.

    Attributes:
        losses: ``[B]``.
        carrying, slices: the graph's nodes that carry examples, see :class:`Marks`.
        spread: those that gave parameters an examples' dimension.
        traced: what was recorded.
    """

    losses: Tensor
    carrying: set[Node]
    slices: set[Node]
    spread: set[Node]
    traced: Traced

    def collect(self, layout: ParameterLayout, dtype: torch.dtype) -> Collected:
        """The backward pass. The graph is let go of.

        Raises:
            NotCovered: naming parameters to spread.
        """
        count, loss = len(self.losses), self.losses.sum()
        if count == 1 and not layout.scattered:  # where it is, no rank has room for a whole gradient
            return _single_example(loss, layout, dtype)
        carrying, self.losses = self.carrying | {self.losses.grad_fn, loss.grad_fn}, self.losses.detach()
        index = {id(p): k for k, p in enumerate(layout.leaves())}
        uses = Walk(index, count, carrying, self.slices, self.spread, RULES.__contains__).run(loss.grad_fn)
        self.carrying, self.slices = set(), set()  # nodes hold what they saved
        del carrying
        if any(derived.form is Form.COMPUTED for use in uses for derived in use.operands.values()):
            layout.hold()  # what was computed from weights needs them once more after the backward pass
        collector = Collector(Scope(count, dtype), layout, uses)
        collector.backward(loss)
        return collector.finish()


@dataclass
class Collected:
    """One backward's harvest.

    Attributes:
        terms: for each parameter used its uses and the norms ``[B]`` (fp64) of their sum.
    """

    terms: dict[int, tuple[list[Term], Tensor]]

    @torch.no_grad()
    def add_clipped(self, layout: ParameterLayout, clipper: Clipper, total: Tensor, count: int) -> None:
        """``total += sum_b weight_b g_b``."""
        if not self.terms:
            return
        norms = torch.stack([norms for _, norms in self.terms.values()])
        if len(self.terms) < len(layout.parameters):
            used = torch.tensor(list(self.terms), device=norms.device)
            norms = norms.new_zeros(len(layout.parameters), count).index_copy_(0, used, norms)
        discarded = None
        # norms are not negative: their sum is finite only where each of them is
        if not math.isfinite(norms.sum().item()):
            bad = ~torch.isfinite(norms).all(dim=0)
            norms[:, bad] = torch.inf
            discarded = bad.nonzero()[:, 0] if bool(bad.any()) else None
        weights = round_down(clipper.weights(norms), total.dtype)
        views, weight = layout.views(total), weights.unbind(0)
        with full_precision():
            for k, (uses, _) in self.terms.items():
                with layout.summand(views, k) as part:
                    for use in uses:
                        if discarded is not None:
                            use.discard(discarded)
                        use.add_weighted(part, weight[k])
        add_count(norms, layout, clipper, total)


class Collector:
    """Runs the backward and turns output gradients into terms as they come, while they are in cache."""

    def __init__(self, scope: Scope, layout: ParameterLayout, uses: list[Use]) -> None:
        self.scope = scope
        self.layout = layout
        self.uses = uses
        self._leaves = layout.leaves()
        self.terms: dict[int, list[Term]] = {}
        self.norms: dict[int, Tensor] = {}
        self._expected = Counter([p for use in uses for d in use.operands.values() for p in d.parameters])
        self._exact = torch.get_float32_matmul_precision() == "highest"

    @torch.no_grad()
    def backward(self, loss: Tensor) -> None:
        """Gradients with respect to activations only: the engine runs what the last uses need and no weight
        gradient. Uses above others are caught on the way, before their node runs and frees what it saved."""
        if not self.uses:
            return
        last = [use for use in self.uses if use.last]
        handles = [use.node.register_prehook(self._hook(use)) for use in self.uses if not use.last]
        try:
            edges = [GradientEdge(use.node, 0) for use in last]
            grads = torch.autograd.grad(loss, edges, allow_unused=True)
        finally:
            for handle in handles:  # a node that holds its own hook would never be freed
                handle.remove()
        for use, grad in zip(last, grads, strict=True):
            self._collect(use, grad)

    def _hook(self, use: Use) -> Any:
        return lambda grads: self._collect(use, grads[0])

    def _collect(self, use: Use, grad: Tensor | None) -> None:
        if grad is None:
            return
        if self._exact:
            self._terms_of(use, grad)
        else:
            with full_precision():  # here and not around the backward, whose precision is the user's choice
                self._terms_of(use, grad)

    def _terms_of(self, use: Use, grad: Tensor) -> None:
        terms = RULES[use.name](use, self.scope, grad)
        if terms.keys() != use.operands.keys():
            raise self.scope.refuse(use, f"parameters as inputs {sorted(use.operands.keys() - terms.keys())}")
        for operand, term in terms.items():
            derived = use.operands[operand]
            term = term.compact()
            for k in derived.parameters:
                own = term_of_parameter(term, derived, self._leaves[k], self.scope.dtype)
                if self._expected[k] == 1 and not isinstance(own, Pulled):
                    self.terms[k], self.norms[k] = [own], own.norms()
                else:
                    self.terms.setdefault(k, []).append(own)

    @torch.no_grad()
    def finish(self) -> Collected:
        """All terms with the norms of their sums, ordered by parameter."""
        result = {}
        for k, terms in sorted(self.terms.items()):
            if k not in self.norms:
                with full_precision():
                    terms = merge(terms)
                    self.norms[k] = norms_of_sum(terms)
            result[k] = (terms, self.norms[k])
        return Collected(result)


def _single_example(loss: Tensor, layout: ParameterLayout, dtype: torch.dtype) -> Collected:
    """A batch of one: its gradient is the batch gradient."""
    grads = torch.autograd.grad(loss, layout.leaves(), allow_unused=True)
    dense = {
        k: Dense((g.to_dense() if g.is_sparse else g).detach().to(dtype)[None])
        for k, g in enumerate(grads)
        if g is not None
    }
    return Collected({k: ([term], term.norms()) for k, term in dense.items()})
