"""What ``suggest`` lists, and that each drop-in is one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.nn.utils import parametrizations, spectral_norm

import lightning_lap2
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.suggest import suggest
from lightning_lap2.gradients.vmap import VmapEngine

ALL = ("vmap", "ghost", "loop")


class Net(nn.Module):
    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = layer
        self.x = x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.layer(batch)
        return (self.scale * (out[0] if isinstance(out, tuple) else out)).square().mean()


def accumulate(engine: type, layer: nn.Module, x: Tensor) -> None:
    net = Net(layer, x)
    layout = ParameterLayout(net)
    engine(net).accumulate(StepCall((x, 0), len(x)), layout, FlatClipper(1.0), layout.zeros())


@pytest.mark.parametrize(
    ("layer", "replacement", "shape"),
    [
        (nn.BatchNorm2d(64), "nn.GroupNorm(32, 64)", (4, 64, 3, 3)),
        (nn.BatchNorm2d(64, track_running_stats=False).eval(), "nn.GroupNorm(32, 64)", (4, 64, 3, 3)),
        (nn.BatchNorm3d(12, affine=False), "nn.GroupNorm(4, 12, affine=False)", (4, 12, 2, 2, 2)),
        (nn.BatchNorm2d(3), "nn.GroupNorm(1, 3)", (4, 3, 2, 2)),
        (nn.SyncBatchNorm(16), "nn.GroupNorm(8, 16)", (4, 16, 2, 2)),
        (nn.BatchNorm1d(10), "nn.GroupNorm(1, 10)", (4, 10)),
        (nn.LazyBatchNorm2d(), "nn.GroupNorm(32, num_channels)", None),
        (nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
         "nn.InstanceNorm2d(6, affine=True), without track_running_stats", (4, 6, 3, 3)),
    ],
)  # fmt: skip
def test_normalisation(layer: nn.Module, replacement: str, shape: tuple[int, ...] | None) -> None:
    found = suggest(nn.Sequential(nn.Identity(), layer))
    assert (found[0].path, found[0].layer, found[0].refused_by) == ("1", type(layer).__name__, ALL)
    assert found[0].replacement == replacement
    if shape is not None:
        x = torch.randn(shape)
        with pytest.raises(UnsupportedModelError):
            accumulate(LoopEngine, layer, x)
        drop_in = eval(replacement.partition(", without")[0])
        assert suggest(drop_in) == []
        assert drop_in(x).shape == x.shape
        accumulate(VmapEngine, drop_in, x)


def test_frozen_batch_norm_and_plain_layers_are_left_alone() -> None:
    fine = nn.Sequential(
        nn.BatchNorm2d(4).eval(), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Embedding(3, 4),
        parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(), nn.MultiheadAttention(4, 2),
    )  # fmt: skip
    assert suggest(fine) == []
    assert str(suggest(fine)) == "no layer to change"


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings(kind: type[nn.Module]) -> None:
    bounded, sparse = suggest(kind(7, 3, max_norm=1.0)), suggest(kind(7, 3, sparse=True))
    assert bounded[0].refused_by == ALL
    assert sparse[0].refused_by == (("vmap",) if kind is nn.Embedding else ("vmap", "ghost"))
    assert suggest(kind(7, 3, scale_grad_by_freq=True))[0].refused_by == ()
    assert bounded[0].replacement == f"nn.{kind.__name__}(7, 3) without max_norm"
    x = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(UnsupportedModelError, match="sparse"):
        accumulate(VmapEngine, kind(7, 3, sparse=True), x)
    accumulate(LoopEngine, kind(7, 3, sparse=True), x)


@pytest.mark.parametrize("normalise", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm(normalise: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = normalise(nn.Linear(3, 3))  # type: ignore[operator]
    assert [s.refused_by for s in suggest(layer)] == [ALL]
    with pytest.raises(UnsupportedModelError):
        accumulate(LoopEngine, layer, torch.randn(2, 3))
    assert suggest(layer.eval()) == []


def test_lazy_layers_until_they_have_sizes() -> None:
    layer = nn.LazyLinear(4)
    assert "nn.Linear with sizes given" in suggest(layer)[0].replacement
    layer(torch.randn(2, 3))
    assert suggest(layer) == []


def test_checkpointing_observers_and_recurrent_layers() -> None:
    block = nn.Linear(2, 2)
    block.gradient_checkpointing = True
    assert suggest(block)[0].refused_by == ("vmap",)
    assert suggest(FakeQuantize())[0].refused_by == ALL
    remark = suggest(nn.GRU(2, 2))[0]
    assert remark.refused_by == ()
    assert suggest(nn.LSTM(2, 2))[0].refused_by == ()
    assert suggest(nn.EmbeddingBag(2, 2))[0].refused_by == ()
    assert "runs: engine='vmap' and 'ghost' run it without its fused kernel" in str(remark)


def test_a_readable_list_that_changes_nothing() -> None:
    shared = nn.BatchNorm2d(8)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Embedding(3, 2, sparse=True)})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = lightning_lap2.suggest(model)
    assert str(found).split("\n") == [
        "a: BatchNorm2d refused by every engine: its output for one example depends on the whole batch, and its "
        "running statistics are not noised. Use nn.GroupNorm(4, 8)",
        "c: Embedding refused by engine='vmap': sparse gradients cannot be traced. Use "
        "nn.Embedding(3, 2) without sparse",
    ]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model["a"] is shared
    assert str(suggest(nn.BatchNorm1d(4))).startswith("(the model): BatchNorm1d")
