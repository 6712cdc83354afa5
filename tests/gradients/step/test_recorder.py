"""What is logged and returned through an engine equals plain Lightning on the same batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.batches.rows import count_rows as rows
from lightning_lap2.gradients import Engine, StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.vmap import VmapEngine

ENGINES = [
    pytest.param(LoopEngine, None, id="loop"),
    pytest.param(VmapEngine, None, id="vmap"),
    pytest.param(VmapEngine, 1, id="vmap-1"),
    pytest.param(VmapEngine, 3, id="vmap-3"),
]


class Memory(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = version = None  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class ByEngine(L.Callback):
    """Sends ``training_step`` through an engine, with no noise and no clipping."""

    def __init__(self, kind: type[Engine], chunk: int | None) -> None:
        self.kind, self.chunk = kind, chunk
        self.outputs: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.engine = self.kind(pl_module, chunk_size=self.chunk)

        def step(*args: Any) -> Any:
            self.layout = ParameterLayout(pl_module)
            self.total = self.layout.zeros()
            count = rows(args[0])
            output = self.engine.accumulate(StepCall(args, count), self.layout, FlatClipper(float("inf")), self.total)
            self.total /= count
            loss = output["loss"] if isinstance(output, dict) else output
            loss = loss.clone().requires_grad_()
            return {**output, "loss": loss} if isinstance(output, dict) else loss

        trainer.strategy.training_step = step  # type: ignore[method-assign]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.layout.write_grads(self.total)


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)


class Everyday(L.LightningModule):
    """Every form of logging at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.value = MulticlassF1Score(3)
        self.mean = MeanMetric()
        self.weighted = MeanMetric()
        self.total = SumMetric()
        options = {"accuracy": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)}
        self.objects = MetricCollection(options, prefix="objects/")
        self.values = MetricCollection(options, prefix="values/").clone()
        self.several = nn.ModuleDict({"a": MulticlassAccuracy(3, top_k=2)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, extra = batch
        logits = self.net(x) * extra["scale"][:, None]
        each = F.cross_entropy(logits, y, reduction="none")
        loss = each.mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("default", loss.detach())
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("min", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("float", 0.5 * (batch_idx + 1), on_step=True, on_epoch=True)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("sized", loss * 2, batch_size=x.shape[0], on_epoch=True, on_step=False)
        self.log_dict({"d/norm": logits.norm(dim=1).mean(), "d/one": 1.0}, on_step=False, on_epoch=True)
        self.accuracy.update(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("value", self.value(logits, y), on_step=True, on_epoch=False)
        self.mean(each)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.weighted.update(loss, weight=x.shape[0])
        self.log("weighted", self.weighted, on_step=False, on_epoch=True)
        self.total.update(each)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.objects.update(logits, target=y)
        self.log_dict(self.objects, on_step=False, on_epoch=True)
        values = self.values(logits, y)
        self.log_dict(values, on_step=True, on_epoch=False)
        self.log_dict({f"again/{k}": v for k, v in values.items()}, on_step=True)
        self.several["a"](logits, y)
        self.log("top2", self.several["a"], on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach(), "share": y.float().mean(), "tag": "t", "f1": values}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(count: int = 10) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    records = [
        (x, y, {"scale": s})
        for x, y, s in zip(
            torch.randn(count, 6, generator=generator),
            torch.randint(0, 3, (count,), generator=generator),
            torch.rand(count, generator=generator) + 0.5,
            strict=True,
        )
    ]
    return DataLoader(records, batch_size=4)  # type: ignore[arg-type]


def fit(module: L.LightningModule, tmp_path: Any, *callbacks: L.Callback, loader: Any = None) -> Memory:
    memory = Memory()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=memory, callbacks=list(callbacks), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader or data())
    memory.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    return memory


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.detach(), b.detach(), rtol=2e-5, atol=1e-6))
    return a == b if isinstance(a, str) else a == pytest.approx(b, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "chunk"), ENGINES)
def test_logs_outputs_and_weights_equal_plain_lightning(kind: type[Engine], chunk: int | None, tmp_path: Any) -> None:
    torch.manual_seed(0)
    plain, ours = Everyday(), Everyday()
    ours.load_state_dict(plain.state_dict())
    outputs, our_outputs, engine = Outputs(), Outputs(), ByEngine(kind, chunk)
    want = fit(plain, tmp_path, outputs).rows
    got = fit(ours, tmp_path, engine, our_outputs).rows
    assert len(want) == len(got) > 6
    assert "values/f1" in got[0]
    for a, b in zip(want, got, strict=True):
        assert a.keys() == b.keys()
        assert {k: (v, b[k]) for k, v in a.items() if not close(v, b[k])} == {}
    for a, b in zip(outputs.seen, our_outputs.seen, strict=True):
        assert close(a, b)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)
    assert {"loss", "accuracy", "objects/f1", "again/values/f1", "value"} <= engine.engine.logged_names
    assert "log" not in vars(ours)
    assert not {"forward", "reset"} & vars(ours.accuracy).keys()


class Step(L.LightningModule):
    """A module whose step is given."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.sum = SumMetric()
        self.step = step
        self.log = lambda *a, **k: self.made.append((a, k))  # type: ignore[method-assign]
        self.made: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        return self.step(self, F.cross_entropy(logits, y), logits, y)


def run(module: nn.Module, kind: type[Engine], count: int, *, template: bool = False) -> tuple[Any, Tensor]:
    batch = (torch.ones(count, 6) * torch.arange(1, count + 1)[:, None], torch.arange(count) % 3)
    layout = ParameterLayout(module)
    total = layout.zeros()
    call = StepCall((batch, 0), 0 if template else count)
    return kind(module).accumulate(call, layout, FlatClipper(1.0), total), total


def vector_loss(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    return logits


def as_number(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    m.log("x", 1 - float(m.accuracy(logits, y)))
    return loss


def branch(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    return loss if m.accuracy(logits, y) > 0.5 else 2 * loss


def loss_of_earlier_batches(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    return loss * m.accuracy.compute()


def no_loss(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Any:
    return {"Loss": loss}


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (as_number, "turns the value that MulticlassAccuracy returned into a plain number"),
        (branch, "MulticlassAccuracy returned into a plain number, a text or a condition"),
        (loss_of_earlier_batches, r"computed from MulticlassAccuracy.compute\(\)"),
        (vector_loss, "must return a loss tensor with one element"),
        (no_loss, "a dict with such a 'loss', or None; got NoneType"),
    ],
)
def test_what_cannot_be_replayed_says_so(step: Any, words: str, kind: type[Engine]) -> None:
    module = Step(step)
    with pytest.raises(UnsupportedModelError, match=words):
        run(module, kind, 4)
    assert not module.accuracy.update_called


class Remembering(MeanSquaredError):
    """Keeps beside its states what no reset clears."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, target)
        self.seen += float(target.detach().sum()) if not torch._C._functorch.is_functorch_wrapped_tensor(target) else 0

    def compute(self) -> Tensor:
        return super().compute() * (1 + self.seen)


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_a_metric_as_the_loss_knows_nothing_of_earlier_batches(kind: type[Engine]) -> None:
    class Regression(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.error(self.net(x)[:, 0], y.float())

    torch.manual_seed(0)
    module = Regression(None)
    module.error = Remembering()
    layout, totals = ParameterLayout(module), []
    engine, call = kind(module), StepCall(((torch.ones(3, 6), torch.arange(3)), 0), 3)
    for _ in range(2):
        totals.append(layout.zeros())
        engine.accumulate(call, layout, FlatClipper(1.0), totals[-1])
        assert module.error.seen  # what the update with the whole batch left
    assert float(totals[0].norm()) > 0
    assert torch.equal(totals[0], totals[1])


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_a_metric_as_the_loss_has_what_was_set_for_it(kind: type[Engine]) -> None:
    """In a hook, or in the step itself."""

    class Scaled(MeanSquaredError):
        scale, shift = 1.0, 0.0

        def compute(self) -> Tensor:
            return super().compute() * self.scale + self.shift

    class Regression(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.error.shift = self.net(x).sum()
            return self.error(self.net(x)[:, 0], y.float())

    torch.manual_seed(0)
    module = Regression(None)
    module.error = Scaled()
    layout, total = ParameterLayout(module), ParameterLayout(module).zeros()
    engine, x, y = kind(module), torch.ones(3, 6), torch.arange(3)
    module.error.scale = 3.0
    engine.accumulate(StepCall(((x, y), 0), 3), layout, FlatClipper(1e6), total)
    own = [
        3 * (module.net(x[k : k + 1])[:, 0] - y[k]).square().mean() + module.net(x[k : k + 1]).sum() for k in range(3)
    ]
    want = torch.autograd.grad(sum(own), layout.parameters, allow_unused=True)  # type: ignore[arg-type]
    flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                      for p, g in zip(layout.parameters, want, strict=True)])  # fmt: skip
    torch.testing.assert_close(total, flat)


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_counts_are_summed(kind: type[Engine]) -> None:
    def step(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        hits = (y == 0).sum()
        m.log("hits", hits)
        m.log("rows", float(len(y)), reduce_fx="sum")
        m.log("number", hits.item())
        m.log("mine", hits.float(), reduce_fx=torch.sum)
        m.sum.update(hits)
        return loss

    module = Step(step)
    run(module, kind, 4)
    assert {args[0]: float(args[1]) for args, _ in module.made} == {"hits": 2, "rows": 4, "number": 2, "mine": 2}
    assert float(module.sum.compute()) == 2
    module.made.clear()
    run(module, kind, 1, template=True)
    assert {float(args[1]) for args, _ in module.made if args[0] != "number"} == {0.0}
    assert float(module.sum.compute()) == 2


def test_log_calls_that_depend_on_the_example_are_left_out_with_one_warning() -> None:
    def step(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Any:
        if y.item() == 0:
            m.log("zero", loss)
            m.accuracy.update(logits, y)
        m.log("all", loss)
        return {"loss": loss, ("zero" if y.item() == 0 else "other"): logits}

    module = Step(step)
    engine, layout = LoopEngine(module), ParameterLayout(module)
    call = StepCall(((torch.ones(3, 6), torch.arange(3)), 0), 3)
    with pytest.warns(UserWarning, match="is left out where it differs between examples") as seen:
        output = engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())
    assert [str(w.message).split(" is left out")[0] for w in seen] == [
        "self.log('zero', ...)",
        "a call of MulticlassAccuracy.update()",
        "the entry 'zero' of what training_step returns",
    ]
    assert [args[0] for args, _ in module.made] == ["all"]
    assert output.keys() == {"loss"}
    engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())  # warned of once


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_rows_that_are_not_finite_are_left_out_of_logged_means(kind: type[Engine]) -> None:
    def step(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        value = torch.where(y == 1, float("nan"), y.float()).mean()
        m.log("value", value)
        m.log("none", value * float("nan"))
        return loss + 0 * value

    module = Step(step)
    output, total = run(module, kind, 3)
    assert torch.isfinite(output)
    assert torch.isfinite(total).all()
    assert float(module.made[0][0][1]) == 1.0  # of 0, nan and 2
    assert torch.isnan(module.made[1][0][1])


def ragged(kind: type[Engine], step: Any) -> tuple[Any, Any]:
    """Examples of 2, 3, 2 and 3 time steps, so in two groups."""
    torch.manual_seed(0)
    module = Step(step)
    module.training_step = lambda batch, batch_idx: step(module, *batch)  # type: ignore[method-assign]
    records = [(torch.full((1, length, 6), float(k)), torch.tensor([k])) for k, length in enumerate((2, 3, 2, 3))]
    layout = ParameterLayout(module)
    call = StepCall((ExampleBatch.of(records), 0), 4)
    return module, kind(module).accumulate(call, layout, FlatClipper(1.0), layout.zeros())


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_outputs_of_several_shapes_are_in_the_order_of_the_draw(kind: type[Engine]) -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Any:
        m.log("mean", x.mean())
        return {"loss": m.net(x).square().mean(), "y": y, "x": x[..., 0], "flat": x[0, :, 0], "size": x.shape[1]}

    module, output = ragged(kind, step)
    assert output["y"].tolist() == [0, 1, 2, 3]
    assert output["x"].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 0], [3, 3, 3]]
    assert output["flat"].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert float(module.made[0][0][1]) == 1.5


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_metrics_over_several_shapes(kind: type[Engine]) -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        m.log("value", m.error(x, x + y))
        return m.net(x).square().mean()

    module = Step(step)
    module.error = MeanSquaredError()
    module.training_step = lambda batch, batch_idx: step(module, *batch)  # type: ignore[method-assign]
    records = [(torch.ones(1, length, 6), torch.tensor([float(length)])) for length in (2, 3, 2)]
    layout = ParameterLayout(module)
    kind(module).accumulate(StepCall((ExampleBatch.of(records), 0), 3), layout, FlatClipper(1.0), layout.zeros())
    want = (2 * 12 * 4 + 18 * 9) / (2 * 12 + 18)
    assert float(module.made[0][0][1]) == pytest.approx(want)
    assert float(module.error.compute()) == pytest.approx(want)


def test_numbers_read_out_are_averaged_under_the_loop_engine() -> None:
    def step(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        m.log("loss", loss.item())
        m.log("epoch", 3)
        m.mean.update(loss.item())
        return loss

    module = Step(step)
    module.mean = MeanMetric()
    loss, _ = run(module, LoopEngine, 4)
    assert float(module.mean.compute()) == pytest.approx(float(loss), rel=1e-6)
    (name, value), _ = module.made[0]
    assert (name, value) == ("loss", pytest.approx(float(loss), rel=1e-6))
    assert module.made[1] == (("epoch", 3), {})


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_an_empty_draw_logs_with_weight_zero_and_adds_nothing(kind: type[Engine]) -> None:
    def step(m: Any, loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        m.log("loss", loss * float("nan"), batch_size=1)
        m.log("value", m.accuracy(logits, y))
        m.log("object", m.accuracy)
        m.sum.update(loss[None])
        return loss

    module = Step(step)
    output, total = run(module, kind, 1, template=True)
    assert torch.isfinite(output)
    assert float(total.abs().max()) == 0
    assert [call[1]["batch_size"] for call in module.made] == [0, 0, 0]
    assert all(torch.isfinite(torch.as_tensor(call[0][1])) for call in module.made[:2])
    assert not module.accuracy.update_called
    assert not module.sum.update_called


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_a_step_that_returns_none_has_zero_gradient(kind: type[Engine]) -> None:
    module = Step(lambda m, loss, logits, y: m.log("loss", loss))
    output, total = run(module, kind, 3)
    assert output is None
    assert float(total.abs().max()) == 0
    assert len(module.made) == 1


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_unknown_objects_are_not_returned(kind: type[Engine]) -> None:
    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    module = Step(lambda m, loss, logits, y: {"loss": loss, "cache": Cache(logits), "pair": (logits, 3), "n": None})
    output, _ = run(module, kind, 3)
    assert output["cache"] is None
    assert output["pair"][0].shape == (3, 3)
    assert output["pair"][1] == 3


def test_a_step_that_returns_none_for_some_examples() -> None:
    module = Step(lambda m, loss, logits, y: None if y.item() == 0 else loss)
    output, total = run(module, LoopEngine, 3)
    whole, rest = ParameterLayout(module).zeros(), run(module, LoopEngine, 3)[1]
    assert torch.isfinite(output)
    assert torch.equal(total, rest)
    assert not torch.equal(total, whole)
