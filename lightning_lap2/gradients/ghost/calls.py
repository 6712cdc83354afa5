"""Calls of torch that serve all examples at once, inside ``vmap``.

``vmap`` takes some functions apart (a linear layer into a product, a multiplication and an addition) and others have no
batching rule on some device. Here they are called as they are, for the physical tensors ``[B, *shape]``: as exact, and
faster. Where an argument is not what a call here can take, ``vmap``'s own way is left.

The layers' parameters are not batched, so a layer stays one node of the graph; a parameter that was spread is, and goes
``vmap``'s way. B is the number of examples, N the size of an example's own batch.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.marks import following
from lightning_lap2.gradients.physical import (
    apart,
    carries_batch,
    current_level,
    enter_vmap_again,
    innermost,
    is_batched,
    leave_vmap,
    outside,
    recurrent_functions,
    seen_by_users,
    torchs_own,
    unseen_by_modes,
    whole,
)
from lightning_lap2.gradients.step.replacing import Replacements, Wanted

Call = Callable[..., Any]


def _plain(*values: Any) -> bool:
    """Whether none of the values differs between examples."""
    return not any(isinstance(value, Tensor) and carries_batch(value) for value in values)


def _physical(batched: Tensor, *others: Any) -> Tensor | None:
    """``[B, *shape]`` of a tensor that differs between examples, for an operation on it and the others; ``None`` where
    that operation must go through ``vmap``: others differ too, or code of the user's would see all examples at once."""
    if not is_batched(batched):
        return None
    for value in others:
        if isinstance(value, Tensor) and carries_batch(value):
            return None
    x = apart(batched)
    return None if seen_by_users((x, *others)) else x


class _Together:
    """Around one operation of torch on physical tensors, outside ``vmap``.

    The dispatch mode of :class:`Marks` sees nothing of it, which saves it a call for each of torch's own steps. Instead
    it is told what the operation reads, and each tensor that it makes. Not for operations in which a parameter meets
    the examples in a node of the graph that is neither an input's nor one of a tensor told: it would be taken for one
    that no example went into.

    Args:
        read: every tensor that the operation reads, at least one of which carries examples; other values are ignored.
    """

    __slots__ = ("_layer", "_marks", "_unseen")

    def __init__(self, *read: Any) -> None:
        marks = following()
        self._marks = marks if marks is not None and marks.told(read) else None
        self._unseen: Any = None

    def __enter__(self) -> _Together:
        self._layer = leave_vmap()
        if self._marks is not None:
            self._unseen = unseen_by_modes()
        return self

    def __exit__(self, *_error: object) -> None:
        self._unseen = None
        enter_vmap_again(self._layer)

    def made(self, tensor: Tensor) -> Tensor:
        """Tells of a tensor that is no view of another one told."""
        if self._marks is not None:
            self._marks.made(tensor)
        return tensor

    def folded(self, x: Tensor, kept: int) -> Tensor:
        """``[B, .., *rest]`` as ``[B .., *rest]`` with ``kept`` trailing dimensions.

        What was made in that shape, and unfolded since, is taken as it was: the graph then has no nodes for the way
        there and back.
        """
        lead = x.dim() - kept
        if lead == 1:
            return x
        base = x._base
        if base is None or base.dim() != kept + 1 or not _is_unfolded(x, base, lead):
            base = x.flatten(0, lead - 1)
        return self.made(base)


def _is_unfolded(x: Tensor, base: Tensor, lead: int) -> bool:
    """Whether ``x`` is all of ``base``, whose leading dimension its first ``lead`` ones are."""
    shape, strides, step = x.shape, x.stride(), base.stride(0)
    for i in range(lead - 1, -1, -1):
        if shape[i] != 1 and strides[i] != step:
            return False
        step *= shape[i]
    return (
        shape[lead:] == base.shape[1:]
        and strides[lead:] == base.stride()[1:]
        and x.numel() == base.numel()
        and x.storage_offset() == base.storage_offset()
        and x.dtype is base.dtype
        and x.requires_grad == base.requires_grad
        and (x.is_neg(), x.is_conj()) == (base.is_neg(), base.is_conj())
    )


# --- layers ----------------------------------------------------------------------------------------------------------


def _linear(original: Call) -> Call:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = _physical(input, weight, bias)
        if x is None or weight.dim() != 2:
            return original(input, weight, bias)
        # one matrix product for all positions, whatever the strides: torch itself would not always fold them
        with _Together(x, weight, bias) as call:
            y = call.made(original(call.folded(x, 1), weight, bias))
            if x.dim() > 2:
                y = y.view(*x.shape[:-1], y.shape[-1])
        return whole(y)

    return linear


def _addmm(original: Call) -> Call:
    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **out: Any) -> Tensor:
        x = None if out or input.dim() > 1 else _physical(mat1, input, mat2)  # [B, R, p]
        if x is None:
            return original(input, mat1, mat2, beta=beta, alpha=alpha, **out)
        with _Together(input, x, mat2) as call:
            y = call.made(original(input, call.folded(x, 1), mat2, beta=beta, alpha=alpha)).view(*x.shape[:2], -1)
        return whole(y)

    return addmm


def _layer_norm(original: Call) -> Call:
    def layer_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        x = _physical(input, weight, bias)
        if x is None or input.dim() < len(normalized_shape):
            return original(input, normalized_shape, weight, bias, eps)
        with _Together(x, weight, bias) as call:
            y = call.made(original(x, normalized_shape, weight, bias, eps))
        return whole(y)

    return layer_norm


def _over_rows(dims: int) -> Callable[[Call], Call]:
    """A function of ``[N, C, *dims]`` or of ``[C, *dims]`` that takes each row by itself: convolutions and pools."""

    def make(original: Call) -> Call:
        def function(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            x = _physical(input, *args, *kwargs.values())
            if x is None or input.dim() not in (dims + 1, dims + 2) or kwargs.get("return_indices"):
                return original(input, *args, **kwargs)
            with _Together(x, *args, *kwargs.values()) as call:
                y = call.made(original(call.folded(x, dims + 1), *args, **kwargs))
                if x.dim() > dims + 2:
                    y = y.view(*x.shape[:2], *y.shape[1:])
            return whole(y)

        return function

    return make


def _group_norm(original: Call) -> Call:
    def group_norm(
        input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        x = _physical(input, weight, bias)  # [B, N, C, ...]
        if x is None or input.dim() < 2:
            return original(input, num_groups, weight, bias, eps)
        with _Together(x, weight, bias) as call:
            y = call.made(original(call.folded(x, x.dim() - 2), num_groups, weight, bias, eps)).view(x.shape)
        return whole(y)

    return group_norm


def _batch_norm(original: Call) -> Call:
    def batch_norm(
        input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        others = (running_mean, running_var, weight, bias)
        x = None if training else _physical(input, *others)  # [B, N, C, ...]
        if x is None or input.dim() < 2:
            return original(input, *others, training, momentum, eps)
        with _Together(x, *others) as call:
            y = call.made(original(call.folded(x, x.dim() - 2), *others, training, momentum, eps)).view(x.shape)
        return whole(y)

    return batch_norm


def _entry_by_entry(original: Call) -> Call:
    """A function of one tensor that takes each entry by itself."""

    def function(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = None if any(a is True for a in (*args, *kwargs.values())) else _physical(input)  # True: in place
        if x is None:
            return original(input, *args, **kwargs)
        with _Together(x) as call:
            folds = x.dim() > 2 and x._base is not None
            y = call.made(original(call.folded(x, x.dim() - 2) if folds else x, *args, **kwargs))
            if folds:
                y = y.view(x.shape)
        return whole(y)

    return function


def _einsum(original: Call) -> Call:
    """Two operands, of which one differs between examples: they get a letter of their own, so that the other is not
    copied for each of them."""

    def einsum(*args: Any) -> Tensor:
        operands = args[1:]
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        if not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0] or "." in args[0]:
            return original(*args)
        batched = [is_batched(x) for x in operands]
        letter = next((c for c in string.ascii_letters if c not in args[0]), None)
        plain = [x for x, own in zip(operands, batched, strict=True) if not own]
        if sum(batched) != 1 or letter is None or not _plain(*plain):
            return original(*args)
        physical = [apart(x) if own else x for x, own in zip(operands, batched, strict=True)]
        if seen_by_users(physical):
            return original(*args)
        inputs, output = args[0].replace(" ", "").split("->")
        terms = [letter + term if own else term for term, own in zip(inputs.split(","), batched, strict=True)]
        with outside():
            y = original(f"{','.join(terms)}->{letter}{output}", *physical)
        return whole(y)

    return einsum


def _embedding(original: Call) -> Call:
    """For a table that was spread: torch's rule knows ``padding_idx`` in the first example's copy only."""

    def embedding(
        input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        options = (max_norm, norm_type, scale_grad_by_freq, sparse)
        if padding_idx is None or not is_batched(weight):
            return original(input, weight, padding_idx, *options)
        rows = original(input, weight, None, *options)
        padded = (input == (padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx)).unsqueeze(-1)
        return torch.where(padded, rows.detach(), rows)

    return embedding


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(original: Call) -> Call:
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        qkv = (query, key, value)
        rank = query.dim()
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        alike = all(is_batched(t) and t.dim() == rank and t.shape[:-3] == query.shape[:-3] for t in qkv)
        alike = alike and 2 <= rank <= 4 and not seen_by_users([*map(innermost, qkv), attn_mask])
        if not alike or not _mask_fits(attn_mask, query, key):
            with sdpa_kernel(SDPBackend.MATH):  # a CPU's fused kernel has no batching rule
                return original(query, key, value, attn_mask=attn_mask, **options)
        mask, leading = _mask(attn_mask, query), apart(query).shape[:-1]
        with outside():
            y = original(*(_four(apart(t)) for t in qkv), attn_mask=mask, **options)
            y = y.view(*leading, y.shape[-1])
        return whole(y)

    return scaled_dot_product_attention


def _four(x: Tensor) -> Tensor:
    """``[B, N, H, L, E]``, ``[B, H, L, E]`` or ``[B, L, E]`` as ``[B N, H, L, E]``."""
    return x.flatten(0, 1) if x.dim() == 5 else x if x.dim() == 4 else x.unsqueeze(1)


def _mask_fits(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether the mask broadcasts to the scores without widening them (which torch allows in no version alike)."""
    if mask is None:
        return True
    if not (is_batched(mask) or _plain(mask)):
        return False
    scores = (*query.shape[:-1], key.shape[-2])
    return 2 <= mask.dim() <= len(scores) and all(
        m in (1, n) for m, n in zip(mask.shape, scores[len(scores) - mask.dim() :], strict=True)
    )


def _mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What :func:`_four` makes of ``query``, for its mask."""
    if mask is None:
        return None
    rank = query.dim()
    if is_batched(mask):
        m = apart(mask)
        m = m.view(m.shape[0], *[1] * (rank - mask.dim()), *mask.shape)
    elif rank < 4 or mask.dim() < 4 or mask.shape[0] == 1:
        # no rank of its own for the examples: it is the same for all
        return mask if rank > 2 or mask.dim() < 3 else mask.unsqueeze(0)
    else:
        m = mask.expand(apart(query).shape[0], *mask.shape)
    if rank == 4:
        m = m.expand(-1, query.shape[0], -1, -1, -1)
    return _four(m)


# --- losses ----------------------------------------------------------------------------------------------------------


def _cross_entropy(original: Call) -> Call:
    def cross_entropy(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        known = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
        x = _physical(input, weight) if known and is_batched(target) else None
        t = None if x is None else apart(target)
        if x is None or t is None or seen_by_users((t,)) or (weight is not None and weight.requires_grad):
            return original(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )  # fmt: skip
        rows = input.dim() > 1  # [B, N, C, ...]; else [B, C], and a loss for each of B as it is
        with _Together(x, t, weight) as call:
            if rows:
                x, t = call.folded(x, x.dim() - 2), t.flatten(0, 1)
            each = original(
                x, t, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
            )  # fmt: skip
            if rows:
                each = each.view(-1, input.shape[0], *each.shape[1:])  # [B, N, ...]
            if reduction != "none":
                alone = each.numel() == each.shape[0]  # one position: nothing to add up
                sums = each.view(-1) if alone else each.flatten(1).sum(dim=1)
                each = sums if reduction == "sum" else sums / _counted(t, weight, ignore_index, each)
            call.made(each)
        return whole(each)

    return cross_entropy


def _counted(target: Tensor, weight: Tensor | None, ignore_index: int, each: Tensor) -> Tensor | int:
    """What the mean over an example's positions divides by: the number of those that are not ignored, or the weights of
    their classes."""
    if target.is_floating_point():  # probabilities
        return each[0].numel()
    counts = target != ignore_index
    if weight is None:
        return counts.view(-1) if each.numel() == each.shape[0] else counts.view(each.shape[0], -1).sum(dim=1)
    return (weight[target.where(counts, 0)] * counts).view(each.shape[0], -1).sum(dim=1)


# --- recurrent layers ------------------------------------------------------------------------------------------------
#
# One fused node would give the output gradients of its matrix products away to nobody; here each is a call of F.linear.

State = tuple[Tensor, ...]
Weights = Sequence[Any]  # tensors, or None for a bias that a layer does not have


def _alike(given: Sequence[Tensor], weights: Sequence[Any]) -> list[Tensor] | None:
    """Inputs and states, each with the examples' dimension: one that no example went into (the zeros that layers start
    from, a learned first token) gets it. ``None`` where nothing differs between examples."""
    template = next((t for t in (*given, *weights) if is_batched(t)), None)
    if template is None:
        return None
    return [t if is_batched(t) else t + template.new_zeros(t.shape) for t in given]


def _lstm(gates: Tensor, state: State, weights: Weights) -> State:
    """``gates`` is W_ih x + b_ih; ``weights``: W_hh, b_hh, and with a projection W_hr."""
    hidden, cell = state
    i, f, g, o = (gates + F.linear(hidden, *weights[:2])).chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return (F.linear(hidden, weights[2]) if len(weights) > 2 else hidden), cell


def _gru(gates: Tensor, state: State, weights: Weights) -> State:
    (hidden,) = state
    reset, update, new = gates.chunk(3, dim=-1)
    own_reset, own_update, own_new = F.linear(hidden, *weights[:2]).chunk(3, dim=-1)
    keep = (update + own_update).sigmoid()
    candidate = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return ((hidden - candidate) * keep + candidate,)


def _rnn(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    def cell(gates: Tensor, state: State, weights: Weights) -> State:
        return (nonlinearity(gates + F.linear(state[0], *weights[:2])),)

    return cell


def _layers(cell: Callable[..., State], states: int) -> Callable[[Call], Call]:
    """A stack of recurrent layers, as torch's private functions for padded sequences take them."""

    def make(original: Call) -> Call:
        def recurrent(*args: Any) -> Any:
            # packed: (data, batch_sizes, hx, ...); padded: (input, hx, params, biases, layers, dropout, ...)
            if len(args) != 9:
                return original(*args)
            x, hx, flat, biases, layers, dropout, train, both, batch_first = args
            alike = _alike((x, *hx) if states == 2 else (x, hx), flat)
            if alike is None:
                return original(*args)
            x, *own = alike  # states: [layers directions, N, H]
            directions = 2 if both else 1
            per = len(flat) // (layers * directions)
            x = x.transpose(0, 1) if batch_first else x  # [T, N, I]
            last: list[State] = []
            for layer in range(layers):
                outputs = []
                for direction in range(directions):
                    number = layer * directions + direction
                    weights = flat[number * per : (number + 1) * per]
                    first = tuple(state[number] for state in own)
                    output, state = _run(cell, x, first, _arranged(weights, biases), reverse=direction == 1)
                    outputs.append(output)
                    last.append(state)
                x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
                if dropout and train and layer < layers - 1:
                    x = F.dropout(x, dropout)
            x = x.transpose(0, 1) if batch_first else x
            return (x, *(torch.stack(parts) for parts in zip(*last, strict=True)))

        return recurrent

    return make


def _arranged(weights: Sequence[Tensor], biases: bool) -> tuple[Tensor, Any, Weights]:
    """W_ih, b_ih, and (W_hh, b_hh, W_hr if any) from torch's order, W_ih, W_hh[, b_ih, b_hh][, W_hr]."""
    bias, own_bias = weights[2:4] if biases else (None, None)
    return weights[0], bias, [weights[1], own_bias, *weights[4 if biases else 2 :]]


def _run(
    cell: Callable[..., State], x: Tensor, state: State, weights: tuple[Tensor, Any, Weights],
    *, reverse: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    """One layer in one direction over ``[T, N, I]``: its outputs ``[T, N, H]`` and last state."""
    gates = F.linear(x, *weights[:2])
    outputs = []
    for step in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        state = cell(step, state, weights[2])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _single(cell: Callable[..., State], states: int) -> Callable[[Call], Call]:
    """A recurrent cell: ``(input, hx, W_ih, W_hh, b_ih, b_hh)``."""

    def make(original: Call) -> Call:
        def one(
            x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
        ) -> Any:
            alike = _alike((x, *hx) if states == 2 else (x, hx), (w_ih, w_hh, b_ih, b_hh))
            if alike is None:
                return original(x, hx, w_ih, w_hh, b_ih, b_hh)
            found = cell(F.linear(alike[0], w_ih, b_ih), tuple(alike[1:]), (w_hh, b_hh))
            return found if states == 2 else found[0]

        return one

    return make


_REPLACED: dict[Any, dict[str, Callable[[Call], Call]]] = {
    F: {
        "linear": _linear,
        **{f"conv{n}d": _over_rows(n) for n in (1, 2, 3)},
        **{f"conv_transpose{n}d": _over_rows(n) for n in (1, 2, 3)},
        **{f"{kind}_pool{n}d": _over_rows(n) for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)},
        **dict.fromkeys(("relu", "gelu", "silu"), _entry_by_entry),
        "embedding": _embedding,
        "layer_norm": _layer_norm,
        "group_norm": _group_norm,
        "batch_norm": _batch_norm,
        "scaled_dot_product_attention": _attention,
        "cross_entropy": _cross_entropy,
    },
    torch: {"addmm": _addmm, "einsum": _einsum},
}
_RECURRENT: dict[Any, dict[str, Callable[[Call], Call]]] = {
    recurrent_functions: {
        "lstm": _layers(_lstm, 2),
        "gru": _layers(_gru, 1),
        "rnn_tanh": _layers(_rnn(torch.tanh), 1),
        "rnn_relu": _layers(_rnn(torch.relu), 1),
        "lstm_cell": _single(_lstm, 2),
        "gru_cell": _single(_gru, 1),
        "rnn_tanh_cell": _single(_rnn(torch.tanh), 1),
        "rnn_relu_cell": _single(_rnn(torch.relu), 1),
    },
}
"""The functions by where they live: what every caller finds there, torch's own layers included."""
_CALLED = ("relu", "layer_norm", "group_norm", "batch_norm", "max_pool1d", "max_pool2d", "max_pool3d")
"""What those of them that are written in Python call in turn, and would find replaced."""


def _if_torchs_own(make: Callable[[Call], Call]) -> Callable[[Call], Call]:
    """A function that the user has put in torch's place stays: like all code of the user's it sees one example."""
    return lambda original: make(original) if torchs_own(original) else original


def _for_one_example(original: Call) -> Call:
    if torchs_own(original):
        return original

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_level() is None:
            raise UnsupportedModelError(
                f"torch.{original.__name__} was replaced by {original.__module__}, and would see all examples at once "
                "where engine='ghost' calls it: use engine='auto', which goes on to an engine that runs it"
            )
        return original(*args, **kwargs)

    return call


def _wanted(replaced: dict[Any, dict[str, Callable[[Call], Call]]]) -> list[Wanted]:
    return [(owner, name, _if_torchs_own(make)) for owner, names in replaced.items() for name, make in names.items()]


_calls = Replacements([*_wanted(_REPLACED), *((torch, name, _for_one_example) for name in _CALLED)])
_recurrent_calls = Replacements(_wanted(_RECURRENT))


@contextmanager
def physical_calls(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the functions of torch that are named here take the physical way.

    Args:
        layers: all of the user's module; those of recurrent ones are replaced where there is such a layer.
    """
    recurrent = any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in layers)
    with _calls.active(), _recurrent_calls.active() if recurrent else nullcontext():
        yield
