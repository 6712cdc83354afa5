"""What is patched during the trace is undone, and what cannot run names the line, the layer and the engine."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lap2.gradients import StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.ghost.engine import GhostEngine
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.tracing import way_through
from lightning_lap2.gradients.vmap import VmapEngine


class Module(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, *batch)


def run(module: nn.Module, kind: Any, batch: Any = None) -> Tensor:
    batch = batch or (torch.arange(12.0).view(4, 3), torch.arange(4))
    layout = ParameterLayout(module)
    total = layout.zeros()
    kind(module).accumulate(StepCall((batch, 0), 4), layout, FlatClipper(1.0), total)
    return total


def _patched(module: nn.Module) -> list[Any]:
    masking = sys.modules.get("transformers.masking_utils")
    hooks = [dict(layer._forward_pre_hooks) for layer in module.modules()]
    return [F.one_hot, getattr(masking, "is_tracing", None), hooks, torch.backends.cuda.flash_sdp_enabled()]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_patched_is_undone(fails: bool) -> None:
    pytest.importorskip("transformers.masking_utils")
    seen: SimpleQueue[Any] = SimpleQueue()  # a list that the step reaches would be put back

    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        seen.put(_patched(m))
        h = m.gru(m.net(x)[:, None])[0][:, 0]
        if fails:
            h = h * float(y)
        return (h * F.one_hot(y, 4)).sum()

    module = Module(step)
    before = _patched(module)
    flat = module.gru._flat_weights
    if fails:
        with pytest.raises(UnsupportedModelError):
            run(module, VmapEngine)
    else:
        run(module, VmapEngine)
    inside = seen.get()
    assert inside[0] is not before[0]
    assert inside[1] is not before[1]
    assert inside[2] != before[2]
    assert _patched(module) == before
    assert module.gru._flat_weights is flat
    assert all(a is b for a, b in zip(flat, module.gru.parameters(), strict=True))


def test_code_outside_the_trace_sees_the_original_behaviour() -> None:
    gru, x = nn.GRU(3, 4), torch.randn(2, 1, 3)
    want = gru(x)[0]
    with way_through([gru], torch.device("cpu")):
        assert torch.equal(F.one_hot(torch.tensor([1, 0])), torch.tensor([[0, 1], [1, 0]]))
        assert torch.equal(gru(x)[0], want)


def test_a_hidden_state_of_the_user_is_kept() -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        start = torch.full((1, x.shape[0], 4), 0.3)
        return m.gru(m.net(x)[:, None], hx=start)[0].square().sum()

    torch.manual_seed(0)
    module = Module(step)
    assert torch.allclose(run(module, VmapEngine), run(module, LoopEngine), atol=1e-6)


def item(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.net(x).sum() * float(y)


def branch(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.net(x).sum() if x.sum() > 9 else m.net(-x).sum()


def numpy(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.net(x).sum() * float(x.numpy()[0, 0])


def boolean_index(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.net(x)[:, x[0] > 1].sum() if x.shape[1] == 4 else m.net(x[:, :][x[:, 0] >= 0]).sum()


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        return grad[0]


def filled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 4).copy_(m.net(x)).sum()


def custom(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return Sign.apply(m.net(x)).sum()


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (item, "reads the value"),
        (branch, "reads the value"),
        (numpy, "needs a tensor's memory"),
        (boolean_index, "depends on the data|reads the value"),
        (filled, "without the examples' dimension"),
        (custom, "custom autograd.Function"),
    ],
)
def test_what_vmap_cannot_run_names_line_and_engine_and_runs_by_loop(step: Any, cause: str) -> None:
    module = Module(step)
    line = step.__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedModelError, match=rf"test_tracing.py:{line} .*({cause}).*engine='loop'"):
        run(module, VmapEngine)
    assert float(run(module, LoopEngine).norm()) > 0


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
@pytest.mark.parametrize("form", ["batch", "batch-stateless", "instance"])
def test_functional_batch_statistics_are_refused(kind: Any, form: str) -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.net(x)[:, :, None].expand(-1, -1, 2)
        if form == "instance":
            return F.instance_norm(h, m.mean, m.variance, use_input_stats=True).sum()
        state = (None, None) if form == "batch-stateless" else (m.mean, m.variance)
        return F.batch_norm(h, *state, training=True).sum()

    module = Module(step)
    module.register_buffer("mean", torch.zeros(4))
    module.register_buffer("variance", torch.ones(4))
    before = torch.batch_norm
    with pytest.raises(UnsupportedModelError, match="called with the batch's statistics"):
        run(module, kind)
    assert torch.batch_norm is before
    assert torch.equal(module.mean, torch.zeros(4))


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_functional_norms_without_batch_statistics_run(kind: Any) -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.instance_norm(m.net(x)[:, :, None] * torch.arange(3.0))
        return F.batch_norm(h, torch.zeros(4), torch.ones(4)).square()[..., 0].sum()

    assert torch.isfinite(run(Module(step), kind)).all()


def test_the_layer_is_named() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.max().detach())

    module = Module(lambda m, x, y: m.reads[0](m.net(x)).sum())
    module.reads = nn.Sequential(Reads())  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"in layer 'reads.0' \(Reads\)"):
        run(module, VmapEngine)


def test_one_hot_without_a_number_of_classes_is_refused() -> None:
    module = Module(lambda m, x, y: (m.net(x) * F.one_hot(y)).sum())
    with pytest.raises(UnsupportedModelError, match="give num_classes"):
        run(module, VmapEngine)


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_errors_of_the_users_own_come_through(kind: Any) -> None:
    def step(m: Any, x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(Module(step), kind)


def test_strings_under_vmap_are_refused_when_used() -> None:
    batch = (torch.ones(4, 3), ["a", "b", "c", "d"])
    untouched = Module(lambda m, x, names: m.net(x).sum())
    assert torch.allclose(run(untouched, VmapEngine, batch), run(untouched, LoopEngine, batch))
    with pytest.raises(UnsupportedModelError, match=r"training_step uses batch\[1\]"):
        run(Module(lambda m, x, names: m.net(x).sum() * len(names)), VmapEngine, batch)
    sliced = Module(lambda m, x, names: m.net(x).sum() * len(names))
    assert torch.allclose(run(sliced, LoopEngine, batch), run(untouched, LoopEngine, batch))


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    from tests.zoo.heads import Task, classification
    from tests.zoo.modules import Checkpointed

    module = Task(Checkpointed(reentrant=True), classification)
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        run(module, LoopEngine, (torch.randn(4, 4), torch.arange(4) % 3))


@pytest.mark.parametrize("layer", [nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True)])
def test_sparse_embeddings_are_the_loops(layer: nn.Module) -> None:
    module = Module(lambda m, x: m.table(x).square().sum())
    module.table = layer  # type: ignore[assignment]
    batch = (torch.tensor([[1, 2], [0, 0], [4, 3], [1, 1]]),)
    with pytest.raises(UnsupportedModelError, match="'table' has sparse=True"):
        run(module, VmapEngine, batch)
    sparse = run(module, LoopEngine, batch)
    layer.sparse = False  # type: ignore[assignment]
    assert torch.allclose(sparse, run(module, VmapEngine, batch), atol=1e-6)


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine])
def test_dropout_differs_between_examples(kind: Any) -> None:
    masks: list[Tensor] = []

    def step(m: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.dropout(m.net(x), 0.5).sum()
        return {"loss": loss, "kept": F.dropout(torch.ones_like(x).repeat(1, 10), 0.5)}

    module = Module(step)
    layout = ParameterLayout(module)
    batch = (torch.ones(4, 3), torch.arange(4))
    masks.append(kind(module).accumulate(StepCall((batch, 0), 4), layout, FlatClipper(1.0), layout.zeros())["kept"])
    assert len({tuple(row.tolist()) for row in masks[0]}) == 4


class Stem(nn.Module):
    """As vision models start that treat what their convolutions found as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval(), nn.Linear(8, 5)
        self.norm.running_mean, self.norm.running_var = torch.randn(8), torch.rand(8) + 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = self.norm(self.conv(batch[0])).flatten(2).transpose(1, 2)
        return self.out(F.layer_norm(tokens, (8,))).tanh().sum()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [GhostEngine, VmapEngine, LoopEngine])
def test_known_statistics_of_a_batch_of_one(kind: Any, count: int) -> None:
    """The CPU's backward kernel is wrong for one example whose gradient has an unlucky layout; for two it is right."""
    torch.manual_seed(0)
    module = Stem().double()
    images = torch.randn(count, 3, 6, 6, dtype=torch.float64)
    layout = ParameterLayout(module)
    total = layout.zeros()
    kind(module).accumulate(StepCall(((images,), 0), count), layout, FlatClipper(float("inf")), total)
    twins = sum(module.training_step((image.expand(2, -1, -1, -1),), 0) for image in images)
    want = torch.autograd.grad(twins / 2, layout.parameters)
    torch.testing.assert_close(total, layout.flatten(want))


class Switching(nn.Module):
    """Sets one of its two BatchNorms to evaluation in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 5)
        self.all = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (self if self.all else self.first).eval()
        return self.out(self.second(self.first(batch[0]))).square().sum()


@pytest.mark.parametrize("kind", [GhostEngine, VmapEngine, LoopEngine])
def test_batch_norm_counts_in_the_mode_that_it_is_called_in(kind: Any) -> None:
    torch.manual_seed(0)
    module, x = Switching(), torch.randn(4, 3)
    layout = ParameterLayout(module)
    total = layout.zeros()
    call = StepCall(((x,), 0), 4)
    kind(module).accumulate(call, layout, FlatClipper(float("inf")), total)
    want = torch.autograd.grad(module.training_step((x,), 0), layout.parameters)
    torch.testing.assert_close(total, layout.flatten(want))
    module.train().all = False
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="'second'"):
            kind(module).accumulate(call, layout, FlatClipper(float("inf")), layout.zeros())
        assert not module.second.running_mean.any()
