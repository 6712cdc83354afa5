"""One runner for all engines: who takes which examples, and what is left behind when one gives up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.errors import IsolationError, UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, StepRunner
from lightning_lap2.gradients.engines import make_engine

CHAIN = ("ghost", "vmap", "loop")


class Net(nn.Module):
    """Long sequences take a branch on the data, which only the loop can run; no others do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.seen: list[int] = []

    def log(self, *_: Any, **__: Any) -> None: ...

    def log_dict(self, *_: Any, **__: Any) -> None: ...

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.layer(batch).square().mean()
        if batch.shape[1] > 3 and float(batch.sum()) > 0:
            hidden = hidden * 2
        return hidden


def ragged(lengths: list[int]) -> ExampleBatch:
    generator = torch.Generator().manual_seed(1)
    return ExampleBatch.of(torch.randn(1, length, 3, generator=generator) for length in lengths)


def by_hand(module: nn.Module, layout: ParameterLayout, batch: ExampleBatch, clip: float) -> Tensor:
    total = torch.zeros(layout.numel)
    for place in range(batch.count):
        loss = module.training_step(batch.example(place), 0)  # type: ignore[operator]
        flat = layout.flatten(torch.autograd.grad(loss, layout.parameters))
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


def run(runner: StepRunner, layout: ParameterLayout, batch: Any, count: int | None = None) -> Tensor:
    total = layout.zeros()
    runner.accumulate(StepCall((batch, 0), batch.count if count is None else count), layout, FlatClipper(0.1), total)
    return total


def test_each_group_goes_to_the_first_engine_that_takes_it() -> None:
    module, batch = Net(), ragged([2, 5, 3, 2, 5])
    layout = ParameterLayout(module)
    runner = StepRunner(module, [make_engine(name, module) for name in CHAIN])
    torch.testing.assert_close(run(runner, layout, batch), by_hand(module, layout, batch, 0.1), rtol=1e-5, atol=1e-6)
    assert runner.used == ["ghost", "loop"]
    assert set(runner.passed_over) == {"ghost", "vmap"}
    assert "test_runner.py" in runner.passed_over["vmap"]
    # a shape that was not met before is tried anew, and one that was is not
    run(runner, layout, ragged([3, 4]))
    assert runner.used == ["ghost", "loop"]


def test_the_last_engines_refusal_is_the_users() -> None:
    module, batch = Net(), ragged([2, 5, 5])
    layout = ParameterLayout(module)
    runner = StepRunner(module, [make_engine("vmap", module)])
    total = layout.zeros()
    with pytest.raises(UnsupportedModelError, match=r"engine='vmap'.*engine='loop'"):
        runner.accumulate(StepCall((batch, 0), 3), layout, FlatClipper(0.1), total)


class Refusing:
    """An engine that runs the step, and then gives up."""

    name = "refusing"

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def add_clipped(self, examples: Any, step: Any, layout: Any, clipper: Any, total: Any) -> Any:
        self.calls += 1
        with step.tracing():
            step(examples.example(0))
        raise self.error


def test_what_an_engine_left_behind_before_it_gave_up_is_undone_and_not_repeated() -> None:
    class Counting(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module, batch = Counting(), ragged([2, 2])
    layout = ParameterLayout(module)
    refusing = Refusing(UnsupportedModelError("not this"))
    runner = StepRunner(module, [refusing, make_engine("vmap", module)])  # type: ignore[list-item]
    for _ in range(2):
        run(runner, layout, batch)
    assert refusing.calls == 1, "it was asked again about the same shape"
    assert module.seen == [0, 0], "one entry for each batch, as in plain training"
    # other parameters train: what an engine can do is asked anew
    module.layer.bias.requires_grad_(False)
    run(runner, ParameterLayout(module), batch)
    assert refusing.calls == 2


def test_mixed_records_end_the_fit_whatever_engines_are_left() -> None:
    module, batch = Net(), ragged([2, 2])
    runner = StepRunner(module, [Refusing(IsolationError("mixed")), make_engine("loop", module)])  # type: ignore[list-item]
    with pytest.raises(IsolationError, match="mixed"):
        run(runner, ParameterLayout(module), batch)


def test_a_refusal_is_no_error_of_a_record() -> None:
    """``on_record_error="zero"`` must not make a refused step one without gradients, in silence."""
    module, batch = Net(), ragged([2, 2])
    layout = ParameterLayout(module)
    runner = StepRunner(module, [make_engine("loop", module)])
    run(runner, layout, batch)
    runner.engines = [Refusing(UnsupportedSettingError("refused"))]  # type: ignore[list-item]
    call = StepCall((batch, 0), 2, skip_errors=True)
    with pytest.raises(UnsupportedSettingError, match="refused"):
        runner.accumulate(call, layout, FlatClipper(0.1), layout.zeros())


@pytest.mark.parametrize("engine", CHAIN)
def test_an_empty_draw_runs_its_template_and_adds_nothing(engine: str) -> None:
    module = Net()
    layout = ParameterLayout(module)
    runner = StepRunner(module, [make_engine(engine, module)])
    assert not run(runner, layout, ragged([2]), count=0).any()


@pytest.mark.parametrize("engine", CHAIN)
def test_what_prepares_an_example_sees_it_alone(engine: str) -> None:
    module, shapes = Net(), set()
    layout = ParameterLayout(module)

    def prepare(batch: Tensor) -> Tensor:
        shapes.add(tuple(batch.shape))
        return batch - batch.mean(0)  # of one row: zero

    runner, total = StepRunner(module, [make_engine(engine, module)]), layout.zeros()
    batch = ragged([2, 2, 2])
    runner.accumulate(StepCall((batch, 0), 3, prepare=prepare), layout, FlatClipper(1.0), total)
    assert shapes == {(1, 2, 3)}
    weight, bias = layout.views(total)
    assert not weight.any()
    assert bias.any()


def test_chunks_change_nothing() -> None:
    module, batch = Net(), ragged([2] * 7)
    layout = ParameterLayout(module)
    sums = [
        run(StepRunner(module, [make_engine(name, module, chunk_size=size)]), layout, batch)
        for name in ("vmap", "ghost")
        for size in (None, 1, 3, 7)
    ]
    for found in sums[1:]:
        torch.testing.assert_close(found, sums[0], rtol=1e-5, atol=1e-6)


class WritesItsBatch(nn.Module):
    """In place, and with a layer whose parameters ghost finds out to spread on the way."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.branches = nn.Linear(3, 4), nn.Bilinear(4, 4, 2), branches

    log = log_dict = lambda *_, **__: None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x.mul_(2)
        hidden = self.first(x)
        loss = self.second(hidden, hidden).square().mean()
        return loss * 2 if self.branches and float(x.sum()) > 0 else loss


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("engines", [("ghost",), ("vmap",), ("loop",), CHAIN])
def test_a_step_that_writes_into_its_batch_is_given_it_once(engines: tuple[str, ...], branches: bool) -> None:
    if branches and engines in (("ghost",), ("vmap",)):
        pytest.skip("refused there")
    module = WritesItsBatch(branches)
    layout = ParameterLayout(module)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    want = torch.zeros(layout.numel)
    for row in x:
        want += layout.flatten(torch.autograd.grad(module.training_step((row[None].clone(),), 0), layout.parameters))
    runner = StepRunner(module, [make_engine(name, module) for name in engines])
    for _ in range(3):
        total = layout.zeros()
        runner.accumulate(StepCall(((x.clone(),), 0), 5), layout, FlatClipper(float("inf")), total)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
