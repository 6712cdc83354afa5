"""A step may write to its module, not read what holds records: the same for every engine."""

from __future__ import annotations

import io
import itertools
import random
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torchmetrics import MeanMetric, Metric

from lightning_lap2.errors import IsolationError
from lightning_lap2.gradients import Engine, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.ghost.engine import GhostEngine
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.vmap import VmapEngine

ENGINES = [GhostEngine, LoopEngine, VmapEngine]
X, Y = torch.arange(15.0).view(5, 3).sin(), torch.arange(5) % 2
GLOBAL_LIST: list[Any] = []
GLOBAL_ARRAY = np.zeros(2)


class Own:
    """An object of a class of the user's own."""

    def __init__(self) -> None:
        self.kept: Any = None


class Module(nn.Module):
    """``effect(module, loss, logits)`` runs in the step; where it returns a tensor, that is the loss."""

    def __init__(self, effect: Callable[..., Any]) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(6.0).view(2, 3).cos())
            self.net.bias.zero_()
        self.effect = effect
        self.steps = 0
        self.losses: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"loss": []}
        self.default: dict[str, list[Any]] = defaultdict(list)
        self.queue: deque[Any] = deque(maxlen=3)
        self.cache: dict[str, Any] = {"mask": None, "deep": [{}]}
        self.own = Own()
        self.ema: Any = None
        self.center: Any = None
        self.flag = False
        self.table = torch.zeros(2)
        self.array = np.zeros(2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        found = self.effect(self, loss, logits)
        return loss if found is None else found


def run(module: nn.Module, engine: Engine | type[Engine], chunk: int | None = None, size: int = 5) -> Tensor:
    """The sum of the examples' gradients ``[n]``."""
    if isinstance(engine, type):
        engine = engine(module, chunk_size=chunk)
    layout = ParameterLayout(module)
    total = layout.zeros()
    engine.accumulate(StepCall(((X[:size], Y[:size]), 0), size), layout, FlatClipper(1.0), total)
    return total


def plain(module: Module) -> Module:
    """``module`` after one plain step on the whole batch."""
    module.training_step((X, Y), 0)
    return module


# -- writing ----------------------------------------------------------------------------------------------------------


def _set(name: str, value: Callable[[Tensor, Tensor], Any]) -> Any:
    return lambda m, loss, logits: setattr(m, name, value(loss, logits))


WRITES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "append a loss": (lambda m, loss, logits: m.losses.append(loss), lambda m: torch.stack(m.losses)),
    "append rows": (lambda m, loss, logits: m.losses.append(logits), lambda m: torch.cat(m.losses)),
    "append a dict": (
        lambda m, loss, logits: m.losses.append({"l": loss, "x": (logits,)}),
        lambda m: m.losses[-1]["x"][0],
    ),
    "+= a list": (lambda m, loss, logits: m.losses.extend([loss, logits]), lambda m: m.losses[1]),
    "a named list": (lambda m, loss, logits: m.by_name["loss"].append(loss), lambda m: torch.stack(m.by_name["loss"])),
    "a deque": (lambda m, loss, logits: m.queue.append(loss), lambda m: torch.stack(list(m.queue))),
    "a dict": (lambda m, loss, logits: m.cache.update(mask=logits), lambda m: m.cache["mask"]),
    "deep": (lambda m, loss, logits: m.cache["deep"][0].update(x=loss), lambda m: m.cache["deep"][0]["x"]),
    "own class": (lambda m, loss, logits: setattr(m.own, "kept", [loss]), lambda m: m.own.kept[0]),
    "attribute": (_set("ema", lambda loss, logits: loss.detach()), lambda m: m.ema),
    "buffer anew": (_set("mean", lambda loss, logits: logits.detach()), lambda m: m.mean),
    "of a layer": (lambda m, loss, logits: setattr(m.net, "last", {"x": (logits,)}), lambda m: m.net.last["x"][0]),
    "new": (lambda m, loss, logits: setattr(m, "new", SimpleNamespace(kept=loss)), lambda m: m.new.kept),
    "read its own": (
        lambda m, loss, logits: setattr(m, "ema", logits) or m.losses.append(m.ema.mean()),
        lambda m: torch.stack(m.losses),
    ),
    "a global": (lambda m, loss, logits: GLOBAL_LIST.append(loss), lambda m: torch.stack(GLOBAL_LIST)),
}


@pytest.fixture(autouse=True)
def globals_emptied() -> None:
    GLOBAL_LIST.clear()
    GLOBAL_ARRAY[:] = 0


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", WRITES)
def test_what_a_step_writes_is_there_once_a_batch_as_after_a_plain_step(
    name: str, kind: type[Engine], chunk: int | None
) -> None:
    effect, value = WRITES[name]
    module = Module(effect)
    engine = kind(module, chunk_size=chunk)
    plainly = value(plain(Module(effect))).clone()
    GLOBAL_LIST.clear()
    first = run(module, engine)
    found = value(module)
    assert torch.allclose(found, plainly, atol=1e-6) and not found.requires_grad
    assert torch.allclose(run(module, engine), first)  # and again, which reads nothing of it
    assert torch.allclose(first, run(Module(lambda *_: None), kind))


@pytest.mark.parametrize("kind", ENGINES)
def test_lists_grow_by_one_entry_a_batch_and_can_be_emptied_between(kind: type[Engine]) -> None:
    module = Module(WRITES["append a loss"][0])
    engine = kind(module)
    for length in (1, 2, 3):
        run(module, engine)
        assert len(module.losses) == length
    assert all(isinstance(loss, Tensor) for loss in module.losses)
    module.losses.clear()
    run(module, engine)
    assert len(module.losses) == 1


# -- reading ----------------------------------------------------------------------------------------------------------


READS: dict[str, Callable[..., Any]] = {
    "self.ema": lambda m, loss, logits: (
        setattr(m, "ema", loss.detach() if m.ema is None else 0.9 * m.ema + 0.1 * loss.detach()) or loss * m.ema
    ),
    "self.losses[0]": lambda m, loss, logits: (
        (loss * sum(m.losses) if m.losses else loss, m.losses.append(loss.detach()))[0]
    ),
    "self.queue[0]": lambda m, loss, logits: (loss * (m.queue[-1] if m.queue else 1), m.queue.append(loss.detach()))[0],
    "self.cache['mask']": lambda m, loss, logits: (
        (loss if m.cache["mask"] is None else loss + (logits * m.cache["mask"]).sum(), m.cache.update(mask=logits))[0]
    ),
    "self.own.kept": lambda m, loss, logits: (
        (loss if m.own.kept is None else loss * m.own.kept[0], setattr(m.own, "kept", [loss.detach()]))[0]
    ),
    "self.center": lambda m, loss, logits: (
        setattr(m, "center", logits.detach().mean(0)) if m.center is None else None, loss + (logits - m.center).sum()
    )[1],
    "the global GLOBAL_LIST[0]": lambda m, loss, logits: (
        (loss * GLOBAL_LIST[0] if GLOBAL_LIST else loss, GLOBAL_LIST.append(loss.detach()))[0]
    ),
    "self.mean": lambda m, loss, logits: (
        (loss + (logits * m.mean).sum(), setattr(m, "mean", 0.9 * m.mean + 0.1 * logits.detach()[0]))[0]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", READS)
def test_what_an_earlier_step_left_cannot_be_read(name: str, kind: type[Engine]) -> None:
    module = Module(READS[name])
    engine = kind(module)
    run(module, engine)
    with pytest.raises(IsolationError, match="training_step reads ") as refusal:
        run(module, engine)
    assert f"reads {name}, " in str(refusal.value)


# -- in place ---------------------------------------------------------------------------------------------------------


def _in_place(name: str, write: Callable[[Any], Any]) -> Callable[..., Any]:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        with torch.no_grad():
            write(getattr(m.get_submodule(owner), attribute))

    return effect


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    ".data": lambda t: t.data.add_(1),
    "numpy view": lambda t: t.detach().numpy().__iadd__(1),
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", ["count", "table", "mean", "net.bias"])
def test_tensors_written_in_place_are_refused_by_name_whatever_the_way(name: str, how: str) -> None:
    module = Module(_in_place(name, IN_PLACE[how]))
    with pytest.raises(UnsupportedModelError, match=rf"training_step writes self\.{name} in place"):
        run(module, LoopEngine)


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", ["count", "table", "mean"])
def test_the_same_under_vmap(name: str, how: str) -> None:
    words = rf"training_step writes self\.{name} in place|into a tensor from outside the step|needs a tensor's memory"
    with pytest.raises(UnsupportedModelError, match=words):
        run(Module(_in_place(name, IN_PLACE[how])), VmapEngine)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["self.array", "the global GLOBAL_ARRAY"])
def test_arrays_written_in_place_are_refused_by_name(kind: type[Engine], name: str) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        (m.array if name == "self.array" else GLOBAL_ARRAY)[0] += 1

    with pytest.raises(UnsupportedModelError, match=f"training_step writes {name} in place"):
        run(Module(effect), kind)


@pytest.mark.parametrize("write", ["add_", "abs_", "one entry"])
@pytest.mark.parametrize("shape", [(400, 400), (331, 333)])
def test_large_tensors_are_compared_by_content_too(write: str, shape: tuple[int, int]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        data = m.large.data
        data[3, 5] = 1e-30 if write == "one entry" else data[3, 5]
        _ = data.add_(1) if write == "add_" else data.abs_() if write == "abs_" else None

    module = Module(effect)
    module.register_buffer("large", torch.randn(shape))
    with pytest.raises(UnsupportedModelError, match=r"training_step writes self\.large in place"):
        run(module, LoopEngine)


# -- Python values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_counter_counts_batches_and_can_be_read(kind: type[Engine], chunk: int | None) -> None:
    seen = []

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        m.steps += 1
        seen.append(m.steps)
        return loss / m.steps

    module = Module(effect)
    engine = kind(module, chunk_size=chunk)
    for steps in (1, 2, 3):
        run(module, engine)
        assert module.steps == steps
    assert set(seen) == {1, 2, 3}


def test_a_number_of_the_data_is_no_counter() -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        m.steps += int(10 * loss.item())
        return loss / (1 + m.steps)

    module = Module(effect)
    engine = LoopEngine(module)
    run(module, engine)
    with pytest.raises(IsolationError, match=r"training_step reads self\.steps"):
        run(module, engine)


@pytest.mark.parametrize("labels", [[1, 0], [0, 1]])
def test_what_counts_in_some_batches_only_is_no_counter(labels: list[int]) -> None:
    """In a batch of one record each example agrees with all others."""

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        m.steps += int(m.y.item())
        return loss / (1 + m.steps)

    class Labelled(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.y = batch[1]
            return super().training_step(batch, batch_idx)

    module = Labelled(effect)
    engine, layout = LoopEngine(module), ParameterLayout(module)
    with pytest.raises(IsolationError, match=r"training_step reads self\.steps"):  # noqa: PT012 - one of them
        for label in [*labels, 0]:
            batch = (X[:1], torch.tensor([label]))
            engine.accumulate(StepCall((batch, 0), 1), layout, FlatClipper(1.0), layout.zeros())


def test_numbers_of_the_data_do_not_go_from_one_example_to_the_next() -> None:
    seen = io.StringIO()

    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        print(len(m.losses), file=seen)
        m.losses.append(loss.item())

    module = Module(effect)
    run(module, LoopEngine)
    assert seen.getvalue().split() == ["0"] * 6  # the first example is run once more
    with torch.no_grad():
        assert module.losses == [pytest.approx(F.cross_entropy(module.net(X), Y).item(), rel=1e-6)]


def test_writing_for_some_examples_only_is_refused_by_name() -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        if loss.item() > 0.7:
            m.losses.append(loss)

    with pytest.raises(UnsupportedModelError, match=r"writes self\.losses for some examples and not for others"):
        run(Module(effect), LoopEngine)


class Keeping(Metric):
    """Keeps more than its states."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.largest, self.calls, self.history, self.array = 1.0, 1, [1.0], np.ones(1)
        self.untouched = 1.0

    def update(self, logits: Tensor) -> None:
        self.total += logits.square().sum()  # in place: the tensor is the one that was there before
        self.largest = float(logits.max())
        self.history.append(self.largest)
        self.array[0] = self.largest
        self.calls += 1
        GLOBAL_DICT["largest"] = self.largest

    def compute(self) -> Tensor:
        return self.total


GLOBAL_DICT: dict[str, float] = {}

LEFT_BY_A_METRIC: dict[str, Callable[[Any], Any]] = {
    "a state": lambda metric: metric.total,
    "a number": lambda metric: metric.largest,
    "a count": lambda metric: metric.calls,
    "a list": lambda metric: sum(metric.history),
    "an array": lambda metric: float(metric.array[0]),
    "a global": lambda metric: GLOBAL_DICT["largest"],
}


def _reads_a_metric(read: Callable[[Any], Any]) -> Callable[..., Any]:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        weight = read(m.metric) + m.metric.untouched
        m.metric.update(logits)
        return loss * weight

    return effect


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("what", LEFT_BY_A_METRIC)
def test_what_a_metric_left_when_it_saw_the_batch_is_not_read(kind: type[Engine], what: str) -> None:
    GLOBAL_DICT["largest"] = 1.0
    module: Any = Module(_reads_a_metric(LEFT_BY_A_METRIC[what]))
    module.metric = Keeping()
    engine = kind(module)
    run(module, engine)
    with pytest.raises(IsolationError, match="total|largest|calls|history|array"):
        run(module, engine)


@pytest.mark.parametrize("kind", ENGINES)
def test_what_an_own_log_left_is_not_read(kind: type[Engine]) -> None:
    class Logging(Module):
        last, first = 1.0, 1.0

        def log(self, name: str, value: Any) -> None:
            self.last = float(value)

        def log_dict(self, values: Any) -> None: ...

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        weight = m.last if m.reads else m.first
        m.log("loss", loss)
        return loss * weight

    module: Any = Logging(effect)
    module.reads = False
    engine = kind(module)
    first = run(module, engine)
    assert torch.equal(run(module, engine), first)
    module.reads = True
    with pytest.raises(IsolationError, match=r"self\.last"):
        run(module, engine)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_mask_made_on_first_use_is_made_again(kind: type[Engine]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        if m.cache["mask"] is None:
            m.cache["mask"] = torch.ones(2)
        return loss + (logits * m.cache["mask"]).sum()

    module = Module(effect)
    engine = kind(module, chunk_size=2)
    first = run(module, engine)
    assert torch.equal(module.cache["mask"], torch.ones(2))
    assert torch.equal(run(module, engine), first)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_class_made_on_first_use_is_made_again(kind: type[Engine]) -> None:
    """Every call makes one of its own."""

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        if not hasattr(m, "output"):
            m.output = namedtuple("Output", ["logits"])
        return loss + m.output(logits=logits).logits.sum()

    module = Module(effect)
    engine = kind(module, chunk_size=2)
    first = run(module, engine)
    assert torch.equal(run(module, engine), first)


@pytest.mark.parametrize("kind", ENGINES)
def test_what_a_mask_was_made_for_comes_again_with_it(kind: type[Engine]) -> None:
    """As temporal fusion transformers keep it; without a mask a later step would read what an earlier one left."""

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        if len(logits) != m.scale:
            m.mask = 2 * torch.ones(2) if m.masked else m.mask
            m.scale = len(logits)
        return loss + (logits * (1 if m.mask is None else m.mask)).sum()

    module = Module(effect)
    module.masked, module.scale = True, -1
    module.register_buffer("mask", None)
    engine = kind(module, chunk_size=2)
    first = run(module, engine)
    assert module.scale == 1
    assert torch.equal(run(module, engine), first)
    module = Module(effect)
    module.masked, module.scale, module.mask = False, -1, None
    engine = kind(module, chunk_size=2)
    run(module, engine)
    with pytest.raises(IsolationError, match=r"reads self\.scale"):
        run(module, engine)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_metric_outside_the_modules_is_refused_by_name(kind: type[Engine]) -> None:
    module = Module(lambda m, loss, logits: m.cache["metric"].update(loss))
    module.cache["metric"] = MeanMetric()
    with pytest.raises(UnsupportedModelError, match=r"self\.cache\['metric'\]|test_state.py:"):
        run(module, kind)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_error_in_the_step_leaves_the_module_as_it_was(kind: type[Engine]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        m.losses.append(loss)
        m.ema, m.own.kept, m.fresh = loss, [loss], loss
        raise ArithmeticError("of the user")

    module = Module(effect)
    with pytest.raises(ArithmeticError, match="of the user"):
        run(module, kind)
    assert module.losses == [] and module.ema is None and module.own.kept is None and not hasattr(module, "fresh")


def test_large_plain_attributes_and_foreign_objects_are_left_alone() -> None:
    module = Module(lambda *_: None)
    module.vocabulary = {str(i): i for i in range(50_000)}
    module.options = SimpleNamespace(a=[1])
    module.loop_of = module.cache
    module.cache["self"] = module.cache
    run(module, VmapEngine, 2)
    run(module, LoopEngine)


# -- random generators, and what cannot be watched ---------------------------------------------------------------------


RESEEDS: dict[str, Callable[[], Any]] = {
    "torch.manual_seed": lambda: torch.manual_seed(0),
    "torch.get_rng_state": lambda: torch.get_rng_state(),
    "torch.random.fork_rng": lambda: torch.random.fork_rng().__enter__(),
    "torch.initial_seed": lambda: torch.initial_seed(),
    "numpy.random.seed": lambda: np.random.seed(0),  # noqa: NPY002
    "numpy.random.get_state": lambda: np.random.get_state(),  # noqa: NPY002
    "random.seed": lambda: random.seed(0),
    "random.getstate": lambda: random.getstate(),
}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", RESEEDS)
def test_seeding_and_reading_generators_in_a_step_is_refused_by_name(name: str, kind: type[Engine]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> None:
        RESEEDS[name]()

    with pytest.raises(UnsupportedModelError, match=rf"uses {name}: random numbers would be known"):
        run(Module(effect), kind)
    assert torch.initial_seed() is not None and random.getstate()  # outside they answer again


@pytest.mark.parametrize("kind", ENGINES)
def test_a_generator_of_the_steps_own_is_fine(kind: type[Engine]) -> None:
    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        noise = torch.randn(2, generator=torch.Generator().manual_seed(3))
        return loss + (logits * noise).sum()

    run(Module(effect), kind)


def test_dropout_is_repeated_for_the_look_at_the_first_example() -> None:
    module = Module(lambda m, loss, logits: F.dropout(logits, 0.5).sum() + random.random() * logits.sum())
    run(module, LoopEngine)


def test_what_the_loop_cannot_watch_is_noticed_by_repeating_an_example() -> None:
    numbers = itertools.count(1)

    def effect(m: Any, loss: Tensor, logits: Tensor) -> Tensor:
        return loss * next(numbers)

    with pytest.raises(IsolationError, match="gives another loss for an example that it has seen before"):
        run(Module(effect), LoopEngine)


REPARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm of old": nn.utils.weight_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", REPARAMETRISED)
def test_reparametrised_layers_have_the_plain_gradient(name: str, kind: type[Engine]) -> None:
    module = Module(lambda m, loss, logits: None)
    REPARAMETRISED[name](module.net)
    engine, layout = kind(module), ParameterLayout(module)
    module.training_step((X, Y), 0).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in layout.parameters])
    for _ in range(2):
        total = layout.zeros()
        engine.accumulate(StepCall(((X, Y), 0), 5), layout, FlatClipper(float("inf")), total)
        assert torch.allclose(total / 5, expected, atol=1e-6)


def test_a_metrics_value_that_is_kept_is_the_batchs() -> None:
    """Known only once the recorded calls are made; what holds it is filled then."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")
            self.last, self.history = None, []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            scores = self.layer(x)
            self.last = self.accuracy(scores, y) * 100
            self.history.append({"accuracy": self.last})
            return nn.functional.cross_entropy(scores, y)

    x, y = torch.randn(8, 3), torch.arange(8) % 2
    module = Keeps()
    layout = ParameterLayout(module)
    with torch.no_grad():
        want = float((module.layer(x).argmax(1) == y).float().mean()) * 100
    for count in (1, 2):
        VmapEngine(module).accumulate(StepCall(((x, y), 0), 8), layout, FlatClipper(1.0), layout.zeros())
        assert float(module.last) == pytest.approx(want)
        assert [float(entry["accuracy"]) for entry in module.history] == pytest.approx([want] * count)
