"""Every clipper under every engine: by brute force, no example moves the sum by more than C, nor the count by more
than 1/2; and against formulas written out here for one example at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lap2.gradients import ParameterLayout, StepCall, make_clipper
from lightning_lap2.gradients.clipping import FlatClipper, PerLayerClipper, centred_count
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.mechanism import MARGIN, Mechanism

C = 0.7
CLIPPED = C * (1 - MARGIN)
LAYERS = {"first": ["first.weight", "first.bias"], "second": ["second.weight", "second.bias"], "third": ["third.bias"]}
CLIPPINGS = ["flat", "automatic", "per_layer", "adaptive"]
KINDS = [("vmap", "l2"), ("vmap", "l1"), ("loop", "l2"), ("loop", "l1"), ("ghost", "l2")]


class Tied(nn.Module):
    """A weight that two layers share; each record's loss is multiplied by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.third.weight = self.second.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, weight = batch
        hidden = self.first(x)
        logits = self.second(hidden) + self.third(hidden.tanh())
        return (weight * F.cross_entropy(logits, y, reduction="none")).mean()


def records() -> tuple[Tensor, Tensor, Tensor]:
    """Small and large gradients, one of zero, one with NaN, one with infinity, one whose squares overflow."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    weight = torch.tensor([1.0, 1e3, 1e-3, 0.1, 0.0, 1.0, 1.0, 1.0])
    x[5, 0], x[6, 1], x[7, 2] = math.nan, math.inf, 1e38
    return x, torch.arange(8) % 3, weight


def mechanism_of(clipping: str, norm: str, layout: ParameterLayout) -> Mechanism:
    name: Any = "laplace_l1" if norm == "l1" else "laplace"
    sizes = layout.layer_sizes if clipping == "per_layer" else ()
    return Mechanism(name=name, max_grad_norm=C, noise_multiplier=1.0, layer_sizes=sizes)


def released(engine: str, clipping: Any, norm: str, batch: Any, layout: ParameterLayout, module: nn.Module) -> Tensor:
    """The un-noised sum, with the count behind it under adaptive clipping, in fp64."""
    total = layout.zeros(clipping == "adaptive")
    clipper = make_clipper(clipping, mechanism_of(clipping, norm, layout), layout)
    make_engine(engine, module).accumulate(StepCall((batch, 0), len(batch[0])), layout, clipper, total)
    assert torch.isfinite(total).all()
    return total.double()


@pytest.mark.parametrize(("engine", "norm"), KINDS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_no_example_moves_the_sum_by_more_than_c(clipping: str, engine: str, norm: str) -> None:
    module, batch = Tied(), records()
    layout, order = ParameterLayout(module), 1 if norm == "l1" else 2
    whole = released(engine, clipping, norm, batch, layout, module)
    share = {"l1": 1 / 3, "l2": 1 / math.sqrt(3)}[norm] if clipping == "per_layer" else 1.0
    moves = []
    for i in range(8):
        others = [k for k in range(8) if k != i]
        x, y, weight = (t.clone() for t in batch)
        x[i], weight[i] = 0.0, 0.0
        for neighbour in (tuple(t[others] for t in batch), (x, y, weight)):  # removed, zeroed
            move = whole - released(engine, clipping, norm, neighbour, layout, module)
            gradient, count = move[: layout.numel], move[layout.numel :]
            assert torch.linalg.vector_norm(gradient, order) <= C
            views = dict(zip(layout.names, layout.views(move), strict=True))
            for names in LAYERS.values():
                layer = torch.cat([views[name].flatten() for name in names])
                assert torch.linalg.vector_norm(layer, order) <= C * share
            assert count.abs().max() <= 0.5 if clipping == "adaptive" else count.numel() == 0
            moves.append(float(torch.linalg.vector_norm(gradient, order)))
            if 4 <= i < (7 if norm == "l1" else 8):
                assert moves[-1] < 1e-6 and not count.any(), "a zero or non-finite gradient adds nothing"
    assert max(moves) > 0.99 * C


@pytest.mark.parametrize(("engine", "norm"), KINDS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_engine_gives_the_sum_of_the_formula(clipping: str, engine: str, norm: str) -> None:
    module, batch = Tied(), records()
    layout, order = ParameterLayout(module), 1 if norm == "l1" else 2
    want, count = torch.zeros(layout.numel, dtype=torch.float64), 0.0
    for i in range(4):
        loss = module.training_step(tuple(t[i : i + 1] for t in batch), 0)
        gradients = dict(zip(layout.names, torch.autograd.grad(loss, layout.parameters), strict=True))

        def size(names: list[str], found: dict[str, Tensor] = gradients) -> float:
            return float(torch.linalg.vector_norm(torch.cat([found[n].flatten().double() for n in names]), order))

        if clipping == "per_layer":
            bound = CLIPPED / 3 if norm == "l1" else CLIPPED / math.sqrt(3)
            weights = {n: min(1.0, bound / size(names)) for names in LAYERS.values() for n in names}
        else:
            whole = size(layout.names)
            one = CLIPPED / (whole + 0.01) if clipping == "automatic" else min(1.0, CLIPPED / whole)
            weights = dict.fromkeys(layout.names, one)
            count += 0.5 if whole <= CLIPPED else -0.5
        want += torch.cat([weights[n] * gradients[n].flatten().double() for n in layout.names])
    got = released(engine, clipping, norm, tuple(t[:7] for t in batch), layout, module)
    torch.testing.assert_close(got[: layout.numel], want, rtol=1e-5, atol=2e-6)
    if clipping == "adaptive":
        assert got[layout.numel] == count


def test_layers_are_the_owning_modules_and_a_tied_weight_counts_once() -> None:
    layout = ParameterLayout(Tied())
    assert layout.names == [name for names in LAYERS.values() for name in names]
    assert layout.layers == (0, 0, 1, 1, 2)
    assert layout.layer_sizes == (25, 18, 3)
    module = Tied()
    module.second.requires_grad_(False)
    assert ParameterLayout(module).layer_sizes == (25, 3)


def test_per_layer_weights_survive_extreme_norms() -> None:
    norms = torch.tensor(
        [[1e200, 0.0, 3.0, math.nan, 1e-320], [1e200, 0.0, 4.0, 1.0, 0.0], [1.0, 0.0, math.inf, 1.0, 1e-3]],
        dtype=torch.float64,
    )
    weights = PerLayerClipper(0.5, (0, 0, 1)).weights(norms)
    assert weights[0, 0] * norms[0, 0] * math.sqrt(2) == pytest.approx(0.5, rel=1e-12)
    assert weights[2, 0] == 0.5
    assert weights[:, 1].tolist() == [1.0, 1.0, 1.0]
    assert not weights[:, 2:4].any()
    assert weights[:, 4].tolist() == [1.0, 1.0, 1.0]


def test_the_count_is_centred_and_leaves_out_what_carries_no_information() -> None:
    totals = torch.tensor([0.5, 1.0, 1.5, 0.0, math.nan, math.inf], dtype=torch.float64)
    assert float(centred_count(totals, 1.0)) == 0.5
    assert [float(centred_count(totals[i : i + 1], 1.0)) for i in range(6)] == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0]


def test_a_clipper_without_one_threshold_does_not_count() -> None:
    module = Tied()
    layout = ParameterLayout(module)
    clipper = PerLayerClipper(1.0, layout.layers)
    with pytest.raises(TypeError, match="PerLayerClipper counts no examples"):
        make_engine("vmap", module).accumulate(StepCall((records(), 0), 8), layout, clipper, layout.zeros(1))


def test_layers_of_another_module_are_refused() -> None:
    layout = ParameterLayout(Tied())
    with pytest.raises(ValueError, match=r"layers \(46,\) for gradients of \(25, 18, 3\)"):
        make_clipper(
            "per_layer",
            Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=1.0, layer_sizes=(46,)),
            layout,
        )
    assert isinstance(make_clipper("flat", mechanism_of("flat", "l2", layout), layout), FlatClipper)
