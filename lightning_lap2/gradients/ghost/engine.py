"""``engine="ghost"``: one forward, one backward, no per-example gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.engine import Engine, StepCall, UnsupportedModelError, full_precision
from lightning_lap2.gradients.ghost.batchdims import BatchDims
from lightning_lap2.gradients.ghost.combine import merge, squares_of_sum
from lightning_lap2.gradients.ghost.graph import Use, Walk
from lightning_lap2.gradients.ghost.numerics import row_squares
from lightning_lap2.gradients.ghost.rules import RULES, Scope
from lightning_lap2.gradients.ghost.sources import Pulled, term_of_parameter
from lightning_lap2.gradients.ghost.terms import Dense, Term
from lightning_lap2.gradients.parameters import ParameterLayout


class GhostEngine(Engine):
    """Clipped sums from one forward and one backward of the whole batch.

    The user's step runs once, as it stands, so logging, metrics and dropout are the plain ones. The graph of its
    loss tells every use of every trainable parameter. The backward computes gradients of activations only; at each
    use the output gradient is caught, and from it and the saved input come each example's squared norm, and after
    clipping the weighted sum. Per-example gradients are held only where they are no larger than the activations.

    The loss must be the mean over the batch of per-example losses: an example's gradient is then B times its share
    of the batch gradient. Losses that mix examples or reduce otherwise cannot be seen in the graph; the self-check
    against the loop engine at fit start refuses them.

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

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        refuse_modules(self.module)
        versions = [p._version for p in layout.parameters]
        with torch.enable_grad(), unfused_lstm(self.module), call.context():
            output = self.module.training_step(*call.args)  # type: ignore[operator]
        for name, parameter, version in zip(layout.names, layout.parameters, versions, strict=True):
            if parameter._version != version:
                raise UnsupportedModelError(
                    f"training_step changes parameter {name!r} in place (Embedding(max_norm=...)?): the change "
                    f"would leave the model without noise. Remove it."
                )
        loss = loss_of(output)
        if loss is not None and call.count > 0:
            terms = self._terms(loss, layout, call.count, total.dtype)
            with torch.no_grad(), full_precision():
                self._clip(terms, layout, clipper, total, call.count)
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)

    def _terms(
        self, loss: Tensor, layout: ParameterLayout, count: int, dtype: torch.dtype
    ) -> dict[int, tuple[list[Term], Tensor]]:
        """For each parameter used: its uses and the squared norms ``[B]`` of their sum, both of gradients of the
        batch loss."""
        if count == 1:
            return _single_example(loss, layout, dtype)
        self._dims.start(count)
        index = {id(p): k for k, p in enumerate(layout.parameters)}
        walk = Walk(index, layout.names, self._dims, RULES.__contains__)
        uses = walk.run(loss.grad_fn)
        collector = Collector(Scope(walk, dtype), layout, uses)
        collector.backward(loss)
        self._dims.finish()
        return collector.finish()

    def _clip(
        self,
        terms: dict[int, tuple[list[Term], Tensor]],
        layout: ParameterLayout,
        clipper: Clipper,
        total: Tensor,
        count: int,
    ) -> None:
        """``total += sum_b weight_b g_b`` with g_b = B times the gradient of b's share of the batch loss."""
        norms = torch.zeros(len(layout.parameters), count, dtype=torch.float64, device=total.device)
        for k, (_, squares) in terms.items():
            norms[k] = squares.clamp_min(0).sqrt() * count  # nan stays nan
        bad = ~torch.isfinite(norms).all(dim=0)
        norms[:, bad] = torch.inf
        weights = (clipper.weights(norms) * count).to(total.dtype)
        discarded = bad.nonzero()[:, 0] if bool(bad.any()) else None
        views = layout.views(total)
        for k, (uses, _) in terms.items():
            for use in uses:
                if discarded is not None:
                    use.discard(discarded)
                use.add_weighted(views[k], weights[k])


class Collector:
    """Runs the backward and turns output gradients into terms as they come, while they are in cache."""

    def __init__(self, scope: Scope, layout: ParameterLayout, uses: list[Use]) -> None:
        self.scope = scope
        self.layout = layout
        self.uses = uses
        self.terms: dict[int, list[Term]] = {}
        self.squares: dict[int, Tensor] = {}
        self._expected = Counter(p for use in uses for d in use.operands.values() for p in d.parameters)

    def backward(self, loss: Tensor) -> None:
        """Gradients with respect to activations only: the engine runs what the last uses need and no weight
        gradient. Uses above others are caught on the way, before their node runs and frees what it saved."""
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

    def _collect(self, use: Use, grad: Tensor | None) -> None:
        if grad is None:
            return
        with torch.no_grad(), full_precision():
            terms = RULES[use.name](use, self.scope, grad)
            missing = use.operands.keys() - terms.keys()
            if missing:
                raise self.scope.refuse(use, f"its inputs {sorted(missing)}")
            for operand, term in terms.items():
                derived = use.operands[operand]
                for k in derived.parameters:
                    parameter = self.layout.parameters[k]
                    own = term_of_parameter(term, derived, parameter, self.scope.dtype)
                    self.terms.setdefault(k, []).append(own)
                    if self._expected[k] == 1 and not isinstance(own, Pulled):
                        self.squares[k] = own.squares()

    def finish(self) -> dict[int, tuple[list[Term], Tensor]]:
        """All terms with the squared norms of their sums, ordered by parameter."""
        result = {}
        with torch.no_grad(), full_precision():
            for k, terms in sorted(self.terms.items()):
                if k not in self.squares:
                    terms = merge(terms)
                    self.squares[k] = squares_of_sum(terms)
                result[k] = (terms, self.squares[k])
        return result


def _single_example(loss: Tensor, layout: ParameterLayout, dtype: torch.dtype) -> dict[int, tuple[list[Term], Tensor]]:
    """A batch of one: its gradient is the batch gradient."""
    grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
    dense = {k: g.detach().to(dtype)[None] for k, g in enumerate(grads) if g is not None}
    return {k: ([Dense(g)], row_squares(g.reshape(1, -1))) for k, g in dense.items()}


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
def unfused_lstm(module: nn.Module) -> Iterator[None]:
    """On a CPU nn.LSTM is one fused oneDNN node, which gives no output gradients of its matrix products away; with
    oneDNN off inside, it is a sequence of plain ones."""
    if not any(isinstance(child, nn.LSTM) for child in module.modules()):
        yield
        return
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def refuse_modules(module: nn.Module) -> None:
    """Refuses layers that the graph does not give away.

    Raises:
        UnsupportedModelError: BatchNorm in training mode, even frozen: it mixes examples.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
            raise UnsupportedModelError(
                f"Layer {name!r} is {type(child).__name__} in training mode: it mixes examples, and its running "
                f"statistics leave the model without noise. Use nn.GroupNorm, or put it in eval()."
            )
