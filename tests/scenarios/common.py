"""Small modules, data and a Trainer for the scenarios."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy


class Classifier(L.LightningModule):
    """8 features, 3 classes, one hidden layer."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(n: int = 64, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def loader(n: int = 64, batch_size: int = 8, **kwargs: Any) -> DataLoader:
    return DataLoader(data(n), batch_size=batch_size, shuffle=True, **kwargs)


def trainer(callback: L.Callback | list[L.Callback], **kwargs: Any) -> L.Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks = callback if isinstance(callback, list) else [callback]
    return L.Trainer(**{**quiet, **kwargs}, callbacks=callbacks)


def no_privacy(**kwargs: Any) -> Lap2Privacy:
    """Neither noise nor clipping: plain training, through the private path."""
    return Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=float("inf"), **kwargs)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
