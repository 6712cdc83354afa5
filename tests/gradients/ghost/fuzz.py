"""Random programs in which every size is that of the batch: ``python -m tests.gradients.ghost.fuzz [programs]
[first]``.

Where all sizes agree, no guess by size can be right by luck: a dimension that is taken for the examples' one gives
other norms. Each program is a chain of operations on one activation and parameters, and is compared with plain
autograd, one example at a time, in fp64.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.gradients import ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from tests.zoo.compare import Weights

SIZE = 4
"""B, and every other size."""
S = SIZE

Step = Callable[["Program", Tensor], Tensor]


class Program(nn.Module):
    """``length`` operations drawn by ``seed``, then a loss.

    The activation is ``[N, ...]`` with N the example's own batch, 1 or B, and one to three dimensions of size B.
    """

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.rank = self.draw.choice([1, 2, 2, 3])
        self.rows = self.draw.choice([1, 1, S])
        self.pool = nn.ParameterList()
        self.layers = nn.ModuleList()
        self.names: list[str] = []
        self.index: Any = None
        self.steps: list[Step] = []
        start = self.rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            while len(self.steps) < length:
                name = self.draw.choice(list(OPERATIONS))
                made = OPERATIONS[name](self)
                if made is not None:
                    self.names.append(name)
                    self.steps.append(made)
            loss = self.draw.choice(list(LOSSES))
            self.names.append(loss)
            self.loss = LOSSES[loss](self)
            self.scale = nn.Parameter(torch.ones(S))
            self.double()
            shape = (S, self.rows, *[S] * start)
            rows = self.draw.choice([(), (S,)]) if self.rows == 1 else ()  # a batch of rows, or of several views
            self.batch = (torch.randn(*shape).double(), torch.randint(0, S, (S, self.rows, *rows)))

    def parameter(self, *shape: int) -> Callable[[], Tensor]:
        """One of this shape: a new one, or one that is used already."""
        known = [i for i, p in enumerate(self.pool) if tuple(p.shape) == shape]
        if known and self.draw.random() < 0.3:
            number = self.draw.choice(known)
        else:
            number = len(self.pool)
            self.pool.append(nn.Parameter(torch.randn(shape) * 0.5))
        return lambda: self.pool[number]

    def derived(self, *shape: int) -> Callable[[], Tensor]:
        """A parameter, or something computed from parameters alone."""
        p, q, kind = self.parameter(*shape), self.parameter(*shape), self.draw.choice(list(DERIVED))
        return lambda: DERIVED[kind](p(), q())

    def layer(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, index = batch
        self.index = index.reshape(len(index), -1).sum(1) % S  # [N]
        for step in self.steps:
            x = torch.tanh(step(self, x))
        loss = self.loss(self, x * self.scale)
        self.index = None
        return loss


DERIVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda p, q: p,
    "transposed": lambda p, q: p.transpose(0, -1),
    "scaled": lambda p, q: p * 2,
    "sum": lambda p, q: p + q,
    "normalised": lambda p, q: p / (1 + p.norm()),
    "softmax": lambda p, q: p.softmax(-1),
    "product": lambda p, q: p @ q if p.dim() > 1 else p * q,
    "stacked": lambda p, q: torch.stack([p, q]).sum(0),
    "expanded": lambda p, q: p.unsqueeze(0).expand(S, *p.shape)[1],
    "repeated": lambda p, q: p.repeat(S, *[1] * (p.dim() - 1))[:S],
    "flipped": lambda p, q: p.flip(0),
    "masked": lambda p, q: p * (torch.arange(S) > 0),
    "gathered": lambda p, q: p[torch.arange(S).flip(0)],
    "mean": lambda p, q: p - p.mean(0, keepdim=True),
}


def _elementwise(program: Program) -> Step:
    shape = program.draw.choice([(S,), (S, S), (1, S), (S, 1), (), (1, 1, S)])
    w = program.derived(*shape) if shape else program.parameter()
    kind = program.draw.choice(["add", "sub", "rsub", "mul", "div", "where", "lerp", "addcmul", "minimum"])

    def step(program: Program, x: Tensor) -> Tensor:
        v = w()
        v = v.reshape(v.shape[v.dim() - min(v.dim(), x.dim()) :]) if v.dim() > x.dim() else v
        return {
            "add": lambda: x + v, "sub": lambda: x - v, "rsub": lambda: torch.rsub(x, v), "mul": lambda: x * v,
            "div": lambda: x / (2 + v.square()), "where": lambda: torch.where(x > 0, x, v),
            "lerp": lambda: torch.lerp(x, v.expand_as(x) if v.dim() <= x.dim() else v, 0.3),
            "addcmul": lambda: torch.addcmul(x, x, v), "minimum": lambda: torch.minimum(x, v),
        }[kind]()  # fmt: skip

    return step


def _of(make: Callable[[Program], Step | None], *ranks: int) -> Callable[[Program], Step | None]:
    """Only where the activation has one of these ranks (its rows not counted)."""
    return lambda program: make(program) if program.rank in ranks else None


def _with(shape: tuple[int, ...], function: Callable[..., Tensor]) -> Callable[[Program], Step]:
    def make(program: Program) -> Step:
        w = program.derived(*shape)
        return lambda program, x: function(x, w())

    return make


def _two(function: Callable[..., Tensor]) -> Callable[[Program], Step]:
    def make(program: Program) -> Step:
        w, b = program.derived(S, S), program.derived(S)
        return lambda program, x: function(x, w(), b())

    return make


def _layer(make_layer: Callable[[], nn.Module], run: Callable[[Any, Tensor], Tensor]) -> Callable[[Program], Step]:
    def make(program: Program) -> Step:
        layer = program.layer(make_layer())
        return lambda program, x: run(layer, x)

    return make


def _plain(function: Callable[[Tensor], Tensor]) -> Callable[[Program], Step]:
    return lambda program: lambda _, x: function(x)


def _deeper(program: Program) -> Step | None:
    if program.rank > 2:
        return None
    program.rank += 1
    w = program.derived(S)
    return lambda _, x: x.unsqueeze(-1) * w()


def _flatter(program: Program) -> Step | None:
    if program.rank < 2:
        return None
    program.rank -= 1
    kind = program.draw.choice(["mean", "sum", "select", "amax", "logsumexp"])
    dim = program.draw.choice(range(1, program.rank + 2))
    return lambda _, x: {
        "mean": lambda: x.mean(dim), "sum": lambda: x.sum(dim), "select": lambda: x.select(dim, 1),
        "amax": lambda: x.amax(dim), "logsumexp": lambda: x.logsumexp(dim),
    }[kind]()  # fmt: skip


def _looked_up(kind: str) -> Callable[[Program], Step]:
    def make(program: Program) -> Step:
        table = program.derived(S, S)

        def step(program: Program, x: Tensor) -> Tensor:
            index = program.index
            found = {
                "embedding": lambda: F.embedding(index, table()),
                "padded": lambda: F.embedding(index, table(), padding_idx=1),
                "index": lambda: table()[index],
                "pairs": lambda: table()[index, index][:, None].expand(-1, S),
                "column": lambda: table()[:, index].t(),
                "select": lambda: table().index_select(0, index),
                "gather": lambda: table().gather(0, index[:, None].expand(-1, S)),
                "one hot": lambda: F.one_hot(index, S).to(x.dtype) @ table(),
                "bag": lambda: F.embedding_bag(index[:, None].expand(-1, 2), table(), mode="sum"),
                "position": lambda: F.embedding(torch.arange(len(x)), table()),
            }[kind]()  # [N, S]
            return x + found.reshape(len(x), *[1] * (x.dim() - 2), S)

        return step

    return make


def _token(program: Program) -> Step:
    """A class token joined on, as vision transformers do, and cut off again."""
    w = program.derived(S)
    shape = program.draw.choice(["cat", "stack", "write"])

    def step(program: Program, x: Tensor) -> Tensor:
        token = w().expand_as(x.select(1, 0)) if x.dim() > 2 else w().expand(len(x), S)
        if x.dim() == 2:
            return x + {"cat": lambda: torch.cat([token, x])[: len(x)], "stack": lambda: torch.stack([token, x]).sum(0),
                        "write": lambda: torch.zeros_like(x).copy_(token)}[shape]()  # fmt: skip
        if shape == "cat":
            return torch.cat([token.unsqueeze(1), x], 1)[:, :-1]
        if shape == "stack":
            return x + torch.stack([token, token], 1).mean(1, keepdim=True)
        y = x.clone()
        y[:, 1] = token
        return y

    return step


def _attention(program: Program) -> Step:
    bias, query = program.derived(S, S), program.derived(S, S)
    kind = program.draw.choice(["self", "bias", "learned query", "causal"])

    def step(program: Program, x: Tensor) -> Tensor:
        match kind:
            case "self":
                return F.scaled_dot_product_attention(x, x, x)
            case "bias":
                return F.scaled_dot_product_attention(x, x, x, attn_mask=bias())
            case "causal":
                return F.scaled_dot_product_attention(x, x * 2, x, is_causal=True)
        return F.scaled_dot_product_attention(query().expand_as(x), x, x)

    return step


def _windows(program: Program) -> Step:
    """Windows folded into the batch, as Swin does."""
    w, b = program.parameter(2, 2), program.parameter(2)

    def step(program: Program, x: Tensor) -> Tensor:
        return F.linear(x.reshape(-1, 2), w(), b()).reshape(x.shape)

    return step


def _convolved(program: Program) -> Step:
    standardised = program.draw.random() < 0.5
    w, b = program.parameter(S, S, 3), program.parameter(S)

    def step(program: Program, x: Tensor) -> Tensor:
        weight = w()
        if standardised:
            weight = F.batch_norm(weight.reshape(1, S, -1), None, None, training=True).reshape_as(weight)
        return F.conv1d(x, weight, b(), padding=1)

    return step


def _sequence(cell: type[nn.RNNBase]) -> Callable[[Program], Step]:
    return _layer(lambda: cell(S, S, batch_first=True), lambda layer, x: layer(x)[0])


OPERATIONS: dict[str, Callable[[Program], Step | None]] = {
    "elementwise": _elementwise,
    "linear": _two(lambda x, w, b: F.linear(x, w, b)),
    "linear without bias": _with((S, S), lambda x, w: F.linear(x, w)),
    "x @ w": _with((S, S), lambda x, w: x @ w),
    "w @ x": _of(_with((S, S), lambda x, w: w @ x), 2, 3),
    "x @ v": _of(_with((S,), lambda x, v: (x @ v).unsqueeze(-1) + x), 1, 2, 3),
    "addmm": _of(_two(lambda x, w, b: torch.addmm(b, x, w)), 1),
    "baddbmm": _of(_two(lambda x, w, b: torch.baddbmm(b, x, w.expand(len(x), S, S))), 2),
    "bmm": _of(_with((S, S), lambda x, w: torch.bmm(w.expand(len(x), S, S), x)), 2),
    "outer": _of(_with((S,), lambda x, v: torch.einsum("...i,j->...j", x, v)), 1, 2),
    "einsum": _of(_with((S, S), lambda x, w: torch.einsum("nab,bc->nac", x, w)), 2),
    "einsum left": _of(_with((S, S), lambda x, w: torch.einsum("nab,ca->ncb", x, w)), 2),
    "einsum of three": _of(_two(lambda x, w, v: torch.einsum("nab,bc,c->nac", x, w, v)), 2),
    "layer norm": _layer(lambda: nn.LayerNorm(S), lambda layer, x: layer(x)),
    "layer norm of two": _of(_layer(lambda: nn.LayerNorm((S, S)), lambda layer, x: layer(x)), 2, 3),
    "rms norm": _layer(lambda: nn.RMSNorm(S), lambda layer, x: layer(x)),
    # torch 2.13 itself crashes in the backward pass of a group norm over permuted memory
    "group norm": _layer(lambda: nn.GroupNorm(2, S), lambda layer, x: layer(x.contiguous())),
    "instance norm": _of(_layer(lambda: nn.InstanceNorm1d(S, affine=True), lambda layer, x: layer(x)), 2),
    "batch norm in eval": _of(_layer(lambda: nn.BatchNorm1d(S).eval(), lambda layer, x: layer(x)), 1, 2),
    "prelu": _layer(lambda: nn.PReLU(S), lambda layer, x: layer(x)),
    "conv1d": _of(_convolved, 2),
    "conv2d": _of(_layer(lambda: nn.Conv2d(S, S, 3, padding=1, groups=2), lambda layer, x: layer(x)), 3),
    "conv transposed": _of(_layer(lambda: nn.ConvTranspose1d(S, S, 1), lambda layer, x: layer(x)), 2),
    "attention": _of(_attention, 2, 3),
    "multihead": _of(
        _layer(lambda: nn.MultiheadAttention(S, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]), 2
    ),
    "lstm": _of(_sequence(nn.LSTM), 2),
    "gru": _of(_sequence(nn.GRU), 2),
    "lstm cell": _of(_layer(lambda: nn.LSTMCell(S, S), lambda layer, x: layer(x)[0]), 1),
    "gru cell": _of(_layer(lambda: nn.GRUCell(S, S), lambda layer, x: layer(x)), 1),
    "bilinear": _layer(lambda: nn.Bilinear(S, S, S), lambda layer, x: layer(x, x)),
    "cdist": _of(_with((S, S), lambda x, w: torch.cdist(x, w)), 1, 2),
    "token": _token,
    "windows": _windows,
    "scaled by its mean": _with((S,), lambda x, v: x * (x.mean() * v.sum()).exp()),
    "scatter": _with((S,), lambda x, v: x.index_add(x.dim() - 1, torch.tensor([1]), v[:1].expand_as(x[..., :1]))),
    "masked": _with((S,), lambda x, v: x.masked_fill(x < 0, 0.0) + v.masked_fill(v < 0, 0.0)),
    "normalised": _with((S, S), lambda x, w: F.linear(F.normalize(x, dim=-1), F.normalize(w, dim=-1))),
    "softmax": _plain(lambda x: x.softmax(-1)),
    "transposed": _of(_plain(lambda x: x.transpose(-1, -2)), 2, 3),
    "permuted": _of(_plain(lambda x: x.permute(0, 3, 1, 2)), 3),
    "moved to rows": _plain(lambda x: x.transpose(0, 1).transpose(0, 1).contiguous()),
    "cumulated": _plain(lambda x: x.cumsum(-1)),
    "similar": _of(_plain(lambda x: x @ x.transpose(-1, -2)), 2, 3),
    "deeper": _deeper,
    "flatter": _flatter,
    **{f"lookup: {kind}": _looked_up(kind) for kind in (
        "embedding", "padded", "index", "pairs", "column", "select", "gather", "one hot", "bag", "position",
    )},
}  # fmt: skip


def _cross_entropy(program: Program) -> Step:
    w = program.derived(S, S)

    def loss(program: Program, x: Tensor) -> Tensor:
        scores = (x @ w()).flatten(0, -2)
        target = program.index[:, None].expand(-1, len(scores) // len(x)).flatten()
        return F.cross_entropy(scores, target, label_smoothing=0.1)

    return loss


def _penalised(program: Program) -> Step:
    w = program.derived(S, S)
    return lambda program, x: x.square().mean() + w().square().sum() * 0.1


LOSSES: dict[str, Callable[[Program], Step]] = {
    "cross entropy": _cross_entropy,
    "penalised": _penalised,
    "squares": lambda program: lambda _, x: x.square().sum(),
    "spread out": lambda program: lambda _, x: x.flatten(1).var(1).sum() + x.logsumexp(-1).mean(),
}


def programs(count: int, first: int) -> Iterator[tuple[int, Program]]:
    """The next ``count`` programs that run at all, from seed ``first`` on."""
    seed = first
    while count:
        program = Program(seed, 2 + seed % 5)
        try:
            program.training_step(tuple(t[0] for t in program.batch))
        except (RuntimeError, ValueError, IndexError):
            pass  # shapes that do not fit
        else:
            count -= 1
            yield seed, program
        seed += 1


def error_of(program: Program, *, chunk: int | None = None) -> float | str:
    """The largest error relative to the example's gradient: of the norms, and of a weighted sum; or the refusal."""
    layout = ParameterLayout(program)
    rows = []
    for i in range(S):
        loss = program.training_step(tuple(t[i] for t in program.batch))
        found = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, layout.parameters, strict=True)])
    size = torch.stack([torch.stack([g.norm() for g in row]).norm() for row in rows])
    weights = torch.linspace(0.5, 1.5, S).double()
    clipper, total = Weights(weights), layout.zeros()
    batch = ExampleBatch.of([tuple(t[i] for t in program.batch) for i in range(S)])
    try:
        GhostEngine(program, chunk_size=chunk).accumulate(StepCall((batch, 0), S), layout, clipper, total)
    except UnsupportedModelError as error:
        return str(error)
    expected = layout.flatten(
        [sum(w * g for w, g in zip(weights, own, strict=True)) for own in zip(*rows, strict=True)]
    )
    norms = torch.stack([torch.stack([g.norm() for g in row]) for row in rows], dim=1)
    scale = size.clamp_min(1e-9)
    return max(float(((clipper.seen - norms).abs() / scale).max()), float((total - expected).norm() / scale.sum()))


def main(count: int, first: int) -> int:
    """Prints what was wrong or refused; the number of programs that were wrong."""
    warnings.simplefilter("ignore")
    wrong, used, refusals, worst = 0, Counter[str](), Counter[str](), 0.0
    for seed, program in programs(count, first):
        used.update(program.names)
        found = error_of(program)
        if isinstance(found, str):
            refusals[found[:200]] += 1
            print(seed, program.names, "refused:", found[:300], flush=True)
        elif not found < 1e-5:
            wrong += 1
            print(seed, program.names, f"rows {program.rows}: WRONG by {found:.1e}", flush=True)
        else:
            worst = max(worst, found)
    print(f"{count} programs, {sum(used.values())} operations, {wrong} wrong, {sum(refusals.values())} refused, "
          f"largest error {worst:.1e}")  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main(*(int(a) for a in [*sys.argv[1:], "200", "0"][:2])))
