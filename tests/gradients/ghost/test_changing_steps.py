"""Nothing the engine learnt in one step may be taken for granted in the next: each step here differs from those before.

The engine walks the graph of every loss anew and keeps between steps only which parameters to spread, by identity;
these are the tests that a leftover would fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lightning_lap2.gradients.ghost import GhostEngine
from tests.gradients.ghost.oracle import assert_equals_loop

B = 6


class Changing(nn.Module):
    """Another graph at every step; ``step`` is set from outside, as a callback would from public quantities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.other = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(6, 8)
        self.head, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(8))
        self.step = 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, y = batch
        h = torch.tanh(self.other(x) if self.step % 3 == 2 else self.first(x))
        if self.step % 2:  # a layer used twice
            h = torch.relu(self.middle(torch.relu(self.middle(h))))
        if self.step in (2, 5):
            h = h * self.scale
        if self.step == 4:  # tied
            h = h + x @ self.first.weight.t()
        out = self.head(h)
        return F.cross_entropy(out.reshape(-1, 4), y.reshape(-1))


def test_the_graph_changes_at_every_step() -> None:
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    for step in range(12):
        module.step = step
        assert_equals_loop(module, (torch.randn(B, 6), torch.randint(0, 4, (B,))), engine=engine)


def test_batch_sizes_and_lengths_change_at_every_step() -> None:
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    for step, shape in enumerate([(6,), (3,), (2, 5), (9, 2), (1,), (4, 7), (2,), (7, 3), (5, 2, 3)]):
        module.step = step
        assert_equals_loop(module, (torch.randn(*shape, 6), torch.randint(0, 4, shape)), engine=engine)


def test_parameters_frozen_and_unfrozen_on_the_way() -> None:
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    batch = (torch.randn(B, 6), torch.randint(0, 4, (B,)))
    for step, frozen in enumerate(
        [[], [module.first.weight], [module.middle.bias, module.head.weight], [], [module.scale]]
    ):
        module.step = step
        for parameter in module.parameters():
            parameter.requires_grad_(not any(parameter is f for f in frozen))
        assert_equals_loop(module, batch, engine=engine)


def test_a_parameter_replaced_by_another_object_of_its_shape() -> None:
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    batch = (torch.randn(B, 6), torch.randint(0, 4, (B,)))
    for _ in range(3):
        module.first.weight = nn.Parameter(torch.randn(8, 6))
        module.head = nn.Linear(8, 4)
        assert_equals_loop(module, batch, engine=engine)


def test_the_kind_of_loss_changes() -> None:
    """Ignored labels in one step only: every example's loss is its own mean, whatever the others ignore."""
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    for ignored in (0, 3, 0, 5, 1):
        y = torch.randint(0, 4, (B, 4))
        y.view(-1)[torch.randperm(4 * B)[:ignored]] = -100
        y[:, 0] = y[:, 0].clamp_min(0)  # a label for every example
        assert_equals_loop(module, (torch.randn(B, 4, 6), y), engine=engine)


class Spreading(nn.Module):
    """Which of its parameters have to be spread changes: a bilinear form of one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.ModuleList([nn.Bilinear(6, 6, 4) for _ in range(3)])
        self.layer, self.step = nn.Linear(6, 4), 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, y = batch
        if self.step == 3:  # what was spread before meets a rule again
            return F.cross_entropy(x @ self.forms[0].weight[0][:, :4] + self.layer(x), y)
        return F.cross_entropy(self.forms[self.step % 3](x, x) + self.layer(x), y)


def test_parameters_that_join_leave_and_are_replaced_while_others_are_spread() -> None:
    torch.manual_seed(0)
    module = Spreading()
    engine = GhostEngine(module)
    batch = (torch.randn(B, 6), torch.randint(0, 4, (B,)))
    for step in range(8):
        module.step = step % 4
        module.layer.requires_grad_(step % 3 > 0)  # what comes behind it in the layout changes places
        module.forms[1].weight.requires_grad_(step != 1)
        if step == 5:
            module.forms[2] = nn.Bilinear(6, 6, 4)
        assert_equals_loop(module, batch, engine=engine)


def test_a_pruned_layer_gives_its_parameter_another_name() -> None:
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    batch = (torch.randn(B, 6), torch.randint(0, 4, (B,)))
    assert_equals_loop(module, batch, engine=engine)
    prune.l1_unstructured(module.first, "weight", amount=0.5)
    engine.runner.memory = None  # by public means: a fit follows what hooks compute, an engine by itself does not
    assert_equals_loop(module, batch, engine=engine)
    prune.remove(module.first, "weight")
    assert_equals_loop(module, batch, engine=engine)
