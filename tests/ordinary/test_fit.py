"""Ordinary code in a fit under the defaults."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lap2 import Lap2Privacy, register_batch_type
from lightning_lap2.batches import containers
from tests.helpers import quiet_trainer
from tests.ordinary.cases import (
    CASES,
    CLASSES,
    GRAPHS,
    RAGGED,
    GraphBatch,
    classify,
    message_passing,
    padding_collate,
)  # fmt: skip
from tests.ordinary.harness import Case, Net, alone, plainly, privately


def fit(module: L.LightningModule, records: Any, collate: Any = None, **options: Any) -> tuple[Any, Lap2Privacy]:
    loader: DataLoader[Any] = DataLoader(list(records), batch_size=2, collate_fn=collate)
    privacy = Lap2Privacy(eps=8.0, delta=1e-5)
    trainer = quiet_trainer(L.pytorch, privacy, **{"max_epochs": 2, **options})
    trainer.fit(module, loader)
    return trainer, privacy


def classifier(step: Any = classify, **parts: Any) -> Net:
    torch.manual_seed(0)
    return Net(step, net=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), **parts)


@pytest.mark.parametrize(
    "name", ["dataclass", "attrs", "named tuple", "detection", "constants", "graphs", "packed", "squeeze, BCE"]
)
def test_containers_train(name: str) -> None:
    case: Case = CASES[name]
    module = case.module()
    before = [p.detach().clone() for p in module.parameters()]
    trainer, privacy = fit(module, case.records, case.collate)
    assert trainer.global_step == 2 * (len(case.records) // 2)
    assert privacy.epsilon > 0
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


class Pair:
    """A batch class that nothing is known of."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_a_registered_type_is_taken_by_the_fast_engines(caplog: pytest.LogCaptureFixture) -> None:
    def collate(records: list[Any]) -> Pair:
        return Pair(torch.stack([x for x, _ in records]), torch.tensor([y for _, y in records]))

    def step(m: Any, batch: Any) -> Tensor:
        return classify(m, (batch.x, batch.y))

    _, opaque = fit(classifier(step), CLASSES, collate)
    register_batch_type(Pair, split=vars, join=lambda parts: Pair(**parts))
    try:
        _, known = fit(classifier(step), CLASSES, collate)
    finally:
        del containers._REGISTERED[Pair]
    assert opaque.report().engine == "loop"
    assert known.report().engine == "ghost"


def test_metrics_computed_at_the_last_batch() -> None:
    seen: list[float] = []

    def step(m: Any, batch: Any) -> Tensor:
        x, y = batch
        logits = m.net(x)
        m.accuracy.update(logits, y)
        m.mean.update(F.cross_entropy(logits, y))
        if m.trainer.is_last_batch:
            m.log("accuracy", m.accuracy.compute())
            m.log("perplexity", torch.exp(m.mean.compute()))
            m.accuracy.reset()
            m.mean.reset()
        return F.cross_entropy(logits, y)

    class Watched(Net):
        def on_train_epoch_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["perplexity"]))
            assert not self.accuracy.update_called

    torch.manual_seed(0)
    module = Watched(step, net=nn.Linear(5, 3), accuracy=MulticlassAccuracy(3), mean=MeanMetric())
    trainer, _ = fit(module, CLASSES)
    assert trainer.global_step == 6
    assert len(seen) == 2 and all(1 < value < 20 for value in seen)


def test_a_module_that_hands_its_logging_on() -> None:
    class Quiet(Net):
        def log(self, *args: Any, **kwargs: Any) -> None:
            if self.trainer.training:
                super().log(*args, **kwargs)

    def step(m: Any, batch: Any) -> Tensor:
        loss = classify(m, batch)
        m.log("train/loss", loss, on_epoch=True)
        return loss

    trainer, _ = fit(Quiet(step, net=nn.Linear(5, 3)), CLASSES)
    assert 0 < float(trainer.callback_metrics["train/loss"]) < 3


def test_graphs_with_a_squeezed_output_and_a_branch() -> None:
    def step(m: Any, graph: Any) -> Tensor:
        loss = message_passing(m, graph)
        value = m.out(m.net(graph.x)).mean(0, keepdim=True).squeeze()
        assert value.shape == graph.y.shape
        return loss + F.mse_loss(value, graph.y.float())

    module = classifier(step, out=nn.Linear(3, 1))
    fit(module, GRAPHS, GraphBatch.from_data_list)


def test_a_step_that_fails_on_one_example_alone_is_told_so_with_its_line() -> None:
    def step(m: Any, batch: Any) -> Tensor:
        one, two = m.net(batch[0][:2])
        return (one - two).square().mean()

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match=rf"on a batch but not on one example alone .*line {line} of test_fit.py"):
        fit(classifier(step), CLASSES)


def test_the_first_use_hooks_of_transformers_and_its_squeezed_regression() -> None:
    transformers = pytest.importorskip("transformers")
    options = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options |= {"intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tokens = torch.arange(24).view(4, 6)
    records = [{"input_ids": row, "labels": row[:1].float().mean() / 30} for row in tokens]

    def step(m: Any, batch: Any) -> Tensor:
        out = m.net(**batch, output_hidden_states=True)
        m.log("loss", out.loss.item())
        return out.loss + 0.01 * out.hidden_states[1].square().mean()

    def parts() -> dict[str, Any]:
        return {"net": transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=1, **options))}

    case = Case(step, records, parts, twins=True)
    got, want = privately(case), alone(case)
    assert list(got.engines) == ["ghost"]
    for key in want:
        torch.testing.assert_close(got.gradient[key], want[key], rtol=0, atol=1e-6)
    assert got.logged == pytest.approx(plainly(case).logged, rel=1e-5)


def test_hugging_face_text_runs_in_few_groups_and_other_ragged_data_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Padding:
        pad_to_multiple_of: int | None = None

        def __call__(self, records: list[Any]) -> tuple[Tensor, Tensor]:
            x, _, y = padding_collate(records)
            missing = -x.shape[1] % (self.pad_to_multiple_of or 1)
            return F.pad(x, (0, 0, 0, missing)), y

    def step(m: Any, batch: Any) -> Tensor:
        return F.cross_entropy(m.head(m.rnn(batch[0])[0].sum(1)), batch[1])

    def module() -> Net:
        return Net(step, rnn=nn.LSTM(4, 6, batch_first=True), head=nn.Linear(6, 3))

    with caplog.at_level("INFO"):
        fit(module(), RAGGED, Padding())
    assert "have different shapes" not in caplog.text
    with caplog.at_level("INFO"):
        fit(module(), RAGGED, lambda records: (padding_collate(records)[0], torch.tensor([r[1] for r in records])))
    assert "have different shapes, and each shape runs by itself" in caplog.text


class Totals(Metric):
    """Of a loss and a count, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, rows: int) -> None:
        self.loss += loss.detach()
        self.rows += rows

    def compute(self) -> Tensor:
        return self.loss / self.rows


def test_what_is_a_sum_and_what_a_mean_is_learnt_from_a_plain_run() -> None:
    """Every record enters every release, so each logged value is that of plain training in the first step."""

    def step(m: Any, batch: Any) -> Tensor:
        x, y = batch
        each = F.cross_entropy(m.net(x), y, reduction="none")
        hits = (m.net(x).argmax(1) == y).sum().float()
        m.log("mean", each.mean(), reduce_fx="sum")
        m.log("sum", each.sum())
        m.log("rows", float(len(y)))
        m.log("whole", len(y))
        m.log("hits", hits)
        m.log("share", hits / len(y))
        m.log("constant", 3)
        m.totals.update(each.sum(), len(y))
        m.log("totals", m.totals.compute())
        return each.mean()

    def logged(module: Net, *callbacks: Any) -> dict[str, float]:
        trainer = quiet_trainer(L.pytorch, *callbacks, max_steps=1)
        trainer.fit(module, DataLoader(CLASSES, batch_size=len(CLASSES)))
        return {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("privacy/")}

    want = logged(classifier(step, totals=Totals()))
    got = logged(classifier(step, totals=Totals()), Lap2Privacy(eps=1e3, delta=1e-5, sampling="none"))
    assert got == pytest.approx(want, rel=1e-5)
