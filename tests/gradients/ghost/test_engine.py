"""What surrounds the layers: poisoned records, precision, empty draws, refusals, the module left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from tests.gradients.ghost.oracle import Recording, Step, assert_equals_loop, per_example

B = 6


def run(module: nn.Module, batch: Any, count: int = B, bound: float = 1.0, engine: Any = None) -> tuple[Any, Tensor]:
    layout = ParameterLayout(module)
    total = layout.zeros()
    engine = engine or GhostEngine(module)
    return engine.accumulate(StepCall((batch, 0), count), layout, FlatClipper(bound), total), total


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(2), nn.Linear(9, 6))
    head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
    return Step(nn.Sequential(net, head)), (torch.randn(B, 2, 5, 5), torch.randint(0, 3, (B, 4)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_poisoned_record_adds_nothing(value: float, normalised: bool) -> None:
    if normalised and value == 1e38:
        pytest.skip("normalisation makes its gradient finite")
    module, (x, y) = small()
    if not normalised:
        module.net[0][1], module.net[1][0] = nn.Identity(), nn.Identity()
    clean, poisoned = x[1:], x.clone()
    poisoned[0, :, :2] = value
    _, expected = run(module, (clean, y[1:]), B - 1, bound=0.3)
    _, found = run(module, (poisoned, y), bound=0.3)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_poisoned_token_model() -> None:
    """Gram norms, embeddings and a tied head with one example whose activations overflow."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(9, 40)
            self.layer = nn.Linear(40, 40)

        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            ids, scale = x
            return F.linear(torch.tanh(self.layer(self.tokens(ids))) * scale[:, None, None], self.tokens.weight)

    ids, y, scale = torch.randint(0, 9, (B, 3)), torch.randint(0, 9, (B, 3)), torch.ones(B)
    module = Step(Net())
    _, expected = run(module, ((ids[1:], scale[1:]), y[1:]), B - 1)
    scale[0] = float("nan")
    _, found = run(module, ((ids, scale), y))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_output_is_that_of_the_step_detached() -> None:
    module, batch = small()

    class Dict(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            loss = super().training_step(batch)
            return {"loss": loss, "twice": [2 * loss], "name": "a"}

    expected = module.training_step(batch)
    output, _ = run(module, batch)
    assert torch.equal(output, expected.detach())
    assert not output.requires_grad
    output, _ = run(Dict(module.net), batch)
    assert not output["loss"].requires_grad
    assert not output["twice"][0].requires_grad
    assert output["name"] == "a"


def test_empty_draw_and_none_add_nothing() -> None:
    module, (x, y) = small()
    calls = []

    class Counting(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            calls.append(len(batch[0]))
            return None if len(batch[0]) == 2 else super().training_step(batch)

    counting = Counting(module.net)
    output, total = run(counting, (x[:1], y[:1]), count=0)
    assert output is not None
    assert not total.any()
    output, total = run(counting, (x[:2], y[:2]), count=2)
    assert output is None
    assert not total.any()
    assert calls == [1, 2]


def test_one_example() -> None:
    module, (x, y) = small()
    reference = per_example(module, ParameterLayout(module), (x[:1], y[:1]))[0]
    _, total = run(module, (x[:1], y[:1]), count=1, bound=0.1)
    torch.testing.assert_close(total.double(), reference * 0.1 / reference.norm(), rtol=1e-5, atol=1e-7)


def test_bf16_autocast_keeps_norms_and_sums_in_fp32() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    module = Step(net)
    batch = (torch.randn(B, 8), torch.randint(0, 3, (B,)))
    layout = ParameterLayout(module)
    total, clipper = layout.zeros(), Recording(0.5)
    call = StepCall((batch, 0), B, context=lambda: torch.autocast("cpu", torch.bfloat16))
    GhostEngine(module).accumulate(call, layout, clipper, total)
    reference = per_example(module, layout, batch)
    expected = ((0.5 / reference.norm(dim=1)).clamp_max(1)[:, None] * reference).sum(0)
    assert (total - expected).norm() / expected.norm() < 0.03
    # the sum is of exactly the gradients whose norms were taken: one example alone, clipped, has norm C
    for i in range(B):
        only = layout.zeros()
        weights = torch.zeros(B, dtype=torch.float64)

        class One:
            norm = "l2"

            def weights(self, norms: Tensor) -> Tensor:
                weights[i] = 1 / norms[:, i].norm()  # noqa: B023
                return weights.expand_as(norms)  # noqa: B023

        GhostEngine(module).accumulate(call, layout, One(), only)
        assert abs(only.double().norm() - 1) < 1e-6


def test_norms_of_cancelling_positions() -> None:
    """Positions whose contributions all but cancel: fp32 Gram matrices alone would lose the norm."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False)

    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            x, sign = batch
            return (self.net(x) * sign).sum((1, 2)).mean()

    x = torch.randn(B, 1, 64).repeat(1, 4, 1)
    x = x + 1e-3 * torch.randn_like(x)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * torch.randn(B, 1, 64)
    assert_equals_loop(Cancelling(), (x, sign), rel=1e-4)


def test_dropout_is_drawn_once_for_norms_and_sum() -> None:
    torch.manual_seed(0)
    module = Step(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 3)))
    module.train()
    x, y = torch.randn(1, 8).expand(B, 8), torch.zeros(B, dtype=torch.long)
    layout, total, clipper = ParameterLayout(module), ParameterLayout(module).zeros(), Recording(1e9)
    torch.manual_seed(3)
    GhostEngine(module).accumulate(StepCall(((x, y), 0), B), layout, clipper, total)
    torch.manual_seed(3)
    grads = torch.autograd.grad(module.training_step((x, y)), layout.parameters)
    torch.testing.assert_close(total, B * layout.flatten(grads), rtol=1e-5, atol=1e-6)
    assert len(clipper.norms.sum(0).unique()) > 1  # equal records, unlike masks


def test_module_is_left_as_it_was() -> None:
    module, batch = small()
    module.net[0][0].weight.grad = mark = torch.ones_like(module.net[0][0].weight)
    before = {name: id(p) for name, p in module.named_parameters()}
    run(module, batch)
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert module.net[0][0].weight.grad is mark
    assert bool((mark == 1).all())
    assert all(p.requires_grad for p in module.parameters())
    assert not any(child._forward_hooks or child._backward_hooks for child in module.modules())


def test_sequence_length_equal_to_the_batch_size() -> None:
    """Sizes decide where they can; what they decided before holds where they cannot."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = Step(nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 4)))
    engine = GhostEngine(module)
    for length in (7, B):
        batch = (torch.randn(B, length, 6), torch.randint(0, 4, (B, length)))
        assert_equals_loop(module, batch, engine=engine)


def test_a_first_sight_that_sizes_cannot_decide_is_refused() -> None:
    torch.manual_seed(0)

    class Growing(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            x, y = batch
            return F.cross_entropy(self.net[1 if len(x) == 4 else 0](x).flatten(0, 1), y.flatten())

    module = Growing(nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]))
    engine = GhostEngine(module)
    run(module, (torch.randn(B, 4, 6), torch.randint(0, 3, (B, 4))), engine=engine)
    with pytest.raises(UnsupportedModelError, match=r"net\.1\.bias.* all have the size of the batch \(4\)"):
        run(module, (torch.randn(4, 4, 6), torch.randint(0, 3, (4, 4))), 4, engine=engine)


class Folded(nn.Module):
    """Windows folded into the batch, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 6)).view(len(x), -1, 3).mean(1)


class Penalised(Step):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return super().training_step(batch) + 0.1 * self.net[0].weight.square().sum()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x)


class MaxNorm(nn.Module):
    def __init__(self, max_norm: float | None = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3, max_norm=max_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x.argmax(1) % 5)


class RunningLoss(Step):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.running = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss / self.running


class Bank(Step):
    """Keeps earlier batches in a list: a memory bank."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.bank: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.bank.append(batch[0].detach())
        return super().training_step(batch)


class LastLoss(Step):
    """Keeps a number computed from the data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.last = 1.0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        self.last = float(loss.detach())
        return loss


class Counter(Step):
    """Counts its calls, and makes a mask on first use: neither holds data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.calls += 1
        if not hasattr(self, "mask"):
            self.mask = torch.ones(batch[0].shape[1])
        return super().training_step((batch[0] * self.mask, batch[1]))


def test_counters_and_masks_made_on_first_use_have_their_plain_effect() -> None:
    module = Counter(nn.Linear(6, 3))
    run(module, (torch.randn(B, 6), torch.randint(0, 3, (B,))))
    calls = module.calls
    run(module, (torch.randn(B, 6), torch.randint(0, 3, (B,))))
    assert module.calls == 2 * calls


class FunctionalMaxNorm(MaxNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x.argmax(1) % 5, self.tokens.weight, max_norm=0.1)


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (Step(Folded()), (8, 6), r"'net\.layer\.weight'.*no dimension has the size of the batch"),
        (Penalised(nn.Sequential(nn.Linear(6, 3))), (6,), r"weight penalty.*weight decay"),
        (Step(Checkpointed(True)), (6,), r"use_reentrant=True.*engine=.loop"),
        (Step(Checkpointed(False)), (6,), r"activation checkpointing.*engine=.loop"),
        (Step(Unknown()), (6,), r"'net\.bilinear\.weight'.*engine=.vmap"),
        (Step(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))), (6,), r"BatchNorm1d 'net\.1'.*nn.GroupNorm"),
        (RunningLoss(nn.Linear(6, 3)), (6,), r"training_step writes self\.running.*past the clipping"),
        (Bank(nn.Linear(6, 3)), (6,), r"training_step writes self\.bank\[0\]"),
        (LastLoss(nn.Linear(6, 3)), (6,), r"training_step writes self\.last,"),
        (Step(FunctionalMaxNorm(None)), (6,), r"training_step writes self\.net\.tokens\.weight"),
        (Step(MaxNorm()), (6,), r"Embedding 'net\.tokens'.*max_norm"),
    ],
    ids=[
        "folded",
        "penalty",
        "reentrant",
        "checkpoint",
        "bilinear",
        "batch norm",
        "running",
        "bank",
        "last loss",
        "functional",
        "max_norm",
    ],
)
def test_refusals_name_the_parameter_and_the_way_out(module: nn.Module, x: tuple[int, ...], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        run(module, (torch.randn(B, *x), torch.randint(0, 3, (B,))))
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


def test_a_batch_dimension_that_moves_is_refused() -> None:
    torch.manual_seed(0)
    module = Step(nn.Sequential(nn.Linear(6, 3)))
    engine = GhostEngine(module)
    run(module, (torch.randn(B, 4, 6), torch.randint(0, 3, (B, 4))), engine=engine)
    with pytest.raises(UnsupportedModelError, match=r"first batches had it along \[0\]"):
        run(module, (torch.randn(8, 4, 6), torch.randint(0, 3, (8, 4))), 4, engine=engine)


def test_written_into_a_view_and_unrelated_losses() -> None:
    """``x[:, 0] = cls`` is seen; a loss of other parameters adds nothing."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls = nn.Parameter(torch.randn(6))
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[:, 0] = self.cls
            return self.layer(x)

    assert_equals_loop(Step(Written()), (torch.randn(B, 4, 6), torch.randint(0, 3, (B, 4))))
    other = torch.ones(B, requires_grad=True)

    class Other(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return other.mean()

    assert not run(Other(nn.Linear(2, 2)), (torch.randn(B, 2),))[1].any()


def test_a_loss_without_parameters_and_a_chunk_size_are_refused() -> None:
    class Constant(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return torch.ones(())

    with pytest.raises(UnsupportedModelError, match="computed from the parameters"):
        run(Constant(nn.Linear(2, 2)), (torch.randn(B, 2), torch.zeros(B)))
    with pytest.raises(ValueError, match="chunk_size=4"):
        GhostEngine(nn.Linear(2, 2), chunk_size=4)


def test_a_loss_that_mixes_examples_differs_from_the_loop() -> None:
    """Not visible in the graph: the self-check at fit start is what refuses it."""

    class Similar(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            z = self.net(batch[0])
            return (z @ z.t()).sum() / len(z)

    module = Similar(nn.Linear(6, 4))
    layout, x = ParameterLayout(module), torch.randn(B, 6)
    _, total = run(module, (x,), bound=1e9)
    expected = per_example(module, layout, (x,)).sum(0)
    assert (total - expected).norm() > 0.1 * expected.norm()
