"""The parts of the pre-flight by themselves: leaving no trace, constant draws, the algebra of reductions."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lap2.gradients import ParameterLayout, StepCall
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.preflight import preflight, untouched
from lightning_lap2.gradients.preflight.algebra import Evaluation, combine, distance, inner, norm, reduction
from lightning_lap2.gradients.preflight.draws import still
from lightning_lap2.gradients.vmap import VmapEngine

# -- untouched


class Metered(nn.Module):
    """A step with metrics, logged as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.both = MetricCollection({"a": MulticlassAccuracy(3), "b": MulticlassAccuracy(3, average="micro")})
        self.mean = MeanMetric()
        self.reached: list[str] = []

    def log(self, name: str, value: Any) -> None:
        self.reached.append(name)

    def log_dict(self, dictionary: Any) -> None:
        self.reached.extend(dictionary)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out.detach(), y)
        self.both.update(out.detach(), y)
        self.mean.update(loss.detach())
        self.log("accuracy", self.accuracy)
        self.log_dict(self.both)
        self.log("loss", self.mean)
        return loss


@pytest.mark.parametrize("engine", [LoopEngine, VmapEngine])
def test_metric_states_are_as_before(engine: type) -> None:
    torch.manual_seed(0)
    module = Metered()
    records = [(torch.randn(5), i % 3) for i in range(6)]
    module.training_step(default_collate(records), 0)
    module.reached.clear()
    before = module.accuracy.compute(), module.both.compute(), module.mean.compute()
    counts = module.accuracy.update_count, module.both["a"].update_count
    result = preflight(
        engine(module), module, ParameterLayout(module), records=records, collate=default_collate,
        call=lambda batch, count: StepCall((batch, 0), count),
    )  # fmt: skip
    assert result.logged_names == {"accuracy", "a", "b", "loss"}
    assert result.notes == ()
    assert module.reached == []
    for metric in (module.accuracy, module.mean, *module.both.values()):
        metric._computed = None
    assert (module.accuracy.compute(), module.both.compute(), module.mean.compute()) == before
    assert (module.accuracy.update_count, module.both["a"].update_count) == counts


class Mutable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))
        self.tensor = torch.zeros(3)
        self.tensors = [torch.zeros(1), {"x": torch.zeros(1)}]
        self.queue = deque([1, 2], maxlen=3)
        self.kinds = {1, 2}
        self.loose = [nn.Linear(1, 1)]
        self.metric = CatMetric()
        self.count = 0


def scribble(module: Any) -> None:
    with torch.no_grad():
        module.net.weight.add_(1)
        module.net.bias.data.add_(1)
    module.average += 1
    module.average = torch.ones(5)
    module.tensor += 1
    module.tensor = torch.ones(2)
    module.tensors[0] += 1
    module.tensors[1]["x"] += 1
    module.tensors[1]["y"] = 1
    module.tensors.append(3)
    module.queue.extend([7, 8, 9])
    module.kinds.add(3)
    module.loose[0].weight.data.fill_(9)
    module.loose[0].train(False)
    module.metric.update(torch.ones(2))
    module.net.weight.grad = torch.ones(2, 2)
    module.added = nn.Linear(1, 1)
    module.count += 1
    del module.net
    raise ZeroDivisionError


def test_whatever_a_step_may_write() -> None:
    module = Mutable()
    names = set(vars(module))
    tensors, queue, kinds, tensor = module.tensors, module.queue, module.kinds, module.tensor
    state = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ZeroDivisionError), untouched(module):
        scribble(module)
    assert set(vars(module)) == names
    assert module.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert module.tensors is tensors
    assert module.tensor is tensor
    assert tensors == [torch.zeros(1), {"x": torch.zeros(1)}]
    assert torch.equal(tensor, torch.zeros(3))
    assert (module.queue, module.kinds, module.count) == (deque([1, 2]), {1, 2}, 0)
    assert module.queue is queue
    assert module.kinds is kinds
    assert module.loose[0].training
    assert not (module.loose[0].weight == 9).any()
    assert module.metric.value == []
    assert module.net.weight.grad is None
    assert not hasattr(module, "added")


# -- constant draws


def test_draws_are_constant_whatever_the_shape() -> None:
    with still(0):
        assert torch.equal(torch.rand(3, 4), torch.full((3, 4), 0.5))
        assert torch.equal(torch.empty(2).uniform_(2, 4), torch.full((2,), 3.0))
        assert torch.equal(torch.randn(3), torch.full((3,), 0.5))
        assert torch.equal(torch.randn_like(torch.zeros(2, 1)), torch.full((2, 1), 0.5))
        assert torch.equal(torch.normal(torch.ones(2), torch.tensor([2.0, 4.0])), torch.tensor([2.0, 3.0]))
        assert torch.equal(torch.empty(2).normal_(1, 2), torch.full((2,), 2.0))
        assert torch.equal(torch.randint(10, (2,)), torch.full((2,), 5))
        assert torch.equal(torch.randint(4, 10, (2,)), torch.full((2,), 7))
        assert torch.equal(torch.randint_like(torch.zeros(2), 3, 5), torch.full((2,), 4.0))
        assert torch.equal(torch.randperm(4), torch.tensor([1, 2, 3, 0]))
        assert torch.equal(torch.bernoulli(torch.tensor([0.0, 0.1, 1.0])), torch.tensor([0.0, 1.0, 1.0]))
        assert torch.equal(torch.empty(2).bernoulli_(0.1), torch.ones(2))
        assert torch.equal(torch.empty(2).bernoulli_(torch.tensor([0.0, 0.5])), torch.tensor([0.0, 1.0]))
        assert torch.allclose(torch.empty(2).exponential_(2.0), torch.full((2,), math.log(2) / 2))
        assert torch.equal(F.dropout(torch.ones(3), 0.75), torch.full((3,), 4.0))
        assert torch.allclose(torch.native_dropout(torch.ones(3), 0.5, True)[0], torch.full((3,), 2.0))
        assert torch.equal(torch.native_dropout(torch.ones(3), 0.5, False)[0], torch.ones(3))
    assert torch.rand(2, generator=torch.Generator().manual_seed(0)).std() > 0


def test_code_that_draws_until_it_likes_the_result_ends() -> None:
    with still(0):
        draws = 0
        while float(torch.rand(())) == 0.5:
            draws += 1
    assert 0 < draws < 20_000


# -- algebra


def test_inner_products_of_long_vectors() -> None:
    n = (1 << 22) + 17
    a = torch.full((n,), 0.1)
    exact = n * float(torch.tensor(0.1)) ** 2
    assert inner(a, a) == pytest.approx(exact, rel=1e-10)
    assert norm(a) == pytest.approx(exact**0.5, rel=1e-10)
    assert distance(a, torch.zeros(n)) == pytest.approx(exact**0.5, rel=1e-10)
    assert combine([a, a], [0.25, 0.5]).shape == (n,)
    assert torch.equal(combine([a, a], [0.5, 0.5]), a)


def reduced(weights_of: Any, *, k: int = 4, n: int = 9, noise: float = 0.0) -> str:
    generator = torch.Generator().manual_seed(3)
    parts = [
        Evaluation(1.0 + i, torch.randn(n, generator=generator, dtype=torch.float64)) for i in range(k)
    ]  # fmt: skip

    def batch_of(rows: list[int]) -> Evaluation:
        weights = weights_of(rows)
        gradient = combine([parts[i].gradient for i in rows], weights)
        gradient[0] += noise
        return Evaluation(sum(w * parts[i].loss for w, i in zip(weights, rows, strict=True)), gradient)

    return reduction(parts, batch_of, 1e-3)


def normalised(rows: list[int], counts: tuple[float, ...] = (3, 1, 4, 2)) -> list[float]:
    return [counts[i] / sum(counts[j] for j in rows) for i in rows]


@pytest.mark.parametrize("n", [9, 10_000])
def test_reductions_are_told_apart(n: int) -> None:
    assert reduced(lambda rows: [1 / len(rows)] * len(rows), n=n) == "mean"
    assert reduced(lambda rows: [1.0] * len(rows), n=n) == "sum"
    assert reduced(normalised, n=n) == "weighted"
    assert reduced(lambda rows: [1 / len(rows)] * len(rows), n=n, noise=0.5) == "mixed"
    assert reduced(normalised, n=n, noise=0.5) == "mixed"
    assert reduced(lambda rows: [float(i == max(rows)) for i in rows], n=n) == "mixed"
    assert reduced(lambda rows: [2.0 * w for w in normalised(rows)], n=n) == "mixed"
    assert reduced(lambda rows: [-0.5 + 0.5 * i for i in range(len(rows))], n=n) == "mixed"
    assert reduced(lambda rows: normalised(rows, (3, 1, 9, 2 + 3 * (len(rows) == 4))), n=n) == "mixed"


def test_parallel_gradients_leave_the_weights_to_the_losses() -> None:
    direction = torch.ones(6, dtype=torch.float64)
    parts = [Evaluation(float(i + 1), (i % 2 + 1) * direction) for i in range(4)]

    def batch_of(rows: list[int]) -> Evaluation:
        weights = normalised(rows)
        return Evaluation(
            sum(w * parts[i].loss for w, i in zip(weights, rows, strict=True)),
            combine([parts[i].gradient for i in rows], weights),
        )

    assert reduction(parts, batch_of, 1e-3) in ("weighted", "mixed")
    assert reduction([parts[0]] * 4, lambda rows: parts[0], 1e-3) == "mean"
