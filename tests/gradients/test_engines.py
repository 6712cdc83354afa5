"""Clipping, sums and precision of the vmap and loop engines."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lap2.gradients import Engine, StepCall
from lightning_lap2.gradients.clipped_sum import add_clipped_sum, round_down, row_norms
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.vmap import VmapEngine, choose_chunk, memory_budget

ENGINES = [LoopEngine, VmapEngine]


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(3)), torch.arange(count) % 3


def clipped(engine: Engine, data: Any, count: int, clipper: FlatClipper, **options: Any) -> Tensor:
    layout = ParameterLayout(engine.module)
    total = layout.zeros()
    engine.accumulate(StepCall((data, 0), count, **options), layout, clipper, total)
    return total


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("kind", ENGINES)
def test_each_example_is_clipped_by_its_whole_norm(kind: type[Engine], norm: Any) -> None:
    module, data = Net(), batch(7)
    want = torch.zeros(ParameterLayout(module).numel, dtype=torch.float64)
    for i in range(7):
        loss = module.training_step((data[0][i : i + 1], data[1][i : i + 1]), 0)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]).double()
        size = gradient.abs().sum() if norm == "l1" else gradient.norm()
        want += gradient * min(1.0, 0.7 / float(size))
    got = clipped(kind(module, chunk_size=3), data, 7, FlatClipper(0.7, norm))
    assert torch.allclose(got.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_poisoned_record_adds_nothing(kind: type[Engine], value: float) -> None:
    module, (x, y) = Net(), batch(6)
    # the last layer sees it, whatever tanh does
    module.net[1] = nn.Identity()
    without = clipped(kind(module), (x[1:], y[1:]), 5, FlatClipper(1.0))
    x[0] = value
    poisoned = clipped(kind(module, chunk_size=4), (x, y), 6, FlatClipper(1.0))
    assert torch.isfinite(poisoned).all()
    assert torch.allclose(poisoned, without, atol=1e-6)


@pytest.mark.parametrize("kind", ENGINES)
def test_bfloat16_gradients_are_clipped_and_summed_in_fp32(kind: type[Engine]) -> None:
    module = Net().to(torch.bfloat16)
    x, y = batch(3)
    total = clipped(kind(module), (x.bfloat16(), y), 3, FlatClipper(1e-3))
    assert total.dtype == torch.float32
    one = clipped(kind(module), (x[:1].bfloat16(), y[:1]), 1, FlatClipper(1e-3))
    assert abs(float(one.double().norm()) / 1e-3 - 1) < 1e-6


@pytest.mark.parametrize("kind", ENGINES)
def test_autocast_reaches_the_step_and_not_the_sum(kind: type[Engine]) -> None:
    seen: list[torch.dtype] = []

    class Watch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(self.net(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    module = Watch()
    total = clipped(kind(module), batch(1), 1, FlatClipper(1e-3), context=autocast)
    assert set(seen) == {torch.bfloat16}
    assert abs(float(total.double().norm()) / 1e-3 - 1) < 1e-6


@pytest.mark.parametrize("kind", ENGINES)
def test_double_precision_stays(kind: type[Engine]) -> None:
    module, (x, y) = Net().double(), batch(5)
    total = clipped(kind(module), (x.double(), y), 5, FlatClipper(math.inf))
    loss = 5 * module.training_step((x.double(), y), 0)
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    assert total.dtype == torch.float64
    assert torch.allclose(total, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_sum_is_added_to_what_is_there_and_the_loss_is_the_mean(kind: type[Engine]) -> None:
    module, data = Net(), batch(5)
    layout = ParameterLayout(module)
    once, twice = layout.zeros(), layout.zeros()
    engine = kind(module)
    call = StepCall((data, 0), 5)
    loss = engine.accumulate(call, layout, FlatClipper(1.0), once)
    for _ in range(2):
        engine.accumulate(call, layout, FlatClipper(1.0), twice)
    assert torch.allclose(twice, 2 * once, atol=1e-6)
    assert torch.allclose(loss, module.training_step(data, 0))
    assert not loss.requires_grad


@pytest.mark.parametrize("kind", ENGINES)
def test_frozen_parameters_are_not_part_of_it(kind: type[Engine]) -> None:
    module, data = Net(), batch(4)
    module.net[0].requires_grad_(False)
    weights = [p.clone() for p in module.net[0].parameters()]
    total = clipped(kind(module), data, 4, FlatClipper(1.0))
    assert total.numel() == 6 * 3 + 3
    assert all(torch.equal(p, w) for p, w in zip(module.net[0].parameters(), weights, strict=True))
    module.net[0].requires_grad_(True)
    assert clipped(kind(module), data, 4, FlatClipper(1.0)).numel() == 4 * 6 + 6 + 6 * 3 + 3


def test_scenario_17_norms_of_long_vectors_are_exact() -> None:
    """3e7 entries: a plain fp32 norm would be 4e-4 too small, and the clipped gradient as much too long."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(1, 30_000_000, generator=generator)
    exact = float(torch.linalg.vector_norm(g, dtype=torch.float64))
    assert abs(float(row_norms(g, "l2")) / exact - 1) < 1e-7
    assert abs(float(row_norms(g, "l1")) / float(g.abs().sum(dtype=torch.float64)) - 1) < 1e-7
    module = nn.Linear(3000, 10_000, bias=False)
    layout = ParameterLayout(module)
    total = layout.zeros()
    add_clipped_sum([g.view(1, 10_000, 3000)], layout, FlatClipper(1.0), total)
    assert float(torch.linalg.vector_norm(total, dtype=torch.float64)) <= 1 + 1e-6


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 5000])
def test_norms_of_every_length(size: int) -> None:
    g = torch.randn(3, size)
    # one fp32 block of 512: a few units of 6e-8, far below the 1e-6 that clipping allows
    assert torch.allclose(row_norms(g, "l2"), g.double().norm(dim=1), rtol=3e-7, atol=0)
    assert torch.allclose(row_norms(g, "l1"), g.double().abs().sum(dim=1), rtol=1e-6, atol=0)


def test_weights_are_never_rounded_up() -> None:
    weights = torch.rand(10_000, dtype=torch.float64) * 10.0 ** torch.randint(-44, 0, (10_000,))
    rounded = round_down(weights, torch.float32)
    assert bool((rounded.double() <= weights).all())
    assert bool((rounded.double() > weights * (1 - 2**-22) - 2e-45).all())


def test_a_tf32_setting_of_the_user_does_not_reach_the_sum() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        total = clipped(VmapEngine(Net(64)), batch(1), 1, FlatClipper(1e-3))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert float(total.double().norm()) <= 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("count", "numel", "largest", "budget", "chunk"),
    [
        (256, 26_010, 16_384, 2**30, 256),  # a small CNN: the whole batch
        (1, 10**9, 10**9, 2**30, 1),  # never less than one
        (100, 10**6, 10**4, 8 * 10**6 * 40, 34),  # 40 fit: three chunks of nearly equal size
        (256, 1_863_690, 1024 * 1024, 2**30, 7),  # a wide MLP on a CPU: blocks that the allocator keeps
        (256, 1_863_690, 0, 2**30, 64),  # and on a GPU
        (32, 22_000_000, 12_000_000, 2**30, 6),  # too wide for that: as many as fit
        (5, 0, 0, 2**30, 5),
    ],
)
def test_the_chunk_size_follows_from_memory(count: int, numel: int, largest: int, budget: int, chunk: int) -> None:
    assert choose_chunk(count, numel, largest, budget) == chunk
    assert memory_budget(torch.device("cpu")) > 0
