"""``engine="ghost"``: one forward, one backward, no per-example gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.contraction import add_count, round_down
from lightning_lap2.gradients.engine import Engine, full_precision
from lightning_lap2.gradients.ghost.batchdims import BatchDims
from lightning_lap2.gradients.ghost.combine import merge, norms_of_sum
from lightning_lap2.gradients.ghost.graph import Use, Walk
from lightning_lap2.gradients.ghost.rules import RULES, Scope
from lightning_lap2.gradients.ghost.shares import own_per_share
from lightning_lap2.gradients.ghost.sources import Pulled, term_of_parameter
from lightning_lap2.gradients.ghost.state import Kept, refuse_written
from lightning_lap2.gradients.ghost.terms import Dense, Term
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.stepcall import StepCall
from lightning_lap2.gradients.tracing import batch_statistics_refused, refuse_layers


class GhostEngine(Engine):
    """Clipped sums from one forward and one backward of the whole batch.

    The user's step runs once, as it stands, so logging, metrics and dropout are the plain ones. The graph of its
    loss tells every use of every trainable parameter. The backward computes gradients of activations only; at each
    use the output gradient is caught, and from it and the saved input come each example's squared norm, and after
    clipping the weighted sum. Per-example gradients are held only where they are no larger than the activations.

    The loss must be the mean over the batch of per-example losses: an example's gradient is then B times its share
    of the batch gradient, where the share of an example with several views is the sum of its rows' shares. A cross
    entropy with ignored labels or class weights, returned as it is, becomes each example's own mean (:mod:`shares`).
    Losses that mix examples or reduce otherwise cannot be seen in the graph; the self-check against the loop engine
    at fit start refuses them.

    Args:
        module: as for every engine.
        chunk_size: must be ``None``: the batch is one piece here. To save memory use a smaller loader batch with
            ``accumulate_grad_batches``.

    Raises:
        ValueError: ``chunk_size`` is given.
    """

    name = "ghost"

    def __init__(self, module: nn.Module, *, chunk_size: int | None = None) -> None:
        if chunk_size is not None:
            raise ValueError(
                f'chunk_size={chunk_size} has no meaning for engine="ghost", which takes the batch as one piece; '
                f"leave it None, or use a smaller loader batch with accumulate_grad_batches."
            )
        super().__init__(module, chunk_size=chunk_size)
        self._dims = BatchDims()
        self._kept: Kept | None = None

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        if clipper.norm != "l2":
            raise UnsupportedModelError(
                f'engine="ghost" computes l2 norms, but clipping is by {clipper.norm}. Use engine="vmap".'
            )
        if call.revise is not None:
            raise UnsupportedModelError(
                'engine="ghost" holds no gradients of single examples, so a gradient canary cannot take part. '
                'Use engine="vmap", or canaries that are records.'
            )
        layers = refuse_layers(self.module, vmapped=False)
        self._kept = before = self._kept.renewed(self.module) if self._kept else Kept(self.module)
        with torch.enable_grad(), batch_statistics_refused(self.module), unfused_lstm(layers), call.context():
            output = self.module.training_step(*call.args)  # type: ignore[operator]
        refuse_written(self.module, before)
        loss = loss_of(output)
        if loss is not None and call.count > 0:
            self._collect(loss, layout, call, total.dtype).add_clipped(layout, clipper, total, call.count)
        if output is loss:
            return loss if loss is None else loss.detach()
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)

    def _collect(self, loss: Tensor, layout: ParameterLayout, call: StepCall, dtype: torch.dtype) -> Collected:
        """Runs the backward of ``loss``."""
        if call.count == 1:
            return _single_example(loss, layout, dtype)
        self._dims.start(call.count * call.views)
        index = {id(p): k for k, p in enumerate(layout.parameters)}
        walk = Walk(index, layout.names, self._dims, RULES.__contains__)
        uses = walk.run(loss.grad_fn)
        factor = own_per_share(loss.grad_fn, walk, call.views)
        collector = Collector(Scope(walk, dtype), layout, uses, call.views)
        collector.backward(loss)
        self._dims.finish()
        return collector.finish(factor)


@dataclass
class Collected:
    """One backward's harvest.

    Attributes:
        terms: for each parameter used its uses and the norms ``[B]`` (fp64) of their sum; gradients of each
            example's share of the batch loss.
        factor: from that to the example's gradient, see :func:`own_per_share`.
    """

    terms: dict[int, tuple[list[Term], Tensor]]
    factor: Tensor | float

    @torch.no_grad()
    def add_clipped(self, layout: ParameterLayout, clipper: Clipper, total: Tensor, count: int) -> None:
        """``total += sum_b weight_b g_b``."""
        if not self.terms:
            return
        norms = torch.stack([norms for _, norms in self.terms.values()]).mul_(self.factor)
        if len(self.terms) < len(layout.parameters):
            used = torch.tensor(list(self.terms), device=norms.device)
            norms = norms.new_zeros(len(layout.parameters), count).index_copy_(0, used, norms)
        discarded = None
        # norms are not negative: their sum is finite only where each of them is
        if not math.isfinite(norms.sum().item()):
            bad = ~torch.isfinite(norms).all(dim=0)
            norms[:, bad] = torch.inf
            discarded = bad.nonzero()[:, 0] if bool(bad.any()) else None
        weights = round_down(clipper.weights(norms) * self.factor, total.dtype)
        views, weight = layout.views(total), weights.unbind(0)
        with full_precision():
            for k, (uses, _) in self.terms.items():
                for use in uses:
                    if discarded is not None:
                        use.discard(discarded)
                    use.add_weighted(views[k], weight[k])
        add_count(norms, layout, clipper, total)


class Collector:
    """Runs the backward and turns output gradients into terms as they come, while they are in cache."""

    def __init__(self, scope: Scope, layout: ParameterLayout, uses: list[Use], views: int) -> None:
        self.scope = scope
        self.layout = layout
        self.uses = uses
        self.views = views
        self.terms: dict[int, list[Term]] = {}
        self.norms: dict[int, Tensor] = {}
        self._expected = Counter([p for use in uses for d in use.operands.values() for p in d.parameters])
        self._exact = torch.get_float32_matmul_precision() == "highest"

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
        except CheckpointError as error:
            raise UnsupportedModelError(
                "activation checkpointing (torch.utils.checkpoint) gives saved inputs out once only, but "
                'engine="ghost" needs them again. Use engine="loop", or no checkpointing.'
            ) from error
        finally:
            for handle in handles:  # a node that holds its own hook would never be freed
                handle.remove()
        for use, grad in zip(last, grads, strict=True):
            self._collect(use, grad)

    def _hook(self, use: Use) -> Any:
        return lambda grads: self._collect(use, grads[0])

    @torch.no_grad()
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
            raise self.scope.refuse(use, f"its inputs {sorted(use.operands.keys() - terms.keys())}")
        for operand, term in terms.items():
            derived = use.operands[operand]
            if self.views > 1:
                term = term.folded(self.views)
            term = term.compact()
            for k in derived.parameters:
                own = term_of_parameter(term, derived, self.layout.parameters[k], self.scope.dtype)
                if self._expected[k] == 1 and not isinstance(own, Pulled):
                    self.terms[k], self.norms[k] = [own], own.norms()
                else:
                    self.terms.setdefault(k, []).append(own)

    @torch.no_grad()
    def finish(self, factor: Tensor | float) -> Collected:
        """All terms with the norms of their sums, ordered by parameter."""
        result = {}
        for k, terms in sorted(self.terms.items()):
            if k not in self.norms:
                with full_precision():
                    terms = merge(terms)
                    self.norms[k] = norms_of_sum(terms)
            result[k] = (terms, self.norms[k])
        return Collected(result, factor)


def _single_example(loss: Tensor, layout: ParameterLayout, dtype: torch.dtype) -> Collected:
    """A batch of one: its gradient is the batch gradient."""
    grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
    dense = {k: Dense(g.detach().to(dtype)[None]) for k, g in enumerate(grads) if g is not None}
    return Collected({k: ([term], term.norms()) for k, term in dense.items()}, 1)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned; ``None`` where it returned none.

    Raises:
        UnsupportedModelError: no scalar tensor that depends on a parameter.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UnsupportedModelError(
            f"training_step returned {kind} as loss; it must be a scalar tensor computed from the parameters."
        )
    return loss


@contextmanager
def unfused_lstm(layers: Iterable[nn.Module]) -> Iterator[None]:
    """On a CPU nn.LSTM is one fused oneDNN node, which gives no output gradients of its matrix products away; with
    oneDNN off inside, it is a sequence of plain ones."""
    if not any(isinstance(layer, nn.LSTM) for layer in layers):
        yield
        return
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])
