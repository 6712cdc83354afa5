"""Loss heads: ``head(prediction, target) -> loss``, means over examples as users write them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def classification(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def regression(prediction: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(prediction.squeeze(-1), y)


def multi_label(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, y)


def language_model(logits: Tensor, y: Tensor) -> Tensor:
    """Next-token loss; positions with label -100 are ignored."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100)


class Task(nn.Module):
    """Stands for a LightningModule: ``training_step`` on a batch ``(inputs..., target)``."""

    def __init__(self, net: nn.Module, head: Any) -> None:
        super().__init__()
        self.net = net
        self.head = head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, y = batch
        return self.head(self.net(*inputs), y)


class HubTask(nn.Module):
    """The same for Hugging Face models, which compute their loss themselves."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss
