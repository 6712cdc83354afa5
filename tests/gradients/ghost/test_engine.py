"""What surrounds the layers: poisoned records, precision, empty draws, refusals, the module left alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from tests.gradients.ghost.oracle import Recording, Step, assert_equals_loop, per_example
from tests.zoo.compare import Weights

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

    class Silent(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return None

    output, total = run(module, (x[:1], y[:1]), count=0)
    assert output is not None
    assert not total.any()
    output, total = run(Silent(module.net), (x[:2], y[:2]), count=2)
    assert output is None
    assert not total.any()


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


def test_autocast_inside_the_step() -> None:
    """Casts lie between parameters and their uses; the sum is of exactly the gradients whose norms were taken."""
    torch.manual_seed(0)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.norm = nn.Conv1d(4, 16, 1), nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head, self.cls = nn.Linear(16, 3), nn.Parameter(torch.randn(1, 1, 16))

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            x, y = batch
            with torch.autocast("cpu", torch.bfloat16):
                x = self.patch(x).transpose(1, 2)
                x = self.norm(torch.cat([self.cls.expand(len(x), -1, -1).to(x.dtype), x], 1))
                x = x + self.attention(x, x, x, need_weights=False)[0]
                return F.cross_entropy(self.head(x[:, 0]), y)

    module, batch = Cast(), (torch.randn(B, 4, 5), torch.randint(0, 3, (B,)))
    layout = ParameterLayout(module)
    reference = per_example(module, layout, batch)
    for index in range(B):
        total, clipper = layout.zeros(), Weights(torch.eye(B)[index])
        GhostEngine(module).accumulate(StepCall((batch, 0), B), layout, clipper, total)
        assert (total - reference[index]).norm() / reference[index].norm() < 0.03
        norm = clipper.seen[:, index].norm()
        torch.testing.assert_close(total.double().norm(), norm, rtol=1e-6, atol=0)


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
    """Equal records with unlike masks: each one's sum has the norm that it was said to have."""
    torch.manual_seed(0)
    module = Step(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 3)))
    module.train()
    batch = (torch.randn(1, 8).expand(B, 8), torch.zeros(B, dtype=torch.long))
    layout = ParameterLayout(module)
    seen = []
    for index in range(B):
        total, clipper = layout.zeros(), Weights(torch.eye(B)[index])
        GhostEngine(module).accumulate(StepCall((batch, 0), B, key=b"the same"), layout, clipper, total)
        norms = clipper.seen.norm(dim=0)
        torch.testing.assert_close(total.double().norm(), norms[index], rtol=1e-6, atol=0)
        seen.append(norms)
    assert all(torch.equal(norms, seen[0]) for norms in seen)
    assert len(seen[0].unique()) == B


def test_a_second_forward_pass_draws_what_the_first_one_drew() -> None:
    """A parameter has to be spread: the step runs once more, and nothing of the first pass is left."""
    torch.manual_seed(0)

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.form, self.calls, self.drawn = nn.Bilinear(6, 6, 3), 0, []

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            self.calls += 1
            self.drawn = [*self.drawn, random.random(), float(np.random.rand())]  # noqa: NPY002
            x, y = batch
            return F.cross_entropy(self.form(F.dropout(x, 0.5), x), y)

    module = Drawing()
    engine, batch = GhostEngine(module), (torch.randn(B, 6), torch.randint(0, 3, (B,)))
    layout, totals, drawn = ParameterLayout(module), [], []
    before = random.getstate(), torch.get_rng_state()
    for _ in range(2):  # the first call runs twice, the second knows
        totals.append(layout.zeros())
        call = StepCall((batch, 0), B, key=b"the same")
        engine.accumulate(call, layout, FlatClipper(1.0), totals[-1])
        drawn.append(module.drawn)
        module.drawn = []
    assert module.calls == 2
    assert drawn[0] == drawn[1]
    assert torch.equal(*totals)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


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
    """No size decides anything."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = Step(nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 4)))
    engine = GhostEngine(module)
    for length in (B, 7, B, 2 * B):
        batch = (torch.randn(B, length, 6), torch.randint(0, 4, (B, length)))
        assert_equals_loop(module, batch, engine=engine)


@pytest.mark.parametrize("chunk", [1, 2, 4, B, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    module, batch = small()
    expected = assert_equals_loop(module, batch)
    clipper = Weights(torch.linspace(0.5, 1.5, B))
    layout = ParameterLayout(module)
    whole, parts = layout.zeros(), layout.zeros()
    GhostEngine(module).accumulate(StepCall((batch, 0), B), layout, Weights(clipper.given), whole)
    output = GhostEngine(module, chunk_size=chunk).accumulate(StepCall((batch, 0), B), layout, clipper, parts)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output, module.training_step(batch).detach())
    assert clipper.seen.shape == (len(layout.parameters), B)
    assert expected.shape == whole.shape


def test_a_later_chunk_that_is_refused_adds_nothing() -> None:
    class Second(Step):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            Second.calls += 1
            if Second.calls == 2:
                float(batch[0].sum())
            return super().training_step(batch)

    torch.manual_seed(0)
    module = Second(nn.Linear(6, 3))
    with pytest.raises(UnsupportedModelError, match="reads the value"):
        run(module, (torch.randn(B, 6), torch.randint(0, 3, (B,))), engine=GhostEngine(module, chunk_size=3))
    Second.calls = 0
    layout = ParameterLayout(module)
    total = layout.zeros()
    with pytest.raises(UnsupportedModelError):
        GhostEngine(module, chunk_size=3).accumulate(
            StepCall(((torch.randn(B, 6), torch.randint(0, 3, (B,))), 0), B), layout, FlatClipper(1.0), total
        )
    assert not total.any()


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


class Similar(Step):
    """Compares the rows of its batch with each other: here those of one example."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        z = self.net(batch[0])
        return (z @ z.t()).sum() / len(z)


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
        return super().training_step(batch) + self.bank[0].sum()


class LastLoss(Step):
    """Keeps a number computed from the data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.last = 1.0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        self.last = float(loss.detach())
        return loss


class FunctionalMaxNorm(MaxNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x.argmax(1) % 5, self.tokens.weight, max_norm=0.1)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Step(Folded()), (8, 6)),
        (Penalised(nn.Sequential(nn.Linear(6, 3))), (6,)),
        (Step(Checkpointed(False)), (6,)),
        (Step(Unknown()), (6,)),
        (Similar(nn.Linear(6, 3)), (6,)),
    ],
    ids=["folded", "penalty", "checkpoint", "bilinear", "among themselves"],
)
def test_what_a_batch_gradient_could_not_tell_apart(module: nn.Module, x: tuple[int, ...]) -> None:
    """Each example has its own loss, so windows in the batch, penalties and products of the batch's rows are as good as
    anything else; checkpoints keep their activations."""
    torch.manual_seed(0)
    assert_equals_loop(module, (torch.randn(B, *x), torch.randint(0, 3, (B,))))


def test_reentrant_checkpoints_are_as_good_as_others() -> None:
    torch.manual_seed(0)
    net = Checkpointed(reentrant=False)
    batch = (torch.randn(B, 6), torch.randint(0, 3, (B,)))
    _, expected = run(Step(net), batch)
    net.reentrant = True
    assert torch.equal(run(Step(net), batch)[1], expected)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Step(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))), r"BatchNorm1d 'net\.1'.*nn.GroupNorm"),
        (RunningLoss(nn.Linear(6, 3)), r"training_step reads self\.running"),
        (Bank(nn.Linear(6, 3)), r"training_step reads self\.bank\[0\]"),
        (LastLoss(nn.Linear(6, 3)), r"test_engine\.py:\d+ .*reads the value of a tensor.*engine='auto'"),
        (Step(FunctionalMaxNorm(None)), r"FunctionalMaxNorm.*embedding_renorm_.*"),
        (Step(MaxNorm()), r"Embedding 'net\.tokens'.*max_norm"),
    ],
    ids=["batch norm", "running", "bank", "last loss", "functional", "max_norm"],
)
def test_refusals_name_the_line_and_the_way_out(module: nn.Module, words: str) -> None:
    engine, batch = GhostEngine(module), (torch.randn(B, 6), torch.randint(0, 3, (B,)))
    layout = ParameterLayout(module)
    call = StepCall((batch, 0), B)
    with pytest.raises(UnsupportedModelError, match=words):  # noqa: PT012
        for _ in range(2):  # what a step left is refused to the next
            engine.accumulate(call, layout, FlatClipper(1.0), layout.zeros())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


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


def test_a_loss_without_parameters_adds_nothing() -> None:
    class Constant(Step):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return batch[0].mean()

    output, total = run(Constant(nn.Linear(2, 2)), (torch.randn(B, 2), torch.zeros(B)))
    assert output is not None
    assert not total.any()


def test_l1_norms_and_gradient_canaries_are_refused() -> None:
    module, batch = small()
    layout = ParameterLayout(module)
    clipper = FlatClipper(1.0, norm="l1")
    with pytest.raises(UnsupportedModelError, match=r"computes l2 norms.*vmap"):
        GhostEngine(module).accumulate(StepCall((batch, 0), B), layout, clipper, layout.zeros())
    call = StepCall((batch, 0), B, revise=lambda places, gradients: gradients)
    with pytest.raises(UnsupportedModelError, match=r"gradient canary.*vmap"):
        GhostEngine(module).accumulate(call, layout, FlatClipper(1.0), layout.zeros())
