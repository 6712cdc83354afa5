"""Modules and data loaders from the plain values of a fuzz case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torchmetrics import MeanMetric

from tests.helpers import LIGHTNING

pl = LIGHTNING.pl
CLASSES, LENGTH, VOCABULARY = 2, 4, 7


def needs_integers(module: dict[str, Any]) -> bool:
    return "embedding" in module["kind"]


class Body(nn.Module):
    """``[B, LENGTH]`` (floats, or token numbers) to ``[B, CLASSES]``."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.net: nn.Module = nn.Linear(LENGTH, CLASSES)
        elif kind == "mlp":
            self.net = nn.Sequential(nn.Linear(LENGTH, width), nn.Tanh(), nn.Linear(width, CLASSES))
        elif kind == "conv1d":
            self.net = nn.Sequential(
                nn.Unflatten(1, (1, LENGTH)), nn.Conv1d(1, width, 3, padding=1), nn.Flatten(), nn.LazyLinear(CLASSES)
            )
        elif kind == "conv2d":
            self.net = nn.Sequential(
                nn.Unflatten(1, (1, 2, LENGTH // 2)), nn.Conv2d(1, width, 2), nn.Flatten(), nn.LazyLinear(CLASSES)
            )
        elif kind in ("embedding", "sparse embedding"):
            self.net = nn.Sequential(
                nn.Embedding(VOCABULARY, width, sparse=kind.startswith("sparse")),
                nn.Flatten(),
                nn.Linear(LENGTH * width, CLASSES),
            )
        elif kind == "norm":
            self.net = nn.Sequential(
                nn.LayerNorm(LENGTH), nn.GroupNorm(2, LENGTH), nn.RMSNorm(LENGTH), nn.Linear(LENGTH, CLASSES)
            )
        elif kind == "attention":
            self.inner = nn.TransformerEncoderLayer(2 * width, 2, 2 * width, dropout=0.0, batch_first=True)
            self.spread, self.net = nn.Linear(1, 2 * width), nn.Linear(2 * width, CLASSES)
        elif kind == "gru":
            self.inner, self.net = nn.GRU(1, width, batch_first=True), nn.Linear(width, CLASSES)
        elif kind == "lazy":
            self.net = nn.LazyLinear(CLASSES)
        elif kind == "raw":
            self.weight = nn.Parameter(0.1 * torch.ones(LENGTH, CLASSES))
        if kind in ("conv1d", "conv2d"):  # only "lazy" itself stays so
            self.net(torch.zeros(1, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no parameters":
            return x[:, :CLASSES]
        if self.kind == "raw":
            return x @ self.weight
        if self.kind == "attention":
            return self.net(self.inner(self.spread(x[..., None])).mean(1))
        if self.kind == "gru":
            return self.net(self.inner(x[..., None])[0][:, -1])
        return self.net(x)


class Fuzzed(pl.LightningModule):
    """The module that a case describes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.body = Body(spec["kind"], spec.get("width", 2))
        self.metric = MeanMetric()
        self._extra(spec.get("extra", ""))
        trainable = spec.get("trainable", "all")
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad = trainable == "all" or (trainable == "first frozen" and number > 0)

    def _extra(self, extra: str) -> None:
        self.extra: nn.Parameter | None = None
        values = {
            "unused": torch.zeros(5),
            "scalar": torch.tensor(0.5),
            "empty": torch.zeros(0),
            "double": torch.zeros(2, dtype=torch.float64),
            "half": torch.zeros(2, dtype=torch.float16),
            "complex": torch.zeros(2, dtype=torch.complex64),
            "nan": torch.tensor([1.0, float("nan")]),
        }
        if extra in values:
            self.extra = nn.Parameter(values[extra])
        elif extra == "tied":
            self.again = self.body
        elif extra == "buffer":
            self.register_buffer("calls", torch.zeros(()))
        elif extra == "batchnorm":
            self.normaliser = nn.BatchNorm1d(CLASSES)
        elif extra == "dropout":
            self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        extra, out = self.spec.get("extra"), self.body(x)
        if extra == "tied":
            out = out + self.again(x)
        elif extra in ("scalar", "half", "double", "complex", "nan"):
            assert self.extra is not None
            out = out * self.extra.abs().sum().to(out.dtype)
        elif extra == "batchnorm":
            out = self.normaliser(out)
        elif extra == "dropout":
            out = self.dropout(out)
        elif extra == "buffer":
            self.calls += 1
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        output = self.spec.get("output", "mean")
        loss = losses.sum() if output == "sum" else losses.mean()
        logs = self.spec.get("logs", "nothing")
        if logs == "metric":
            self.metric(losses.detach())
            self.log("metric", self.metric)
        elif logs != "nothing":
            self.log("loss", loss, on_epoch=logs == "epoch")
        if output == "pairs":
            return (losses[:, None] - losses[None, :]).square().mean()
        if output == "dict":
            return {"loss": loss, "more": 1}
        return {"none": None, "no graph": loss.detach(), "float": 1.0, "vector": losses}.get(output, loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> Any:
        kind, parameters = self.spec.get("optimizer", "sgd"), [p for p in self.parameters() if p.requires_grad]
        if kind == "no optimizer":
            return None
        if kind == "two":
            return [torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1)]
        if kind == "plateau":
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
        if kind == "lbfgs":
            return torch.optim.LBFGS(parameters)
        return torch.optim.Adam(parameters, lr=0.1) if kind == "adam" else torch.optim.SGD(parameters, lr=0.1)


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Records(Dataset[Any]):
    """``(x, class)``, or with a string for a third."""

    def __init__(self, spec: dict[str, Any], integers: bool) -> None:
        size = spec.get("size", 12)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, LENGTH, generator=generator)
        self.y = (self.x[:, 0] > 0).long()
        if integers != (spec.get("dtype") == "int"):
            self.x = self.x.abs().mul(2).long() % VOCABULARY
        if spec.get("dtype") == "double":
            self.x = self.x.double()
        poison = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38}.get(spec.get("poison", ""))
        if poison is not None and self.x.is_floating_point():
            self.x[size // 2] = poison

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self, records: Records) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return (self.records[index] for index in range(len(self.records)))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return len(self.records)


def collate_for(kind: str) -> Any:
    def collate(chosen: list[Any]) -> Any:
        x, y = default_collate(chosen)
        if kind == "dict":
            return {"x": x, "y": y, "number": 3}
        if kind == "strings":
            return [x, y, ["a"] * len(y)]
        if kind == "dataclass":
            return Pair(x, y)
        return (x.numpy(), y) if kind == "numpy" else (x, y)

    return collate


def make_loader(spec: dict[str, Any], module: dict[str, Any]) -> Any:
    """The train loader (or two) that a case describes."""
    records = Records(spec, needs_integers(module))
    size = spec.get("batch_size", 4)
    options: dict[str, Any] = {"collate_fn": collate_for(spec.get("batch", "tuple"))}
    if size is None:
        options["collate_fn"] = None
    order = spec.get("order", "plain")
    if order == "own batches":
        sampler = BatchSampler(SequentialSampler(records), size or 4, spec.get("drop_last", False))
        return DataLoader(records, batch_sampler=_Own(sampler), **options)
    options |= {"batch_size": size, "drop_last": spec.get("drop_last", False) and size is not None}
    if order == "two":
        return [DataLoader(records, **options) for _ in range(2)]
    if order.startswith("iterable"):
        return DataLoader((StreamWithLength if "length" in order else Stream)(records), **options)
    if order == "replacement":
        options["sampler"] = RandomSampler(records, replacement=True)
    elif order == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0] * len(records), len(records))
    elif order == "subset":
        options["sampler"] = SubsetRandomSampler(range(len(records)))
    elif order == "shuffle":
        options["shuffle"] = True
    return DataLoader(records, **options)


class _Own(BatchSampler):
    def __init__(self, batches: BatchSampler) -> None:
        self.batches, self.batch_size, self.drop_last, self.sampler = batches, 4, False, batches.sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
