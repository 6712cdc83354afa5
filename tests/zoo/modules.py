"""Small modules of the families that issue after issue is about: each one a way to go wrong."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(8, 8, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """A residual block with a normalisation of choice; grouped second convolution."""

    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False)
        self.norm1, self.norm2 = norm(width), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet(norm: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), norm(8), Residual(8, norm), Residual(8, norm),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(4, width)


class FrozenBatchNorm(nn.BatchNorm2d):
    """Stays in evaluation mode, as users freeze it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.running_mean.normal_()
        self.running_var.uniform_(0.5, 2)
        self.eval()

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


class TwoPaths(nn.Module):
    """One encoder, reachable as ``encoder`` and through ``model``, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.model = nn.Sequential(self.encoder, nn.Tanh(), self.encoder, nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.tanh(self.encoder(x)))


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share their weight; learned positions are a raw parameter."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, 16, width))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        return self.out(self.norm(x).cumsum(1))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = cell(5, 6, batch_first=True, **options)
        width = 6 * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


class Cells(nn.Module):
    """The recurrent cells, stepped by hand from states that no example went into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTMCell(5, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, second, third = None, None, x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.first(step, state)
            second = self.second(state[0], second)
            third = self.third(second, third)
        return self.out(third)


class Decoder(nn.Module):
    """An LSTM decoder whose first input is a learned token, the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 5), nn.LSTM(5, 5, proj_size=3, batch_first=True)
        self.token, self.out = nn.Parameter(torch.randn(1, 1, 5)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.token.expand(x.shape[0], 2, 5)
        h = torch.tanh(self.encoder(x))[None]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*projections is not supported with oneDNN")
            return self.out(self.decoder(start, (h[..., :3].contiguous(), h))[0][:, -1])


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form, self.out = nn.Bilinear(6, 6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.form(x, x.flip(1))))


class Windows(nn.Module):
    """Attention in windows that are folded into the batch, shifted, with a learned bias: Swin's layer."""

    def __init__(self, width: int = 8, side: int = 2) -> None:
        super().__init__()
        self.side, self.patch, self.norm = side, nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 5)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, 2))
        steps = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        offset = steps[:, :, None] - steps[:, None] + side - 1
        self.register_buffer("index", offset[0] * (2 * side - 1) + offset[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patch(x).permute(0, 2, 3, 1)).roll((-1, -1), (1, 2))
        n, rows, columns, width = x.shape
        s = self.side
        x = x.view(n, rows // s, s, columns // s, s, width).transpose(2, 3).reshape(-1, s * s, width)
        q, k, v = self.qkv(x).view(len(x), s * s, 3, 2, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index.flatten()].view(s * s, s * s, 2).permute(2, 0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(len(x), s * s, width)
        return self.out(y).view(n, -1, 5).mean(1)


class Standardised(nn.Module):
    """Convolutions whose weights are standardised, by ``F.batch_norm`` and by hand, as in NF-nets and BiT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        self.gain, self.out = nn.Parameter(torch.rand(6) + 0.5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        w = self.first.weight
        w = F.batch_norm(w.reshape(1, 6, -1), None, None, self.gain, training=True, momentum=0.0).reshape_as(w)
        x = F.relu(F.conv2d(x, w, self.first.bias))
        v = self.second.weight
        var, mean = torch.var_mean(v, dim=(1, 2, 3), keepdim=True)
        return self.out(F.relu(F.conv2d(x, (v - mean) / (var + 1e-5).sqrt(), self.second.bias)).mean((2, 3)))


class Packed(Recurrent):
    """Padded sequences, packed inside the step."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.cell(packed)
        return self.out(hidden[-1])


class Encoder(nn.Module):
    """TransformerEncoder with a padding mask and a class token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        padded = F.pad(padded, (1, 0), value=False)
        return self.out(self.encoder(x, src_key_padding_mask=padded)[:, 0])


class Attention(nn.Module):
    """MultiheadAttention with a causal and a padding mask, separate key and value widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padded: Tensor) -> Tensor:
        length = query.shape[1]
        causal = torch.ones(length, key.shape[1], dtype=torch.bool, device=query.device).triu(1)
        mixed, _ = self.attention(query, key, value, key_padding_mask=padded, attn_mask=causal)
        return self.out(mixed.mean(1))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 6, mode="mean")
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.bag(tokens))


class Convolutions(nn.Module):
    """Conv1d to 3d and their transposes, one after the other, with strides, dilation and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 4, 3, padding=2, dilation=2)
        self.one_up = nn.ConvTranspose1d(4, 4, 2, stride=2)
        self.two = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.two_up = nn.ConvTranspose2d(4, 2, 2)
        self.three = nn.Conv3d(2, 3, 3, padding="same")
        self.three_up = nn.ConvTranspose3d(3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one_up(F.relu(self.one(x)))
        x = self.two_up(F.relu(self.two(x.unflatten(2, (4, -1)))))
        x = self.three_up(F.relu(self.three(x.unsqueeze(2))))
        return x.flatten(1).mean(1, keepdim=True) + x.flatten(1)[:, :4]


def weight_norm() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 3)))


class Tabular(nn.Module):
    """Numbers and categories, with a one-hot column and a head that some rows' loss never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.category = nn.Embedding(7, 3)
        self.body = nn.Sequential(nn.Linear(5 + 3 + 4, 16), nn.SELU(), nn.LayerNorm(16), nn.Linear(16, 1))
        self.unused = nn.Linear(3, 2)

    def forward(self, numbers: Tensor, category: Tensor, kind: Tensor) -> Tensor:
        kinds = F.one_hot(kind, num_classes=4).to(numbers.dtype)
        return self.body(torch.cat([numbers, self.category(category), kinds], 1))


class Branching(nn.Module):
    """Control flow on data, and a value read out."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + abs(x.mean().item())
        if x.sum() > 0:
            return self.large(x) * scale
        return self.small(x) * scale


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)
