"""Trainings small enough to be audited in a test."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2.audit import Training


class Net(L.LightningModule):
    """10 -> 30 -> 10 without bias: two tensors of 300 scalars."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(10, 30, bias=False), nn.Tanh(), nn.Linear(30, 10, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Pair(L.LightningModule):
    """Two layers of one scalar each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def classes(records: int = 500) -> TensorDataset:
    data = torch.Generator().manual_seed(0)
    x = torch.randn(records, 10, generator=data)
    return TensorDataset(x, x.argmax(dim=1))


class Classes(L.LightningDataModule):
    def __init__(self, records: int = 500, batch_size: int = 500) -> None:
        super().__init__()
        self.records, self.batch_size = records, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(classes(self.records), batch_size=self.batch_size, shuffle=True)


def training(*, records: int = 500, batch: int = 500, steps: int = 1, trainer: Any = None, **privacy: Any) -> Training:
    return Training(
        model=Net,
        loader=DataLoader(classes(records), batch_size=batch, shuffle=True),
        privacy={"eps": float("inf"), "delta": 1e-6, **privacy},
        trainer={"max_steps": steps, "accelerator": "cpu", "devices": 1, **(trainer or {})},
    )


def pair(*, steps: int = 1, records: int = 4, batch: int = 4, **privacy: Any) -> Training:
    data = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, records, 1, generator=data)
    return Training(
        model=Pair,
        loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        privacy={"eps": float("inf"), "delta": 0.2, **privacy},
        trainer={"max_steps": steps, "accelerator": "cpu", "devices": 1},
    )
