"""Gradient norms of public data: those of a plain autograd loop, and nothing left behind."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lap2
from lightning_lap2.accounting import optimize_clip_and_scale
from lightning_lap2.gradients import UnsupportedModelError
from lightning_lap2.gradients.norms import gradient_norms, suggest_max_grad_norm


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True)
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        return loss


def data(count: int = 11, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 5) * 2, torch.arange(count) % 3), batch_size=batch_size)


def by_loop(module: Any, loader: DataLoader[Any], order: float = 2) -> list[float]:
    """Plain autograd, one record at a time, in fp64."""
    found = []
    for x, y in loader.dataset:
        loss = F.cross_entropy(module.net(x[None]), y[None])
        gradients = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
        found.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]).double(), ord=order)))
    return found


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_norms_are_those_of_plain_autograd(engine: str) -> None:
    module, loader = Model(), data()
    norms = gradient_norms(module, loader, data_is_public=True, engine=engine)
    assert norms.dtype == torch.float64
    assert norms.tolist() == pytest.approx(by_loop(module, loader), rel=1e-5)


def test_l1_norms_and_frozen_parameters() -> None:
    module, loader = Model(), data()
    module.net[0].requires_grad_(False)
    norms = gradient_norms(module, loader, data_is_public=True, norm="l1", chunk_size=3)
    assert norms.tolist() == pytest.approx(by_loop(module, loader, order=1), rel=1e-5)


def test_nothing_is_left_behind() -> None:
    module, loader = Model(), data()
    module.net[0].weight.grad = torch.ones(7, 5)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    gradient_norms(module, loader, data_is_public=True)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(module.net[0].weight.grad, torch.ones(7, 5))
    assert module.net[2].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numbers).all()  # noqa: NPY002
    assert module.accuracy.update_count == 0
    assert "log" not in vars(module)


def test_modes_and_dropout_are_as_they_are() -> None:
    module = Model()
    module.net[1] = nn.Dropout(0.5)
    x = torch.randn(1, 5).expand(40, 5).contiguous()
    loader = DataLoader(TensorDataset(x, torch.zeros(40, dtype=torch.long)), batch_size=40)
    assert gradient_norms(module, loader, data_is_public=True).unique().numel() > 5
    module.net[1].eval()
    assert gradient_norms(module, loader, data_is_public=True).std() < 1e-6
    assert module.training and not module.net[1].training


def test_batches_go_through_the_modules_hooks() -> None:
    class Doubling(Model):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return 2 * batch[0], batch[1]

    module, loader = Doubling(), data()
    doubled = DataLoader(TensorDataset(2 * loader.dataset.tensors[0], loader.dataset.tensors[1]), batch_size=4)
    norms = gradient_norms(module, loader, data_is_public=True)
    assert norms.tolist() == pytest.approx(by_loop(module, doubled), rel=1e-5)


def test_at_most_so_many_examples() -> None:
    module, loader = Model(), data()
    norms = gradient_norms(module, loader, data_is_public=True, max_examples=6)
    assert norms.tolist() == pytest.approx(by_loop(module, loader)[:6], rel=1e-5)


class Plain(nn.Module):
    """No LightningModule, and a step without ``batch_idx``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Tensor) -> Tensor | None:
        return None if batch.shape[0] == 1 and bool(batch[0, 0] == 7.0) else (batch @ self.weight).mean()


def test_infinite_gradients_and_examples_without_a_loss_keep_their_place() -> None:
    batch = torch.tensor([[3.0, 4.0], [7.0, 0.0], [math.inf, 1.0], [0.0, 2.0], [math.nan, 0.0]])
    norms = gradient_norms(Plain(), [batch], data_is_public=True, engine="loop")
    assert norms.tolist() == [5.0, 0.0, math.inf, 2.0, math.inf]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data_is_public": False}, ValueError, "data_is_public must be True: norms of private"),
        ({"data_is_public": "yes"}, TypeError, "data_is_public must be True or False"),
        ({"engine": "hooks"}, ValueError, "engine must be one of"),
        ({"norm": "linf"}, ValueError, "norm must be one of 'l1', 'l2'"),
        ({"max_examples": 0}, ValueError, "max_examples must be at least 1"),
        ({"engine": "ghost", "norm": "l1"}, UnsupportedModelError, 'Use engine="vmap"'),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gradient_norms(Model(), data(), **{"data_is_public": True, **options})


def test_public_must_be_said() -> None:
    with pytest.raises(TypeError, match="data_is_public"):
        gradient_norms(Model(), data())  # type: ignore[call-arg]


def test_no_examples_or_parameters() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        gradient_norms(Model(), [], data_is_public=True)
    with pytest.raises(ValueError, match="trainable parameters"):
        gradient_norms(Model().requires_grad_(False), data(), data_is_public=True)


def test_percentiles_are_numpys() -> None:
    norms = torch.cat([torch.rand(100, dtype=torch.float64) + 0.1, torch.tensor([torch.inf])])
    finite = norms[:-1].numpy()
    assert suggest_max_grad_norm(norms) == pytest.approx(np.median(finite))
    grid = suggest_max_grad_norm(norms, [10, 90.0])
    assert grid == pytest.approx(np.percentile(finite, [10, 90]))
    assert suggest_max_grad_norm([3.0, 1.0], 0) == 1.0
    rows = optimize_clip_and_scale(eps=1.0, delta=1e-5, sample_rate=0.01, steps=50, dimension=10, max_grad_norms=grid)
    assert [row.max_grad_norm for row in rows] == grid
    assert rows[0].snr == rows[1].snr


@pytest.mark.parametrize(
    ("norms", "percentile", "error", "words"),
    [
        ([1.0], 101, ValueError, r"percentile must lie in \[0, 100\], got 101"),
        ([1.0], "50", TypeError, "percentile must be a number"),
        ([], 50, ValueError, "at least one finite norm"),
        ([math.inf], 50, ValueError, "at least one finite norm"),
        ([-1.0, 2.0], 50, ValueError, "must not be negative or nan"),
        ([0.0, 0.0, 1.0], 50, ValueError, "percentile=50 of the norms is 0"),
    ],
)
def test_percentiles_that_give_no_clipping_norm(
    norms: list[float], percentile: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        suggest_max_grad_norm(norms, percentile)


def test_both_are_at_the_top() -> None:
    assert lightning_lap2.gradient_norms is gradient_norms
    assert lightning_lap2.suggest_max_grad_norm is suggest_max_grad_norm
