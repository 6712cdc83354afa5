"""Every covered layer: sums and norms equal those of plain autograd, one example at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gradients.ghost.oracle import Step, assert_equals_loop

B = 5


def labels(*shape: int, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, shape)


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


class MeanOver(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim)


def vector_models() -> dict[str, nn.Module]:
    return {
        "mlp": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
        "no bias": nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)),
        "prelu": nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4), nn.PReLU(4)),
        "layer norm": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)),
        "rms norm": nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.ReLU(), nn.Linear(8, 4)),
        "no affine": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 4)),
        "ln without bias": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 4)),
        "batch norm in eval": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)),
        "weight norm": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4)),
    }


@pytest.mark.parametrize("name", vector_models())
@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (B,)], ids=str)
def test_vectors_and_sequences(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = vector_models()[name]
    if name in {"batch norm in eval", "prelu"} and shape:
        pytest.skip("its channel is dimension 1")
    assert_equals_loop(Step(net), (torch.randn(B, *shape, 6), labels(B, *shape)))


def image_models() -> dict[str, nn.Module]:
    head = lambda c: (Pool(), nn.Linear(c, 4))  # noqa: E731
    return {
        "strided": nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 8, 2), *head(8)),
        "padded": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *head(4)),
        "same": nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), *head(4)),
        "circular": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), *head(4)),
        "dilated": nn.Sequential(nn.Conv2d(3, 4, 3, dilation=(2, 1), bias=False), nn.ReLU(), *head(4)),
        "grouped": nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), *head(6)),
        "depthwise": nn.Sequential(nn.Conv2d(3, 9, 3, groups=3, stride=2), nn.ReLU(), *head(9)),
        "large weight": nn.Sequential(nn.Conv2d(3, 64, 8), nn.ReLU(), *head(64)),
        "transposed": nn.Sequential(
            nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.ReLU(),
            nn.ConvTranspose2d(4, 6, 2, groups=2), *head(6),
        ),
        "group norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), *head(4)),
        "instance norm": nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), *head(4)
        ),
        "batch norm in eval": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), *head(4)),
        "prelu": nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), *head(4)),
        "channels last": nn.Sequential(nn.Conv2d(3, 4, 3), *head(4)).to(memory_format=torch.channels_last),
    }  # fmt: skip


@pytest.mark.parametrize("name", image_models())
def test_images(name: str) -> None:
    torch.manual_seed(0)
    assert_equals_loop(Step(image_models()[name]), (torch.randn(B, 3, 9, 9), labels(B)))


def test_convolutions_in_one_and_three_dimensions() -> None:
    torch.manual_seed(0)
    line = nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, dilation=2), nn.ReLU(), Pool(), nn.Linear(4, 4))
    assert_equals_loop(Step(line), (torch.randn(B, 3, 12), labels(B)))
    cube = nn.Sequential(nn.Conv3d(2, 4, 2, padding=1, groups=2), nn.ReLU(), Pool(), nn.Linear(4, 4))
    assert_equals_loop(Step(cube), (torch.randn(B, 2, 5, 4, 4), labels(B)))


class Block(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(cin, cout, 3, 2, 1, bias=False), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.n, self.m = nn.GroupNorm(2, cout), nn.GroupNorm(2, cout)
        self.skip = nn.Conv2d(cin, cout, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.m(self.b(F.relu(self.n(self.a(x))))))


def test_resnet_block() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Block(4, 6), Block(6, 8), Pool(), nn.Linear(8, 4))
    assert_equals_loop(Step(net), (torch.randn(B, 3, 12, 12), labels(B)))


class Language(nn.Module):
    """Token and position embeddings in several styles, a layer, a head that may be tied."""

    def __init__(self, positions: str, tied: bool, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)
        self.positions = positions
        self.table = nn.Parameter(torch.randn(1, length + 3, 6)) if positions == "raw" else nn.Embedding(20, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.tokens(ids)
        if self.positions == "raw":
            x = x + self.table[:, :n]
        elif self.positions == "expanded":
            x = x + self.table(torch.arange(n).expand(len(ids), n))
        else:
            x = x + self.table(torch.arange(n)[None] if self.positions == "row" else torch.arange(n))
        return self.head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("positions", ["raw", "expanded", "row", "arange"])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings(positions: str, tied: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (B, 7))
    assert_equals_loop(Step(Language(positions, tied, 7)), (ids, labels(B, 7, classes=11)))


def test_long_sequences_by_either_route() -> None:
    """Gram matrices for short sequences and large weights, direct products for long ones."""
    torch.manual_seed(0)
    for width, length in [(200, 8), (8, 300)]:
        net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))
        assert_equals_loop(Step(net), (torch.randn(B, length, 6), labels(B, length)))


class Attention(nn.Module):
    def __init__(self, batch_first: bool, cross: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, dropout=0.0)
        self.batch_first, self.cross = batch_first, cross
        self.memory = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        memory = self.memory(x) if self.cross else x
        x = self.attention(x, memory, memory, need_weights=self.cross)[0]
        return self.head(x if self.batch_first else x.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_multihead_attention(batch_first: bool, cross: bool) -> None:
    torch.manual_seed(0)
    assert_equals_loop(Step(Attention(batch_first, cross)), (torch.randn(B, 7, 8), labels(B, 7)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(nn.Linear(6, 8), encoder, nn.Linear(8, 4))
    assert_equals_loop(Step(net), (torch.randn(B, 7, 6), labels(B, 7)))


class Vision(nn.Module):
    """Patch convolution, class token, position tokens, layer scale; all raw parameters."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 10, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.mixing = nn.Parameter(torch.randn(8, 8))
        self.style = style
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        n = len(x)
        cls = self.cls.repeat(n, 1, 1) if self.style == "repeat" else self.cls.expand(n, -1, -1)
        x = torch.cat([cls, x], 1) + self.position
        x = x + self.scale * torch.tanh(torch.einsum("bld,dk->blk", x, self.mixing))
        x = x + torch.tanh(x @ self.mixing)
        return self.head(x[:, 0]) * self.temperature.exp()


@pytest.mark.parametrize("style", ["repeat", "expand"])
def test_raw_parameters(style: str) -> None:
    torch.manual_seed(0)
    assert_equals_loop(Step(Vision(style)), (torch.randn(B, 3, 12, 12), labels(B)))


class Twice(nn.Module):
    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, head
        self.path = nn.Sequential(layer, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.path(torch.tanh(self.layer(x))))


@pytest.mark.parametrize(
    ("layer", "head", "shape"),
    [
        (nn.Linear(6, 6), nn.Linear(6, 4), (6,)),
        (nn.Linear(6, 6), nn.Linear(6, 4), (3, 6)),
        (nn.Conv2d(3, 3, 3), nn.Sequential(Pool(), nn.Linear(3, 4)), (3, 8, 8)),
        (nn.LayerNorm(6), nn.Linear(6, 4), (3, 6)),
    ],
)
def test_a_module_used_twice_and_at_two_paths(layer: nn.Module, head: nn.Module, shape: tuple[int, ...]) -> None:
    """Norms are of the sum of both uses, cross terms included."""
    torch.manual_seed(0)
    y = labels(B, 3) if len(shape) == 2 else labels(B)
    assert_equals_loop(Step(Twice(layer, head)), (torch.randn(B, *shape), y))


def test_frozen_and_unused_parameters() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    net[3].weight.requires_grad_(False)
    module = Step(net)
    module.unused = nn.Linear(3, 3)
    before = [p.requires_grad for p in module.parameters()]
    total = assert_equals_loop(module, (torch.randn(B, 6), labels(B)))
    assert (total[-12:] == 0).all()
    assert [p.requires_grad for p in module.parameters()] == before


class LoRA(nn.Module):
    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(8, 2))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters(merged: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LoRA(merged), nn.Tanh(), nn.Linear(8, 4))
    assert_equals_loop(Step(net), (torch.randn(B, 3, 6), labels(B, 3)))
