"""Nothing the engine learnt in one step may be taken for granted in the next: each step here differs from those before.

The engine walks the graph of every loss anew and keeps between steps only where each use's batch dimension was and the
list of objects on the module; these are the tests that a leftover would fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
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
    """Ignored labels in one step only: the shares of the mean are unequal there and equal elsewhere."""
    torch.manual_seed(0)
    module = Changing()
    engine = GhostEngine(module)
    for ignored in (0, 3, 0, 5, 1):
        y = torch.randint(0, 4, (B, 4))
        y.view(-1)[torch.randperm(4 * B)[:ignored]] = -100
        y[:, 0] = y[:, 0].clamp_min(0)  # a label for every example
        assert_equals_loop(module, (torch.randn(B, 4, 6), y), engine=engine)


class Writing(nn.Module):
    """Does ``act`` on itself inside the step number ``when``, and nothing before."""

    def __init__(self, act: Callable[[Writing, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.act, self.calls = nn.Linear(6, 4), act, 0
        self.running, self.number, self.word = torch.zeros(()), 0.5, "idle"
        self.empty: dict[str, Any] = {}
        self.list, self.nested = [1.0, 2.0], {"a": [torch.ones(2), {"b": 3.0}]}
        self.register_buffer("mean", torch.zeros(4))
        self.absent: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        self.calls += 1
        self.word = "busy" if self.calls % 2 else "idle"
        loss = F.cross_entropy(self.layer(batch[0]), batch[1])
        if self.calls == 4:
            self.act(self, loss.detach())
        return loss


def _swap(module: Writing, loss: Tensor) -> None:
    module.list.reverse()


def _new_attributes(module: Writing, loss: Tensor) -> None:
    # the same dictionary's contents in a new dictionary, with one value changed
    module.__dict__ = {**module.__dict__, "running": loss}


WRITES: dict[str, tuple[Callable[[Writing, Tensor], None], str]] = {
    "attribute": (lambda m, loss: setattr(m, "running", loss), r"self\.running"),
    "in place": (lambda m, loss: m.running.add_(loss), r"self\.running"),
    "buffer": (lambda m, loss: m.mean.fill_(loss), r"self\.mean"),
    "buffer replaced": (lambda m, loss: setattr(m, "mean", loss.expand(4)), r"self\.mean"),
    "number": (lambda m, loss: setattr(m, "number", float(loss)), r"self\.number"),
    "weight": (lambda m, loss: m.layer.weight.data.add_(loss), "none"),
    "weight in place": (lambda m, loss: m.layer.bias.detach().add_(loss), r"self\.layer\.bias"),
    "empty dictionary": (lambda m, loss: m.empty.update(x=loss), r"self\.empty\['x'\]"),
    "hooks": (lambda m, loss: m.layer._forward_hooks.update({7: float(loss)}), r"self\.layer\._forward_hooks\[7\]"),
    "list entry": (lambda m, loss: m.list.__setitem__(1, float(loss)), r"self\.list\[1\]"),
    "list appended": (lambda m, loss: m.list.append(float(loss)), r"self\.list\[2\]"),
    "list reordered": (_swap, r"self\.list\[0\]"),
    "nested tensor": (lambda m, loss: m.nested["a"][0].mul_(loss), r"self\.nested\['a'\]\[0\]"),
    "nested number": (lambda m, loss: m.nested["a"][1].update(b=float(loss)), r"self\.nested\['a'\]\[1\]\['b'\]"),
    "renamed key": (lambda m, loss: m.nested.update(c=m.nested.pop("a")), r"self\.nested\['c'\]\[0\]"),
    "counter to number": (lambda m, loss: setattr(m, "calls", float(loss)), "none"),
    "attributes replaced": (_new_attributes, r"self\.running"),
    "submodule's attribute": (lambda m, loss: setattr(m.layer, "in_features", loss), "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_a_later_step_writes_is_refused_then(name: str) -> None:
    """Three steps without a write, so that the engine knows the module well; then one with."""
    act, words = WRITES[name]
    torch.manual_seed(0)
    module = Writing(act)
    engine, layout = GhostEngine(module), ParameterLayout(module)
    call = StepCall(((torch.randn(B, 6), torch.randint(0, 4, (B,))), 0), B)

    def step() -> None:
        engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())

    for _ in range(3):
        step()
        known = engine._kept
    assert engine._kept is known, "flags and counters must not make it walk again"
    if words == "none":
        # where no value was before a first one may be kept (a mask made on first use), but not replaced:
        # `.data` is outside autograd's counting
        step()
        return
    with pytest.raises(UnsupportedModelError, match=rf"training_step writes {words}, "):
        step()


def test_a_value_first_kept_late_is_held_to_it() -> None:
    """What was not there before may be made once (a mask); from then on it must stay."""
    torch.manual_seed(0)
    module = Writing(lambda m, loss: setattr(m, "absent", loss))
    engine, layout = GhostEngine(module), ParameterLayout(module)
    call = StepCall(((torch.randn(B, 6), torch.randint(0, 4, (B,))), 0), B)
    for _ in range(5):
        engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())
    module.calls = 3
    with pytest.raises(UnsupportedModelError, match=r"training_step writes self\.absent, "):
        engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())


def test_what_is_written_between_steps_is_no_concern() -> None:
    torch.manual_seed(0)
    module = Writing(lambda m, loss: None)
    engine, layout = GhostEngine(module), ParameterLayout(module)
    call = StepCall(((torch.randn(B, 6), torch.randint(0, 4, (B,))), 0), B)
    for step in range(6):
        module.running, module.number = torch.full((), float(step)), float(step)
        module.mean.add_(1)
        module.empty[str(step)] = step * 0.1
        if step == 3:
            module.layer = nn.Linear(6, 4)
            layout = ParameterLayout(module)
        engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())
