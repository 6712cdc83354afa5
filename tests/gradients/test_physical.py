"""Torch's private names: here by name what is missing, or means something else, under another version."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, StepRunner, physical
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.ghost.rules import RULES
from lightning_lap2.gradients.step.replacing import Replacements


@pytest.mark.parametrize("name", physical.NAMES["ghost"])
def test_torch_has(name: str) -> None:
    assert f"torch.{name}" not in physical.missing("ghost"), f"torch {torch.__version__} has no torch.{name}"


def test_no_private_name_is_left_out() -> None:
    """What is not looked up when the module is imported is in ``NAMES``, so that its lack is told by name."""
    source = inspect.getsource(physical)
    used = set(re.findall(r"[ ([]_C\.(\w+)", source))
    at_once = set(re.findall(r"^\w+: .* = _C\.(\w+)$", source, flags=re.MULTILINE))
    of_tests = {"_set_vmap_fallback_enabled"}
    home = "_C._functorch."
    assert used - at_once - of_tests == {
        name.removeprefix(home) for name in physical.NAMES["ghost"] if name.startswith(home)
    }


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Takes one of torch's private names away."""

    def take(name: str) -> None:
        monkeypatch.delattr(torch._C._functorch, name)
        physical.missing.cache_clear()

    yield take
    monkeypatch.undo()
    physical.missing.cache_clear()


def test_an_engine_whose_names_torch_lacks_is_refused_and_auto_takes_the_next(lacking: Callable[[str], None]) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            return self.layer(batch).square().sum()

    module, batch = Module(), torch.randn(4, 3)
    layout = ParameterLayout(module)

    def total(*names: str) -> tuple[Tensor, StepRunner]:
        found, runner = layout.zeros(), StepRunner(module, [make_engine(name, module) for name in names])
        runner.accumulate(StepCall((batch, 0), 4), layout, FlatClipper(1.0), found)
        return found, runner

    expected, runner = total("ghost", "vmap", "loop")
    assert runner.used == ["ghost"]
    for name, left in [("pop_dynamic_layer_stack", "vmap"), ("_set_vmap_fallback_warning_enabled", "loop")]:
        lacking(name)
        found, runner = total("ghost", "vmap", "loop")
        assert runner.used == [left]
        torch.testing.assert_close(found, expected)
        said = f"engine='ghost' needs.*torch._C._functorch.{name}.*which torch {re.escape(torch.__version__)} does not"
        assert re.match(said, runner.passed_over["ghost"])
        with pytest.raises(UnsupportedModelError, match="Use engine='loop'"):
            total("ghost")


def _inside(look: Callable[[Tensor], Any], x: Tensor, dim: int = 0) -> list[Any]:
    """What ``look`` says of ``x`` inside ``vmap``."""
    seen: list[Any] = []

    def function(value: Tensor) -> Tensor:
        seen.append(look(value))
        return value

    vmap(function, in_dims=dim)(x)
    return seen


def test_apart_and_whole_are_inverse_wherever_the_examples_lie() -> None:
    x = torch.randn(4, 3, 2)
    for dim in range(3):
        (found,) = _inside(lambda v: (physical.apart(v), physical.is_batched(v), physical.innermost(v)), x, dim)
        assert torch.equal(found[0], x.movedim(dim, 0))
        assert found[1]
        assert found[2] is x
        back = vmap(lambda v: physical.whole(physical.apart(v)), in_dims=dim)(x)
        assert torch.equal(back, x.movedim(dim, 0))


def test_what_is_batched_is_told_from_what_is_not() -> None:
    x, constant = torch.randn(4, 3), torch.randn(3)
    looks = _inside(lambda v: [physical.is_batched(t) for t in (v, constant, v + constant, constant + 1, 3.0)], x)
    assert looks == [[True, False, True, False, False]]
    assert not physical.is_batched(x)
    assert not physical.carries_batch(x)

    def inner(v: Tensor) -> Tensor:
        # a transform of the user's own around: a call for all examples would be one for its own dimension too
        seen.append((physical.is_batched(v), physical.carries_batch(v)))
        return v.sum()

    seen: list[tuple[bool, bool]] = []
    vmap(lambda v: torch.func.grad(inner)(v))(x)
    vmap(lambda v: vmap(lambda _: inner(v))(torch.arange(2)))(x)
    assert seen == [(False, True), (False, True)]


def test_outside_calls_torch_for_all_examples_once() -> None:
    calls: list[tuple[int, ...]] = []

    def function(v: Tensor) -> Tensor:
        with physical.outside():
            p = physical.apart(v)
            calls.append(tuple(p.shape))
            y = F.linear(p, weight)
        return physical.whole(y)

    x, weight = torch.randn(4, 3), torch.randn(2, 3, requires_grad=True)
    y = vmap(function)(x)
    assert calls == [(4, 3)]
    torch.testing.assert_close(y, x @ weight.t())
    assert y.grad_fn.name() == F.linear(x, weight).grad_fn.name()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_plain_calls_inside(reentrant: bool) -> None:
    layer, x, calls = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True), []

    def function(value: Tensor, *, factor: float = 1.0) -> Tensor:
        calls.append(factor)
        return torch.tanh(layer(value)) * factor

    options = {} if reentrant else {"factor": 2.0}
    with physical.plain_checkpoints():
        y = checkpoint(function, x, use_reentrant=reentrant, **options)
    y.sum().backward()
    assert calls == [1.0 if reentrant else 2.0]  # never again in the backward pass
    expected = torch.autograd.grad((torch.tanh(layer(x)) * calls[0]).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 3


def test_a_torch_that_calls_another_name_for_checkpoints_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is still there but no longer called would be replaced in vain."""
    monkeypatch.setattr(physical, "plain_checkpoints", nullcontext)
    physical.missing.cache_clear()
    try:
        assert physical.missing("vmap") == ()
        with pytest.raises(UnsupportedModelError, match="engine='ghost' needs a torch.utils.checkpoint that"):
            physical.check_torch("ghost")
    finally:
        physical.missing.cache_clear()


@pytest.mark.skipif(not hasattr(torch.func, "debug_unwrap"), reason="this torch has no torch.func.debug_unwrap")
def test_debug_unwrap_is_seen() -> None:
    def refuse(*_: Any) -> Any:
        raise LookupError("seen")

    with Replacements([(*physical.UNWRAPS, lambda _: refuse)]).active(), pytest.raises(LookupError, match="seen"):
        vmap(lambda v: torch.func.debug_unwrap(v).sum() * v)(torch.randn(3))


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AddmmBackward0": lambda x, p: torch.addmm(p[0], x, p.t()),
    "MmBackward0": lambda x, p: x.mm(p.t()),
    "BmmBackward0": lambda x, p: torch.bmm(x[None], p.t()[None]),
    "MvBackward0": lambda x, p: x.mv(p[0]),
    "ConvolutionBackward0": lambda x, p: F.conv1d(x[None], p[:, :, None]),
    "EmbeddingBackward0": lambda x, p: F.embedding(x.argmax(1), p),
    "IndexBackward0": lambda x, p: p[x.argmax(1)],
    "NativeLayerNormBackward0": lambda x, p: F.layer_norm(x, (3,), p[0], p[1]),
    "NativeGroupNormBackward0": lambda x, p: F.group_norm(x, 1, p[0], p[1]),
    "NativeBatchNormBackward0": lambda x, p: F.batch_norm(x, torch.zeros(3), torch.ones(3), p[0], p[1]),
    "ExpandBackward0": lambda x, p: p.expand(2, 3, 3) + x,
    "AddBackward0": lambda x, p: x + p,
    "SubBackward0": lambda x, p: x - p,
    "RsubBackward0": lambda x, p: torch.rsub(x, p),
    "MulBackward0": lambda x, p: x * p,
    "DivBackward0": lambda x, p: x / p,
    "WhereBackward0": lambda x, p: torch.where(x > 0, x, p),
    "PreluKernelBackward0": lambda x, p: F.prelu(x, p[0]),
}


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"CudnnBatchNormBackward0"}))
def test_vmap_never_runs_an_operation_that_ghost_has_a_rule_for_one_example_at_a_time(name: str) -> None:
    """Then its node would hold one example only, whose first dimension might be as long as the batch."""
    p = torch.randn(3, 3, requires_grad=True)
    with physical.no_fallback():
        y = vmap(lambda x: CALLS[name](x, p))(torch.randn(5, 3, 3))
    assert y.shape[0] == 5


def test_the_switch_of_the_fallback_works() -> None:
    with physical.no_fallback(), pytest.raises(RuntimeError, match="vmap fallback"):
        vmap(lambda x: F.embedding_bag(x, torch.ones(3, 2)))(torch.zeros(2, 1, 2, dtype=torch.long))
