"""The five workloads: small models of the kinds that are trained privately, and one batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MeanLoss(nn.Module):
    """Cross entropy, averaged over positions and (``reduction="mean"``) over examples."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "mean":
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="none")
        return each.view(len(target), -1).mean(1)


class Step(nn.Module):
    """What a user's LightningModule does: ``training_step(batch, batch_idx)`` returns the mean loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.criterion = MeanLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.criterion(self.net(x), y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Causal transformer; positions by ``nn.Embedding``, which every peer knows."""

    def __init__(self, vocabulary: int = 5000, width: int = 256, depth: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, 4, causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(positions))))


class VisionTransformer(nn.Module):
    """The shape of timm's vit_tiny on 64 pixels with patches of 8; class token and positions are raw parameters."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ResidualBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, cout), nn.GroupNorm(8, cout)
        same = stride == 1 and cin == cout
        self.skip = nn.Identity() if same else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet20(classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for block in range(3):
            layers.append(ResidualBlock(width, stage, 2 if block == 0 and stage > 16 else 1))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def tutorial_cnn() -> nn.Module:
    """The MNIST network of the TensorFlow Privacy tutorial, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


@dataclass(frozen=True)
class Workload:
    """A model and a batch.

    Attributes:
        net: builds the network.
        batch: builds ``(x, y)``.
        size: examples in it.
    """

    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    size: int

    def build(self) -> tuple[Step, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        return Step(self.net()), self.batch()


def _images(count: int, channels: int, side: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(count, channels, side, side), torch.randint(0, 10, (count,)))


def _text(count: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, vocabulary, (count, length)), torch.randint(0, vocabulary, (count, length)))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("cnn", tutorial_cnn, _images(256, 1, 28), 256),
        Workload("mlp", mlp, _images(256, 1, 28), 256),
        Workload("lm", LanguageModel, _text(16, 64, 5000), 16),
        Workload("vit", VisionTransformer, _images(32, 3, 64), 32),
        Workload("resnet", resnet20, _images(64, 3, 32), 64),
    )
}
