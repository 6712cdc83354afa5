"""What a step does to its module has the plain effect once per batch, or is refused by attribute name."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_lap2.gradients import Engine, StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.vmap import VmapEngine


class Own:
    """An object of a class of the user's own."""

    def __init__(self) -> None:
        self.kept: Any = None


class Module(nn.Module):
    def __init__(self, effect: Any) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.effect = effect
        self.steps = 0
        self.losses: list[Any] = []
        self.queue: deque[Any] = deque(maxlen=3)
        self.cache: dict[str, Any] = {"mask": None, "deep": [{}]}
        self.own = Own()
        self.ema: Any = None
        self.table = torch.zeros(2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.effect(self, loss, logits)
        return loss


def run(module: nn.Module, kind: type[Engine], chunk: int | None = None) -> None:
    layout = ParameterLayout(module)
    batch = (torch.arange(15.0).view(5, 3), torch.arange(5) % 2)
    kind(module, chunk_size=chunk).accumulate(StepCall((batch, 0), 5), layout, FlatClipper(1.0), layout.zeros())


def _set(name: str) -> Any:
    return lambda m, loss, logits: setattr(m, name, loss.detach())


KEEPS = {
    "self.ema": _set("ema"),
    "self.losses": lambda m, loss, logits: m.losses.append(loss),
    "self.queue": lambda m, loss, logits: m.queue.append(logits),
    "self.cache['mask']": lambda m, loss, logits: m.cache.update(mask=logits),
    "self.cache['deep'][0]['x']": lambda m, loss, logits: m.cache["deep"][0].update(x=loss),
    "self.own.kept": lambda m, loss, logits: setattr(m.own, "kept", [loss]),
    "self.net.last": lambda m, loss, logits: setattr(m.net, "last", {"x": (logits,)}),
    "self.mean": lambda m, loss, logits: setattr(m, "mean", logits.detach().mean(0)),
    "self.new": lambda m, loss, logits: setattr(m, "new", Own()) or setattr(m.new, "kept", loss),
}


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
@pytest.mark.parametrize("name", KEEPS)
def test_a_kept_tensor_is_refused_by_name_and_removed(name: str, kind: type[Engine]) -> None:
    module = Module(KEEPS[name])
    before = copy.deepcopy({k: v for k, v in vars(module).items() if k not in ("effect", "own")})
    with pytest.raises(UnsupportedModelError) as refusal:
        run(module, kind)
    assert name.removesuffix("['x']") in str(refusal.value)
    assert module.own.kept is None
    assert not hasattr(module, "new")
    assert not hasattr(module.net, "last")
    for key in ("losses", "queue", "cache", "ema", "steps"):
        assert getattr(module, key) == before[key]
    assert torch.equal(module.mean, torch.zeros(2))


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
@pytest.mark.parametrize("name", ["count", "table", "net.bias"])
def test_tensors_written_in_place_are_refused(name: str, kind: type[Engine]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        with torch.no_grad():
            getattr(m.get_submodule(owner), attribute).add_(1)

    words = rf"writes self\.{name} in place|writes into a tensor from outside the step"
    with pytest.raises(UnsupportedModelError, match=words):
        run(Module(effect), kind)


def test_data_written_into_a_buffer_under_vmap_names_the_line() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"test_attributes.py:\d+ .*writes into a tensor from outside the step"
    ):
        run(Module(lambda m, loss, logits: m.mean.mul_(0.9).add_(logits.detach()[0])), VmapEngine)


def _plain(m: Any, loss: Tensor, logits: Tensor) -> None:
    m.steps += 1
    m.losses.append(m.steps)
    m.queue.append("seen")
    m.cache["mask"] = torch.ones(2)
    m.cache["deep"][0]["n"] = m.cache["deep"][0].get("n", 0) + 1
    m.own.kept = m.steps
    m.fresh = [m.steps]


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_plain_values_change_once_per_batch_under_vmap(chunk: int | None) -> None:
    once, module = Module(_plain), Module(_plain)
    once.training_step((torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)), 0)
    once.training_step((torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)), 0)
    run(module, VmapEngine, chunk)
    run(module, VmapEngine, chunk)
    for name in ("steps", "losses", "queue", "fresh"):
        assert getattr(module, name) == getattr(once, name)
    assert module.cache["deep"] == once.cache["deep"] == [{"n": 2}]
    assert torch.equal(module.cache["mask"], torch.ones(2))
    assert module.own.kept == 2


@pytest.mark.parametrize("effect", [lambda m, *_: setattr(m, "steps", m.steps + 1), _plain])
def test_plain_values_may_carry_data_under_the_loop_engine(effect: Any) -> None:
    module = Module(effect)
    with pytest.raises(UnsupportedModelError, match=r"changes self\.(steps|own|losses|queue)"):
        run(module, LoopEngine)
    assert module.steps == 0


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_a_metric_outside_the_modules_is_refused_by_name(kind: type[Engine]) -> None:
    module = Module(lambda m, loss, logits: m.cache["metric"].update(loss))
    module.cache["metric"] = MeanMetric()
    with pytest.raises(UnsupportedModelError, match=r"self.cache\['metric'\]|test_attributes.py:"):
        run(module, kind)


def test_large_plain_attributes_and_foreign_objects_are_left_alone() -> None:
    module = Module(lambda *_: None)
    module.vocabulary = {str(i): i for i in range(50_000)}  # type: ignore[assignment]
    module.options = SimpleNamespace(a=[1])  # type: ignore[assignment]
    module.loop_of = module.cache  # type: ignore[assignment]
    module.cache["self"] = module.cache
    run(module, VmapEngine, 2)
    run(module, LoopEngine)
