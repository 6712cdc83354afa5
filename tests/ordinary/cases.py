"""Training steps as they stand in tutorials and packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional import accuracy as functional_accuracy
from torchmetrics.functional.classification import multiclass_accuracy

from tests.ordinary.harness import Case

_generator = torch.Generator().manual_seed(0)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator)


CLASSES = [(_randn(5), k % 3) for k in range(6)]
BINARY = [(_randn(5), float(k % 2)) for k in range(6)]
REAL = [(_randn(5), _randn(1)) for k in range(6)]
SEQUENCES = [(_randn(7, 4), k % 3) for k in range(6)]
IMAGES = [(_randn(3, 8, 8), k % 3) for k in range(4)]
RAGGED = [(_randn(length, 4), k % 3) for k, length in enumerate((3, 5, 2, 5, 3, 4))]


def _linear(out: int = 3) -> Callable[[], dict[str, Any]]:
    return lambda: {"net": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, out))}


def classify(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.net(x), y)


# --- numbers ---------------------------------------------------------------------------------------------------------


def item_logged(m: Any, batch: Any) -> Tensor:
    loss = classify(m, batch)
    m.log("loss", loss.item())
    m.log_dict({"rounded": round(loss.item(), 4), "root": loss.detach().item() ** 2})
    return loss


def float_logged(m: Any, batch: Any) -> Tensor:
    loss = classify(m, batch)
    m.log("float", float(loss) * 2 + 1)
    return loss


def item_returned(m: Any, batch: Any) -> Any:
    loss = classify(m, batch)
    return {"loss": loss, "value": loss.item(), "pair": [loss.item() + 1, 2 * loss.item()]}


def assert_finite(m: Any, batch: Any) -> Tensor:
    loss = classify(m, batch)
    assert not torch.isnan(loss)
    assert not torch.isnan(loss).any()
    assert torch.isfinite(loss).all(), "loss"
    if torch.isnan(loss):
        raise ValueError("loss is nan")
    return loss


def branch_on_item(m: Any, batch: Any) -> Tensor:
    loss = classify(m, batch)
    return loss * 2 if loss.item() > 1.0 else loss


def item_in_loss(m: Any, batch: Any) -> Tensor:
    loss = classify(m, batch)
    return loss / (1 + loss.item())


# --- a batch of one --------------------------------------------------------------------------------------------------


def squeeze_bce(m: Any, batch: Any) -> Tensor:
    x, y = batch
    loss = F.binary_cross_entropy_with_logits(m.net(x).squeeze(), y)
    m.log("loss", loss)
    return loss


def squeeze_mse(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(torch.squeeze(m.net(x)), y.float().squeeze())


def squeeze_images(m: Any, batch: Any) -> Tensor:
    x, y = batch
    features = F.adaptive_avg_pool2d(m.conv(x), 1).squeeze()
    return F.cross_entropy(m.net(features), y)


# --- containers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class DataBatch:
    x: Tensor
    y: Tensor
    temperature: float = 2.0


@attrs.define
class AttrsBatch:
    x: Tensor
    y: Tensor


class NamedBatch(NamedTuple):
    x: Tensor
    y: Tensor


def _rows(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate_(records)
    return x, y


def default_collate_(records: list[Any]) -> Any:
    return torch.stack([r[0] for r in records]), torch.tensor([r[1] for r in records])


def by_fields(m: Any, batch: Any) -> Tensor:
    return F.cross_entropy(m.net(batch.x) / getattr(batch, "temperature", 1.0), batch.y)


def detection(m: Any, batch: Any) -> Any:
    images, targets = batch
    losses = []
    for image, target in zip(images, targets, strict=True):
        boxes = m.net(image.mean(dim=(1, 2)))
        losses.append(((boxes - target["boxes"].mean(0)) ** 2).mean() + 0 * target["labels"].sum())
    return torch.stack(losses).mean()


DETECTION = [(_randn(5, 8, 8), {"boxes": _randn(n, 4), "labels": torch.arange(n)}) for n in (1, 3, 2, 1)]


def constants(m: Any, batch: Any) -> Tensor:
    loss = F.cross_entropy(m.net(batch["x"]), batch["y"], weight=batch["weights"])
    return loss * batch["scale"] if batch["name"] == "train" else 0 * loss


def with_constants(records: list[Any]) -> Any:
    x, y = default_collate_(records)
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 0.5]), "scale": 3, "name": "train", "ids": None}


class Graph:
    """A graph as torch_geometric makes them: attributes, and a batch that knows its graphs."""

    def __init__(self, x: Tensor, edge_index: Tensor, y: Tensor, batch: Tensor) -> None:
        self.x, self.edge_index, self.y, self.batch = x, edge_index, y, batch

    def to(self, *args: Any, **options: Any) -> Graph:
        return Graph(*(getattr(self, k).to(*args, **options) for k in ("x", "edge_index", "y", "batch")))


class GraphBatch(Graph):
    @classmethod
    def from_data_list(cls, graphs: list[Graph]) -> GraphBatch:
        shift = [0]
        for graph in graphs:
            shift.append(shift[-1] + len(graph.x))
        return cls(
            torch.cat([g.x for g in graphs]),
            torch.cat([g.edge_index + s for g, s in zip(graphs, shift, strict=False)], dim=1),
            torch.cat([g.y for g in graphs]),
            torch.cat([torch.full((len(g.x),), k) for k, g in enumerate(graphs)]),
        )

    def to_data_list(self) -> list[Graph]:
        return [Graph(self.x, self.edge_index, self.y, self.batch)]


GRAPHS = [
    Graph(_randn(n, 5), torch.randint(0, n, (2, 6), generator=_generator), torch.tensor([n % 3]), torch.zeros(n).long())
    for n in (3, 4, 2, 3)
]


def message_passing(m: Any, graph: Any) -> Tensor:
    source, target = graph.edge_index
    h = m.net[0](graph.x)
    h = h + torch.zeros_like(h).index_add_(0, target, h[source])
    number = int(graph.batch.max()) + 1
    pooled = torch.zeros(number, h.shape[1]).index_add_(0, graph.batch, h)
    return F.cross_entropy(m.net[2](pooled.tanh()), graph.y)


# --- metrics ---------------------------------------------------------------------------------------------------------


def count_summed(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.log("correct", (logits.argmax(1) == y).sum().float(), reduce_fx="sum", on_epoch=True, on_step=False)
    m.log("total", float(len(y)), reduce_fx="sum", on_epoch=True, on_step=False)
    return F.cross_entropy(logits, y)


def count_logged(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.log("hits", (logits.argmax(1) == y).sum())
    return F.cross_entropy(logits, y)


def metric_arithmetic(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    value = m.accuracy(logits, y)
    m.log("error", 1 - value)
    m.log("percent", 100 * value)
    m.log("item", value.item())
    m.log("tensor", torch.sqrt(value) / 2)
    return F.cross_entropy(logits, y)


def metric_computed(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.accuracy.update(logits, y)
    m.log("accuracy", m.accuracy.compute())
    return F.cross_entropy(logits, y)


def functional_metric(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.log("accuracy", functional_accuracy(logits.argmax(1), y, task="multiclass", num_classes=3))
    m.log("again", multiclass_accuracy(logits.softmax(1), y, num_classes=3, average="micro"))
    return F.cross_entropy(logits, y)


def metric_as_loss(m: Any, batch: Any) -> Tensor:
    x, y = batch
    loss = m.mse(m.net(x), y)
    m.log("loss", loss)
    return loss


# --- what autograd and layers do -------------------------------------------------------------------------------------


def boolean_mask(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    keep = y >= 0
    return F.cross_entropy(logits[keep], y[keep])


def packed(m: Any, batch: Any) -> Tensor:
    x, lengths, y = batch
    out = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    out = pad_packed_sequence(out, batch_first=True)[0]
    return F.cross_entropy(m.head(out.mean(1)), y)


def padding_collate(records: list[Any]) -> Any:
    x = pad_sequence([r[0] for r in records], batch_first=True)
    return x, torch.tensor([len(r[0]) for r in records]), torch.tensor([r[1] for r in records])


def gradient_penalty(m: Any, batch: Any) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_()
    logits = m.net(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def rsample(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    mean, log_std = m.net(x).chunk(2, dim=1)
    latent = torch.distributions.Normal(mean, 1e-6 * log_std.exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mean, log_std.exp()), prior)
    return (m.decoder(latent.rsample()) - x).square().mean() + divergence.sum(1).mean()


class Features(nn.Module):
    """Registers a hook at its first use, as transformers does for ``output_hidden_states``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 3)
        self.seen: list[Any] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.one.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
        self.seen.clear()
        out = self.two(self.one(x).tanh())
        hidden = self.seen.pop()
        return out + 0.01 * hidden.square().mean()


class StandardConv(nn.Conv2d):
    """Weight standardisation as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


def image_classify(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.net(x), y)


def autocast(m: Any, batch: Any) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = m.net(x)
    return F.cross_entropy(logits.float(), y)


def cells(kind: type[nn.Module]) -> Callable[[Any, Any], Tensor]:
    def step(m: Any, batch: Any) -> Tensor:
        x, y = batch
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state) if state is not None else m.cell(x[:, t])
        h = state[0] if isinstance(state, tuple) else state
        return F.cross_entropy(m.head(h), y)

    return step


def decoder(m: Any, batch: Any) -> Tensor:
    x, y = batch
    _, state = m.encoder(x)
    token = torch.zeros(x.shape[0], 1, 4)
    out, _ = m.decoder(token, state)
    return F.cross_entropy(m.head(out[:, 0]), y)


def recurrent(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.head(m.rnn(x)[0].mean(1)), y)


def sparse_table(m: Any, batch: Any) -> Tensor:
    tokens, y = batch
    return F.cross_entropy(m.head(m.table(tokens).mean(1)), y)


TOKENS = [(torch.randint(0, 9, (4,), generator=_generator), k % 3) for k in range(5)]


def _pruned() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    prune.random_unstructured(net[0], "weight", 0.3)
    return {"net": net}


CASES: dict[str, Case] = {
    "item logged": Case(item_logged, CLASSES, _linear(), logs=False),
    "float logged": Case(float_logged, CLASSES, _linear(), engine="loop"),
    "item returned": Case(item_returned, CLASSES, _linear()),
    "assert finite": Case(assert_finite, CLASSES, _linear()),
    "branch on item": Case(branch_on_item, CLASSES, _linear(), engine="loop", logs=False),
    "item in the loss": Case(item_in_loss, CLASSES, _linear(), logs=False),
    "squeeze, BCE": Case(squeeze_bce, BINARY, _linear(1), twins=True),
    "squeeze, MSE": Case(squeeze_mse, REAL, _linear(1)),
    "squeeze, pooled": Case(
        squeeze_images, IMAGES, lambda: {"conv": nn.Conv2d(3, 5, 3), "net": nn.Linear(5, 3)}, twins=True
    ),
    "dataclass": Case(by_fields, CLASSES, _linear(), collate=lambda r: DataBatch(*_rows(r))),
    "attrs": Case(by_fields, CLASSES, _linear(), collate=lambda r: AttrsBatch(*_rows(r))),
    "named tuple": Case(by_fields, CLASSES, _linear(), collate=lambda r: NamedBatch(*_rows(r))),
    "detection": Case(detection, DETECTION, _linear(4), collate=lambda r: tuple(map(list, zip(*r, strict=True)))),
    "constants": Case(constants, CLASSES, _linear(), collate=with_constants, logs=False),
    "graphs": Case(message_passing, GRAPHS, _linear(), engine="loop", collate=GraphBatch.from_data_list),
    "count summed": Case(count_summed, CLASSES, _linear()),
    "count logged": Case(count_logged, CLASSES, _linear()),
    "metric arithmetic": Case(metric_arithmetic, CLASSES, lambda: {**_linear()(), "accuracy": MulticlassAccuracy(3)}),
    "metric computed": Case(metric_computed, CLASSES, lambda: {**_linear()(), "accuracy": MulticlassAccuracy(3)}),
    "functional metric": Case(functional_metric, CLASSES, _linear(), logs=False),
    "metric as loss": Case(metric_as_loss, REAL, lambda: {**_linear(1)(), "mse": MeanSquaredError()}),
    "boolean mask": Case(boolean_mask, CLASSES, _linear(), engine="loop"),
    "packed": Case(
        packed,
        RAGGED,
        lambda: {"rnn": nn.LSTM(4, 6, batch_first=True), "head": nn.Linear(6, 3)},
        engine="loop",
        collate=padding_collate,
        logs=False,
    ),
    "gradient penalty": Case(gradient_penalty, CLASSES, _linear(), engine="loop"),
    "rsample": Case(rsample, CLASSES, lambda: {**_linear(4)(), "decoder": nn.Linear(2, 5)}),
    "first-use hook": Case(classify, CLASSES, lambda: {"net": Features()}, refused_by=("loop",)),
    "weight standardisation": Case(
        image_classify,
        IMAGES,
        lambda: {"net": nn.Sequential(StandardConv(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))},
    ),
    "autocast": Case(autocast, CLASSES, _linear(), tolerance=0.02),
    "LSTMCell": Case(cells(nn.LSTMCell), SEQUENCES, lambda: {"cell": nn.LSTMCell(4, 6), "head": nn.Linear(6, 3)}),
    "GRUCell": Case(cells(nn.GRUCell), SEQUENCES, lambda: {"cell": nn.GRUCell(4, 6), "head": nn.Linear(6, 3)}),
    "RNNCell": Case(cells(nn.RNNCell), SEQUENCES, lambda: {"cell": nn.RNNCell(4, 6), "head": nn.Linear(6, 3)}),
    "LSTM with projections": Case(
        recurrent, SEQUENCES, lambda: {"rnn": nn.LSTM(4, 6, proj_size=2, batch_first=True), "head": nn.Linear(2, 3)}
    ),
    "decoder from zeros": Case(
        decoder,
        SEQUENCES,
        lambda: {
            "encoder": nn.LSTM(4, 6, batch_first=True),
            "decoder": nn.LSTM(4, 6, batch_first=True),
            "head": nn.Linear(6, 3),
        },
    ),
    "sparse embedding": Case(
        sparse_table,
        TOKENS,
        lambda: {"table": nn.Embedding(9, 4, sparse=True), "head": nn.Linear(4, 3)},
        refused_by=("vmap",),
    ),
    "weight_norm": Case(
        classify,
        CLASSES,
        lambda: {"net": nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))},
    ),
    "prune": Case(classify, CLASSES, _pruned, refused_by=("loop",)),
}
