"""A module and public data for ``lightning-lap2 norms``, named by their import path."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def records(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.arange(count) % 2)


class Model(L.LightningModule):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=bias)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])


class Normalised(Model):
    """Refused: its examples mix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


class WithData(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(records(5, seed=1), batch_size=5)


class PublicData(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(records(9, seed=1), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(records(7, seed=2), batch_size=4)
