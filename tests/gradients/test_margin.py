"""The margin of C that is kept for rounding: real sums, with an example left out, move by less than C under every
engine, clipping and precision; and what the sum's own rounding takes is a small part of the room it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.floating_point import summation_error
from lightning_lap2.callback.checks import UnsupportedSettingError, check_range
from lightning_lap2.gradients import ParameterLayout, StepCall, make_clipper
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.mechanism import GRID_SHIFT, MARGIN, Mechanism

B, C = 96, 0.05
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
PRECISIONS = ["fp32", "fp64", "bf16-mixed", "bf16-true"]
KINDS = [
    *((engine, norm, "flat") for engine, norm in (("vmap", "l2"), ("vmap", "l1"), ("loop", "l2"), ("ghost", "l2"))),
    ("vmap", "l2", "automatic"),
    ("vmap", "l2", "per_layer"),
    ("ghost", "l2", "per_layer"),
    ("ghost", "l2", "adaptive"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def data(alike: bool) -> tuple[Tensor, Tensor]:
    """Examples at random; or all much alike, so that their gradients point one way and the sum is B times as long."""
    generator = torch.Generator().manual_seed(3)
    x, one = torch.randn(B, 1, 10, 10, generator=generator), torch.randn(1, 1, 10, 10, generator=generator)
    y = torch.randint(0, 5, (B,), generator=generator)
    return (0.05 * x + one, torch.zeros_like(y)) if alike else (x, y)


def sums(engine: str, clipping: Any, norm: str, precision: str, alike: bool) -> tuple[Any, ParameterLayout, Mechanism]:
    """``which records -> their clipped sum`` in fp64, and what it is made by."""
    dtype = {"fp64": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    module, (x, y) = Net().to(dtype), data(alike)
    context: Callable[[], Any] = nullcontext
    if precision == "bf16-mixed":
        context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    layout = ParameterLayout(module)
    plain = Mechanism(
        name="laplace_l1" if norm == "l1" else "laplace",
        max_grad_norm=C,
        noise_multiplier=1.0,
        layer_sizes=layout.layer_sizes if clipping == "per_layer" else (),
    )
    mechanism = plain.for_sum(dimension=layout.numel, examples=B, unit=UNIT[layout.dtype])
    clipper, made = make_clipper(clipping, mechanism, layout), make_engine(engine, module)

    def total_of(which: list[int]) -> Tensor:
        total = layout.zeros(clipping == "adaptive")
        call = StepCall(((x[which].to(dtype), y[which]), 0), len(which), context)
        made.accumulate(call, layout, clipper, total)
        return total.double()

    return total_of, layout, mechanism


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("engine", "norm", "clipping"), KINDS)
def test_leaving_one_out_moves_a_real_sum_by_less_than_c(
    engine: str, norm: str, clipping: str, precision: str, alike: bool
) -> None:
    total_of, layout, mechanism = sums(engine, clipping, norm, precision, alike)
    order = 1 if norm == "l1" else 2
    room = mechanism.margin - MARGIN / 2  # the rest is the noise's
    whole, largest = total_of(list(range(B))), 0.0
    for left in (0, B // 2, B - 1):
        moved = whole - total_of([i for i in range(B) if i != left])
        assert moved[layout.numel :].abs().max() <= 0.5 if clipping == "adaptive" else moved.numel() == layout.numel
        views = layout.views(moved)
        layers = layout.layers if clipping == "per_layer" else (0,) * len(views)
        share = mechanism.layer_share
        for layer in range(1 + max(layers)):
            part = torch.cat([view.flatten() for view, own in zip(views, layers, strict=True) if own == layer])
            length = float(torch.linalg.vector_norm(part, order)) / (C * share)
            assert length <= 1 - mechanism.margin + room / 3, "three times as much is kept"
            largest = max(largest, length)
    assert largest > 0.97, "C is so small that every gradient is clipped"


@pytest.mark.parametrize("along", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_a_sum_is_within_a_third_of_its_room(along: float, dtype: torch.dtype) -> None:
    """Gradients of any direction, and with more and more in common; both terms of the margin are needed."""
    plain = Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=1.0)
    for examples in (100, 4096):
        room = plain.for_sum(dimension=500, examples=examples, unit=UNIT[dtype]).margin - MARGIN / 2
        error = summation_error(examples, 500, along, dtype)
        assert 0 < error < room / 3
        assert error < 1.3 * examples * UNIT[dtype] + 1e-15


def test_the_margin_is_what_the_formula_says() -> None:
    plain = Mechanism(name="laplace", max_grad_norm=2.0, noise_multiplier=1.5)
    assert plain.margin == MARGIN and plain.clip_norm == 2.0 * (1 - 2**-10)
    usual = plain.for_sum(dimension=26_010, examples=256, unit=2.0**-24)
    assert usual.margin == pytest.approx(2**-10 + 256 * 2**-22)
    large = plain.for_sum(dimension=10**9, examples=256, unit=2.0**-53)
    assert large.margin == pytest.approx(2**-10), "n = 1e9 fits into the least margin"
    noisy = Mechanism(name="laplace", max_grad_norm=2.0, noise_multiplier=200.0, layer_sizes=(10**9 - 9, 9))
    shift = GRID_SHIFT * 200 * math.sqrt(2) * math.sqrt(10**9)
    assert noisy.for_sum(dimension=10**9, examples=2, unit=0.0).margin == pytest.approx(2**-11 + shift)
    l1 = Mechanism(name="laplace_l1", max_grad_norm=2.0, noise_multiplier=1.0)
    assert l1.for_sum(dimension=10**8, examples=2, unit=0.0).margin == pytest.approx(2**-11 + 10**8 * GRID_SHIFT)


def test_without_noise_nothing_is_kept() -> None:
    assert Mechanism(name="laplace", max_grad_norm=2.0, noise_multiplier=0.0).clip_norm == 2.0


def test_noise_and_shift_of_a_count_stay_within_what_is_charged() -> None:
    """Its factor f: the noise on it is no less than asked for, and one example moves it, with GRID_SHIFT added, by no
    more than 1 / (2 b_c) scales."""
    for count in (0.3, 4.0, 2.0**20):
        made = Mechanism(name="laplace", max_grad_norm=0.7, noise_multiplier=1.3, count_noise_scale=count)
        assert made.scale / made.count_factor >= count
        assert made.count_factor / 2 / made.scale + GRID_SHIFT <= 1 / (2 * count)
    with pytest.raises(ValueError, match=r"count_noise_scale=10000000000\.0 is more than"):
        Mechanism(name="laplace", max_grad_norm=0.7, noise_multiplier=1.3, count_noise_scale=1e10)


@pytest.mark.parametrize(
    ("changes", "dimension", "examples", "message"),
    [
        ({"noise_multiplier": 1e-9}, 10, 8, "noise_multiplier=1e-09 is too little"),
        ({"name": "laplace_l1"}, 10**10, 8, "rounding could take .* mechanism='laplace_l1'"),
        ({}, 10, 10**7, "batches of 10000000 examples in torch.float32"),
    ],
)
def test_what_rounding_would_eat_is_refused(
    changes: dict[str, Any], dimension: int, examples: int, message: str
) -> None:
    given: dict[str, Any] = {"name": "laplace", "max_grad_norm": 1.0, "noise_multiplier": 1.0, **changes}
    made = Mechanism(**given).for_sum(dimension=dimension, examples=examples, unit=2.0**-24)
    with pytest.raises(UnsupportedSettingError, match=message):
        check_range(made, torch.float32, 60_000, examples)


def test_remedies_of_the_refusals_are_accepted() -> None:
    for changes, dtype, examples in (
        ({"noise_multiplier": 1e-3}, torch.float32, 8),
        ({"name": "laplace"}, torch.float32, 8),
        ({}, torch.float64, 10**7),
    ):
        given: dict[str, Any] = {"name": "laplace", "max_grad_norm": 1.0, "noise_multiplier": 1.0, **changes}
        made = Mechanism(**given).for_sum(dimension=10**10, examples=examples, unit=UNIT[dtype])
        check_range(made, dtype, 60_000, examples)
