"""Each call for all examples at once against the plain function, one example at a time: in fp64, over its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.ghost import calls
from lightning_lap2.gradients.ghost.calls import _RECURRENT, _REPLACED, physical_calls
from lightning_lap2.gradients.ghost.graph import Walk
from lightning_lap2.gradients.physical import quiet_fallback

B = 3
LAYERS = [nn.RNNCell(1, 1)]
"""Of some module with a recurrent layer in it."""


def check(
    function: Callable[..., Any], batched: Sequence[Tensor], shared: Sequence[Tensor] = (), *, dims: int = 0
) -> None:
    """``function(*batched, *shared)`` under ``vmap`` and the physical calls equals a plain loop: values, and gradients
    of everything that floats. The examples' dimension of ``batched`` lies at ``dims``."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (*batched, *shared)]
    own, common = leaves[: len(batched)], leaves[len(batched) :]
    with physical_calls(LAYERS), quiet_fallback():
        found = vmap(lambda *xs: function(*xs, *common), in_dims=dims, randomness="different")(
            *(x.movedim(0, dims) for x in own)
        )
    each = [function(*(x[i] for x in own), *common) for i in range(B)]
    one = isinstance(found, Tensor)
    found, each = ((found,), [(e,) for e in each]) if one else (found, each)
    expected = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, equal_nan=True)
    floating = [t for t in leaves if t.requires_grad]
    weights = [torch.randn(e.shape) for e in expected]
    gradients = [
        torch.autograd.grad(
            sum((w * o).sum() for w, o in zip(weights, outs, strict=True) if o.requires_grad),
            floating,
            allow_unused=True,
        )
        for outs in (found, expected)
        if any(o.requires_grad for o in expected)
    ]
    for a, b in zip(*gradients, strict=True) if gradients else ():
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, equal_nan=True)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_nothing_is_left_replaced() -> None:
    before = [
        (owner, name, getattr(owner, name)) for owner, names in (_REPLACED | _RECURRENT).items() for name in names
    ]
    own = [(owner, name, name in vars(owner)) for owner, name, _ in before]
    with physical_calls(LAYERS):
        assert all(getattr(owner, name) is not function for owner, name, function in before)
    with pytest.raises(ZeroDivisionError), physical_calls(LAYERS):
        1 / 0  # noqa: B018
    assert all(getattr(owner, name) is function for owner, name, function in before)
    assert own == [(owner, name, name in vars(owner)) for owner, name, _ in before]


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 2, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("which", ["shared", "no bias", "spread weight", "spread bias", "all spread"])
def test_linear(shape: tuple[int, ...], which: str, dims: int) -> None:
    x, w, b = torch.randn(B, *shape), torch.randn(5, 4), torch.randn(5)
    many = torch.randn(B, 5, 4), torch.randn(B, 5)
    match which:
        case "shared":
            check(F.linear, [x], [w, b], dims=dims)
        case "no bias":
            check(F.linear, [x], [w], dims=dims)
        case "spread weight":
            check(lambda x, w, b: F.linear(x, w, b), [x, many[0]], [b], dims=dims)
        case "spread bias":
            check(lambda x, b, w: F.linear(x, w, b), [x, many[1]], [w], dims=dims)
        case _:
            check(F.linear, [x, *many], dims=dims)


def test_linear_of_what_differs_between_no_examples() -> None:
    x, w = torch.randn(2, 4), torch.randn(5, 4)
    check(lambda y, x, w: F.linear(x, w) + y, [torch.randn(B, 1, 1)], [x, w])
    check(lambda w, x: F.linear(x, w), [torch.randn(B, 5, 4)], [x])


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2.0, 0.5)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_addmm(alpha: float, beta: float, rank: int) -> None:
    bias = torch.randn(())[None].expand(6) if rank == 0 else torch.randn(*[5, 6][2 - rank :])
    check(
        lambda x, b, w: torch.addmm(b, x, w, alpha=alpha, beta=beta), [torch.randn(B, 5, 4)], [bias, torch.randn(4, 6)]
    )
    check(lambda x, w, b: torch.addmm(b, x, w), [torch.randn(B, 5, 4), torch.randn(B, 4, 6)], [bias])


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("kept", [1, 2])
def test_layer_norm(shape: tuple[int, ...], kept: int, dims: int) -> None:
    if kept > len(shape):
        pytest.skip("no such dimension")
    own = shape[-kept:]
    x, w, b = torch.randn(B, *shape), torch.randn(own), torch.randn(own)
    check(lambda x, w, b: F.layer_norm(x, own, w, b, 1e-3), [x], [w, b], dims=dims)
    check(lambda x: F.layer_norm(x, own), [x], dims=dims)
    check(lambda x, w: F.layer_norm(x, own, w), [x], [w], dims=dims)
    check(lambda x, w, b: F.layer_norm(x, own, w, b), [x, torch.randn(B, *own)], [b], dims=dims)


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("shape", [(1, 4), (2, 4, 3), (1, 4, 3, 2), (3, 4, 2, 2, 2)], ids=str)
def test_group_and_batch_norm(shape: tuple[int, ...], dims: int) -> None:
    x, w, b = torch.randn(B, *shape), torch.randn(4), torch.randn(4)
    mean, var = torch.randn(4), torch.rand(4) + 0.5
    check(lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), [x], [w, b], dims=dims)
    check(lambda x: F.group_norm(x, 2), [x], dims=dims)
    check(lambda x, w, b: F.group_norm(x, 2, w, b), [x, torch.randn(B, 4)], [b], dims=dims)
    with torch.no_grad():  # running statistics never have a gradient
        frozen = mean, var
    check(lambda x, w, b: F.batch_norm(x, *frozen, w, b, eps=1e-3), [x], [w, b], dims=dims)
    check(lambda x: F.batch_norm(x, *frozen), [x], dims=dims)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("rows", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("spread", [False, True])
def test_convolutions_and_pools(dims: int, rows: tuple[int, ...], spread: bool) -> None:
    x = torch.randn(B, *rows, 4, *[6] * dims)
    w, b = torch.randn(6, 2, *[3] * dims), torch.randn(6)
    convolve, transposed = getattr(F, f"conv{dims}d"), getattr(F, f"conv_transpose{dims}d")
    pool, mean = getattr(F, f"max_pool{dims}d"), getattr(F, f"adaptive_avg_pool{dims}d")
    if spread:
        w = torch.stack([w, 2 * w, -w])
        check(lambda x, w, b: convolve(x, w, b, 2, 1, groups=2), [x, w], [b])
        return
    check(lambda x, w, b: convolve(x, w, b, 2, 1, 2, 2), [x], [w, b])
    check(lambda x, w: convolve(x, w, padding="same", groups=2), [x], [w])
    check(lambda x, w: transposed(x, w, stride=2, output_padding=1, groups=2), [x], [w[:4]], dims=1)
    check(lambda x: pool(x, 2, 1), [x], dims=1)
    check(lambda x: pool(x, 2, return_indices=True), [x])
    check(lambda x: mean(x, 2), [x])
    check(lambda x: getattr(F, f"avg_pool{dims}d")(x, 2), [x])


@pytest.mark.parametrize("padding", [None, 1, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (1, 4)], ids=str)
def test_embedding(shape: tuple[int, ...], by_frequency: bool, padding: int | None) -> None:
    index, table = torch.randint(0, 4, (B, *shape)), torch.randn(4, 2)
    table[1] = 0.0

    def look_up(i: Tensor, t: Tensor) -> Tensor:
        return F.embedding(i, t, padding, scale_grad_by_freq=by_frequency)

    check(look_up, [index, torch.randn(B, 4, 2)])
    check(lambda t, i: look_up(i, t), [torch.randn(B, 4, 2)], [index[0]])
    if not by_frequency:  # counted over the batch; for ghost a table of its own for each example
        check(look_up, [index], [table])


EINSUMS = [
    "bd,kd->bk",
    "bd,dk->bk",
    "bnd,dhk->bnhk",
    "d,dk->k",
    "bd,bd->b",
    "b,d->bd",
    "ii,i->i",
    "bd,dk->kb",
    "bd,dk->",
]


@pytest.mark.parametrize("equation", EINSUMS)
@pytest.mark.parametrize("batched", [(True, False), (False, True), (True, True)])
def test_einsum(equation: str, batched: tuple[bool, bool]) -> None:
    sizes = {"b": 2, "n": 3, "d": 4, "k": 5, "h": 2, "i": 3}
    x, y = (
        torch.randn(*[B] * own, *[sizes[c] for c in term])
        for own, term in zip(batched, equation.split("->")[0].split(","), strict=True)
    )
    match batched:
        case (True, False):
            check(lambda x, y: torch.einsum(equation, x, y), [x], [y])
        case (False, True):
            check(lambda y, x: torch.einsum(equation, [x, y]), [y], [x])
        case _:
            check(lambda x, y: torch.einsum(equation, x, y), [x, y])


def test_einsum_in_other_words() -> None:
    x, w, v = torch.randn(B, 2, 4), torch.randn(4, 5), torch.randn(5)
    check(lambda x, w: torch.einsum("...d,dk->...k", x, w), [x], [w])
    check(lambda x, w: torch.einsum("bd,dk", x, w), [x], [w])
    check(lambda x, w, v: torch.einsum("bd,dk,k->b", x, w, v), [x], [w, v])
    check(lambda x, w: torch.einsum(" b d , d k -> b k", x, w), [x], [w])


# --- attention -------------------------------------------------------------------------------------------------------

L, S, E, H, N = 4, 5, 6, 2, 2
LEADS = {2: (), 3: (H,), 4: (N, H), 5: (2, N, H)}


def masks(rank: int) -> list[tuple[int, ...]]:
    """Every shape of a mask that broadcasts to the scores of queries of this rank."""
    full = (*LEADS[rank], L, S)
    found = []
    for own in range(2, rank + 1):
        found += list(itertools.product(*({1, n} for n in full[len(full) - own :])))
    return found


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_attention_with_masks_of_every_shape(rank: int, kind: torch.dtype) -> None:
    lead = LEADS[rank]
    q, k, v = torch.randn(B, *lead, L, E), torch.randn(B, *lead, S, E), torch.randn(B, *lead, S, E + 1)
    for shape in masks(rank):
        shared, own = torch.randn(shape), torch.randn(B, *shape)
        if kind is torch.bool:
            shared, own = shared > -1.0, own > -1.0
        check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), [q, k, v], [shared])
        check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [q, k, v, own])


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("dims", [0, 1])
def test_attention_options(rank: int, dims: int) -> None:
    lead = LEADS[rank]
    q, k, v = torch.randn(B, *lead, L, E), torch.randn(B, *lead, S, E), torch.randn(B, *lead, S, E)
    attention = F.scaled_dot_product_attention
    check(lambda q, k, v: attention(q, k, v, is_causal=True), [q, k, v], dims=dims)
    check(lambda q, k, v: attention(q, k, v, scale=0.3), [q, k, v], dims=dims)
    check(lambda q, k, v: attention(q, k, v, None, 0.0, True, scale=2.0), [q, k, v], dims=dims)
    # a learned query, and a memory that all examples share
    check(lambda k, v, q: attention(q, k, v), [k, v], [q[0]], dims=dims)
    check(lambda q, k, v: attention(q, k, v), [q], [k[0], v[0]], dims=dims)


@pytest.mark.parametrize("lead", [(1,), (2,)])
def test_attention_with_fewer_heads_for_keys(lead: tuple[int, ...]) -> None:
    q, k, v = torch.randn(B, *lead, 4, L, E), torch.randn(B, *lead, 2, S, E), torch.randn(B, *lead, 2, S, E)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), [q, k, v])
    mask = torch.randn(B, 1, 1, 1, S) > -1
    check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True), [q, k, v, mask])
    # broadcast over the batch of one example
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [q, k[:, :1, :1], v[:, :1, :1]])


def test_attention_where_a_row_is_masked_out() -> None:
    q = torch.randn(B, 1, H, L, E)
    mask = torch.ones(B, 1, 1, L, L, dtype=torch.bool)
    mask[1, ..., 2, :] = False
    check(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), [q, mask])


def test_dropout_of_attention_differs_between_examples() -> None:
    q = torch.ones(1, 1, H, L, E).expand(64, -1, -1, -1, -1)
    v = torch.ones(64, 1, H, L, 1)
    with physical_calls(LAYERS):
        y = vmap(lambda q, v: F.scaled_dot_product_attention(q, q, v, dropout_p=0.5), randomness="different")(q, v)
    rows = y.flatten(1)
    assert len(rows.unique(dim=0)) == 64
    assert abs(float(rows.mean()) - 1) < 0.2


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 3, 2)], ids=str)
def test_cross_entropy(shape: tuple[int, ...], weighted: bool, smoothing: float, reduction: str) -> None:
    classes = 5
    scores = torch.randn(B, *shape[:1], classes, *shape[1:])
    weight = (torch.rand(classes) + 0.1,) if weighted else ()
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}

    def loss(x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
        return F.cross_entropy(x, y, w.detach() if w is not None else None, **options)

    labels = torch.randint(0, classes, (B, *shape))
    some = torch.where(torch.rand(labels.shape) < 0.4, -100, labels)
    none = torch.full_like(labels, -100)
    for target in (labels, some, none, torch.cat([none[:1], labels[1:2], some[2:]])):
        check(loss, [scores, target], weight)
    check(loss, [scores, torch.softmax(torch.randn_like(scores), dim=2 if shape else 1)], weight)
    options["ignore_index"] = 1
    check(loss, [scores, labels], weight)


def test_cross_entropy_in_other_words() -> None:
    scores, labels = torch.randn(B, 4, 5), torch.randint(0, 5, (B, 4))
    check(lambda x, y: F.cross_entropy(x, y[0].expand(4)), [scores, labels])
    check(lambda x, y: F.cross_entropy(x, y), [scores], [labels[0]])
    check(lambda y, x: F.cross_entropy(x, y), [labels], [scores[0]])
    check(lambda x, y, w: F.cross_entropy(x, y, w.detach()), [scores, labels, torch.rand(B, 5)])


# --- recurrent layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "LSTM proj", "GRU", "RNN tanh", "RNN relu"])
def test_recurrent_layers(kind: str, batch_first: bool, bias: bool, both: bool, layers: int) -> None:
    name, _, option = kind.partition(" ")
    options: dict[str, Any] = {"bias": bias, "bidirectional": both, "num_layers": layers, "batch_first": batch_first}
    if option == "proj":
        options["proj_size"] = 2
    elif option:
        options["nonlinearity"] = option
    layer = getattr(nn, name)(4, 3, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    directions = layers * (2 if both else 1)

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, values = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
        given = (x, states if len(states) == 2 else states[0]) if states else (x,)
        y, last = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), given)
        return (y, *last) if isinstance(last, tuple) else (y, last)

    width = layer.proj_size or 3
    for x in (torch.randn(B, 2, 5, 4), torch.randn(B, 5, 4)):
        lead = (directions, x.shape[1 if batch_first else 2]) if x.dim() == 4 else (directions,)
        states = [torch.randn(B, *lead, width)] + ([torch.randn(B, *lead, 3)] if name == "LSTM" else [])
        check(run, [x], parameters)
        check(run, [x, *states], parameters)
    # a decoder, whose first input no example went into; and layers that were spread
    check(lambda *given: run(given[-1], *given[:-1]), states, (*parameters, x[0]))
    check(run, [x, *[torch.stack([p, 2 * p, -p]) for p in parameters]])


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell tanh", "RNNCell relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_cells(kind: str, bias: bool) -> None:
    name, _, option = kind.partition(" ")
    cell = getattr(nn, name)(4, 3, bias=bias, **({"nonlinearity": option} if option else {}))
    names, parameters = zip(*cell.named_parameters(), strict=True)

    def run(x: Tensor, *rest: Tensor) -> Any:
        states, values = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
        given = (x, states if len(states) == 2 else states[0]) if states else (x,)
        return torch.func.functional_call(cell, dict(zip(names, values, strict=True)), given)

    for x in (torch.randn(B, 2, 4), torch.randn(B, 4)):
        states = [torch.randn(*x.shape[:-1], 3) for _ in range(2 if name == "LSTMCell" else 1)]
        check(run, [x], parameters)
        check(run, [x, *states], parameters)
        check(lambda *given: run(given[-1], *given[:-1]), states, (*parameters, x[0]))


# --- what the user's own code sees -----------------------------------------------------------------------------------

X = torch.randn(B, 4, 6, dtype=torch.float64)


def _spied(original: Callable[..., Any], seen: list[tuple[int, ...]]) -> Callable[..., Any]:
    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(x.shape))
        return original(x, *args, **kwargs)

    return spy


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("linear", lambda x: F.linear(x, torch.eye(6))),
        ("relu", lambda x: F.relu(x)),
        ("layer_norm", lambda x: F.layer_norm(x, (6,))),
        ("conv1d", lambda x: F.conv1d(x, torch.ones(2, 4, 3))),
        ("group_norm", lambda x: F.group_norm(x, 2)),
        ("cross_entropy", lambda x: F.cross_entropy(x, x.argmax(-1))),
    ],
)
def test_a_function_in_torchs_place_is_called_for_one_example(
    monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Tensor], Tensor]
) -> None:
    expected = torch.stack([call(x) for x in X])
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(F, name, _spied(getattr(F, name), seen))
    with physical_calls(LAYERS):
        found = vmap(call)(X)
    assert seen == [(4, 6)]
    torch.testing.assert_close(found, expected)


def test_what_torchs_own_functions_call_in_turn_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "layer_norm", _spied(torch.layer_norm, seen))
    with physical_calls(LAYERS), pytest.raises(UnsupportedModelError, match="torch.spy was replaced by.*test_calls"):
        vmap(lambda x: F.layer_norm(x, (6,)))(X)
    assert not seen


class Looking(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.conv1d, F.layer_norm, F.cross_entropy, torch.einsum):
            self.seen.update(tuple(t.shape) for t in args if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_one_example() -> None:
    weight, looking = torch.randn(5, 6), Looking()

    def step(x: Tensor) -> Tensor:
        with looking:
            y = F.layer_norm(F.linear(x, weight), (5,))
            y = torch.einsum("ab,bc->ac", y, weight) + F.conv1d(x, torch.ones(4, 4, 1))
            y = F.scaled_dot_product_attention(y, y, y)
            return F.cross_entropy(y, y.argmax(-1))

    with physical_calls(LAYERS), quiet_fallback():
        found = vmap(step)(X)
    torch.testing.assert_close(found, torch.stack([step(x) for x in X]))
    assert looking.seen
    assert not any(B in shape for shape in looking.seen)


class Weight(Tensor):
    seen: list[tuple[int, ...]] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen += [tuple(t.shape) for t in args if type(t) is Tensor]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_tensors_sees_one_example() -> None:
    weight = torch.randn(5, 6).as_subclass(Weight)
    with physical_calls(LAYERS):
        vmap(lambda x: F.linear(x, weight))(X)
    assert Weight.seen
    assert not any(B in shape for shape in Weight.seen)


# --- what is told to the marks ---------------------------------------------------------------------------------------


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU(), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.SiLU(),
            nn.ConvTranspose2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.AvgPool2d(2), nn.Flatten(2), nn.LayerNorm(4),
            nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4), nn.Flatten(), nn.ReLU(), nn.Linear(16, 3),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.randn(3))
        self.row = nn.Parameter(torch.randn(4))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, y = batch
        scores = self.layers(x) * self.scale
        extra = torch.addmm(self.row, x[0, 0, :4, :4], self.layers[12].weight)
        weight = self.scale.square()
        return F.cross_entropy(scores, y, weight=weight, label_smoothing=0.1) + extra.square().sum()


def _uses(monkeypatch: pytest.MonkeyPatch, batch: Any) -> tuple[list[Any], Tensor]:
    found: list[Any] = []
    run = Walk.run

    def noting(walk: Walk, root: Any) -> Any:
        uses = run(walk, root)
        found.extend(sorted((u.name, u.last, sorted((k, d.form.name, d.parameters) for k, d in u.operands.items()))
                            for u in uses))  # fmt: skip
        return uses

    torch.manual_seed(0)
    module = Everything()
    layout = ParameterLayout(module)
    total = layout.zeros()
    with monkeypatch.context() as patched:
        patched.setattr(Walk, "run", noting)
        make_engine("ghost", module).accumulate(
            StepCall((batch, 0), B, views=len(batch[1]) // B), layout, FlatClipper(0.1), total
        )
    return found, total


@pytest.mark.parametrize("rows", [1, 2])
def test_the_same_uses_are_found_whether_marks_are_told_or_look(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    batch = (torch.randn(B * rows, 2, 4, 4), torch.randint(0, 3, (B * rows,)))
    told, total = _uses(monkeypatch, batch)
    with monkeypatch.context() as patched:
        patched.setattr(calls, "following", lambda: None)
        looked, other = _uses(monkeypatch, batch)
        patched.setattr(calls, "_is_unfolded", lambda *_: False)
        unfolded, third = _uses(monkeypatch, batch)
    assert told
    assert told == looked == unfolded
    torch.testing.assert_close(total, other)
    torch.testing.assert_close(total, third)
