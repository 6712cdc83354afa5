"""Several views of one example: their mean gradient is clipped, whatever the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.engines import make_engine
from tests.zoo.cases import CASES, Case
from tests.zoo.compare import reference

EVERY = ["loop", "vmap", "ghost"]
# one case for every kind of use that ghost has a rule for, and those whose gradients are pulled back
KINDS = [
    "MNIST CNN",
    "ResNet, GroupNorm",
    "ResNet, BatchNorm frozen by eval()",
    "Convolutions, 1d to 3d and transposed",
    "Tabular MLP, one-hot, unused layer",
    "Module reachable by two paths",
    "weight_norm",
    "MultiheadAttention, both masks",
    "TransformerEncoder, padding mask",
    "LSTM",
    "GRU",
]


def example_gradients(module: nn.Module, batch: Any, count: int, views: int) -> Tensor:
    """``[B, n]`` in the layout's order, fp64: each view's gradient by itself, by plain autograd, then their mean."""
    _, by_row = reference(module, batch, count * views)
    own = [p for p in module.parameters() if p.requires_grad]
    order = [[id(p) for p in own].index(id(p)) for p in ParameterLayout(module).parameters]
    flat = torch.stack([torch.cat([g[k].reshape(-1) for k in order]) for g in by_row]).double()
    return flat.view(count, views, -1).mean(dim=1)


def clipped_sum(gradients: Tensor, bound: float) -> Tensor:
    return ((bound / gradients.norm(dim=1)).clamp_max(1.0)[:, None] * gradients).sum(dim=0)


def engine_sum(engine: str, module: nn.Module, batch: Any, count: int, views: int, bound: float, **kw: Any) -> Tensor:
    layout = ParameterLayout(module)
    total = layout.zeros()
    call = StepCall((batch, 0), count, views=views)
    make_engine(engine, module, **kw).accumulate(call, layout, FlatClipper(bound), total)
    return total


def check(engine: str, module: nn.Module, batch: Any, count: int, views: int, want: Tensor, **kw: Any) -> None:
    """Without clipping, and with about half of the examples clipped."""
    for bound in (math.inf, float(want.norm(dim=1).median())):
        expected = clipped_sum(want, bound)
        got = engine_sum(engine, module, batch, count, views, bound, **kw)
        assert float((got.double() - expected).norm() / expected.norm()) < 3e-6


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layers or (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def rows(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(count) % 3


@pytest.mark.parametrize("views", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("engine", EVERY)
def test_the_mean_over_views_is_clipped(engine: str, count: int, views: int) -> None:
    torch.manual_seed(0)
    module, batch = Net(), rows(count * views)
    check(engine, module, batch, count, views, example_gradients(module, batch, count, views))


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_chunks_are_of_whole_examples(chunk: int) -> None:
    torch.manual_seed(0)
    module, batch = Net(), rows(8)
    check("vmap", module, batch, 4, 2, example_gradients(module, batch, 4, 2), chunk_size=chunk)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in KINDS], ids=lambda c: c.name)
def test_layers_under_ghost(case: Case) -> None:
    """Two views of three examples; losses are means over rows."""
    module, batch = case.build(), case.batch(6)
    check("ghost", module, batch, 3, 2, example_gradients(module, batch, 3, 2))


class Raw(nn.Module):
    """Parameters that no layer holds: expanded, repeated, broadcast, looked up, contracted by einsum; and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 1, 4))
        self.place, self.mix = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4, 3))
        self.slope = nn.PReLU()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        tokens = [self.first.expand(len(x), -1, -1), self.second.repeat(len(x), 1, 1), x.unflatten(1, (3, 4))]
        x = self.slope(torch.cat(tokens, dim=1) + self.place)
        x = x + self.place[y % 5][:, None]
        return F.cross_entropy(torch.einsum("btd,dc->btc", x, self.mix).mean(dim=1), y)


@pytest.mark.parametrize("engine", EVERY)
def test_raw_parameters(engine: str) -> None:
    torch.manual_seed(0)
    module, batch = Raw(), (torch.randn(6, 12), torch.arange(6) % 3)
    check(engine, module, batch, 3, 2, example_gradients(module, batch, 3, 2))


@pytest.mark.parametrize("engine", EVERY)
def test_tied_weights_raw_parameters_and_a_mean_over_tokens(engine: str) -> None:
    """The loss of an example is that of its views together: a mean over all their labelled tokens."""
    (case,) = [c for c in CASES if c.name == "Tied embeddings, raw position parameter"]
    module, (tokens, labels) = case.build(), case.batch(6)
    want = []
    for first in (0, 2, 4):
        loss = module.training_step((tokens[first : first + 2], labels[first : first + 2]), 0)
        parts = torch.autograd.grad(loss, ParameterLayout(module).parameters)
        want.append(torch.cat([g.reshape(-1) for g in parts]).double())
    check(engine, module, (tokens, labels), 3, 2, torch.stack(want))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("engine", EVERY)
def test_one_poisoned_view_removes_its_example_whole(engine: str, value: float) -> None:
    torch.manual_seed(0)
    for layers in ((nn.Linear(4, 3),), (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())):
        module, (x, y) = Net(*layers), rows(6)
        without = engine_sum(engine, module, (x[[0, 1, 4, 5]], y[[0, 1, 4, 5]]), 2, 2, 1.0)
        x[3, 0] = value
        poisoned = engine_sum(engine, module, (x, y), 3, 2, 1.0)
        assert torch.allclose(poisoned, without, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", EVERY)
def test_sensitivity_by_brute_force(engine: str) -> None:
    """Without any one example, all its views with it, the sum moves by at most C; some by all of it."""
    torch.manual_seed(0)
    module, (x, y) = Net(), rows(18)
    x, bound = 30 * x, 0.3
    whole = engine_sum(engine, module, (x, y), 6, 3, bound)
    moved = []
    for example in range(6):
        left = [i for i in range(18) if i // 3 != example]
        moved.append(float((whole - engine_sum(engine, module, (x[left], y[left]), 5, 3, bound)).double().norm()))
    assert max(moved) <= bound * (1 + 1e-5)
    assert max(moved) > 0.999 * bound


@pytest.mark.parametrize("engine", EVERY)
def test_every_view_has_a_dropout_mask_of_its_own(engine: str) -> None:
    """One layer without bias on ones: the gradient of an example averages its views' masks."""
    module = Net(nn.Dropout(0.5), nn.Linear(64, 3, bias=False))
    x, y = torch.ones(2, 64), torch.zeros(2, dtype=torch.long)
    gradient = engine_sum(engine, module, (x, y), 1, 2, math.inf).view(3, 64)[0]
    # kept by none, by the one, by the other, by both of the views; one mask for both would leave two values
    assert len(torch.unique((gradient.abs() / gradient.abs().max() * 1e3).round())) in (3, 4)


@pytest.mark.parametrize("engine", EVERY)
def test_rows_that_are_no_whole_examples_are_an_error(engine: str) -> None:
    with pytest.raises((ValueError, UnsupportedModelError), match="not made of examples of 2 rows|no dimension has"):
        engine_sum(engine, Net(), rows(7), 3, 2, 1.0)


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(3, average="micro"), MeanMetric()
        self.seen: list[Any] = []

    def log(self, name: str, value: Any, batch_size: int | None = None) -> None:
        self.seen.append((name, value, batch_size))

    def log_dict(self, dictionary: Any) -> None:
        raise AssertionError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.accuracy.update(out.detach(), y)
        self.mean.update(loss.detach(), weight=x.shape[0])
        self.log("loss", loss, batch_size=x.shape[0])
        return {"loss": loss, "rows": out}


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_logs_and_metrics_count_rows_as_plain_lightning_does(engine: str, count: int) -> None:
    """8 rows of 4 examples; or the template of an empty draw, which no metric sees."""
    torch.manual_seed(0)
    module, batch = Logging(), rows(2 * max(count, 1))
    layout = ParameterLayout(module)
    total = layout.zeros()
    call = StepCall((batch, 0), count, views=2)
    output = make_engine(engine, module).accumulate(call, layout, FlatClipper(1.0), total)
    plain = F.cross_entropy(module.net(batch[0]), batch[1]).detach()
    ((name, value, size),) = module.seen
    assert (name, size) == ("loss", 2 * count)
    assert torch.allclose(value, plain)
    assert torch.allclose(output["rows"], module.net(batch[0]), atol=1e-6)
    if count == 0:
        assert not total.any()
        assert module.accuracy.update_count == module.mean.update_count == 0
        return
    assert module.accuracy.compute() == (module.net(batch[0]).argmax(1) == batch[1]).float().mean()
    assert float(module.mean.weight) == 8
    assert torch.allclose(module.mean.compute(), plain)
