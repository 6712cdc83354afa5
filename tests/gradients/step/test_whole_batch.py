"""Code that would see all examples at once is refused by name, and ordinary relatives of it run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from tests.gradients.ghost.oracle import assert_equals_loop

B = 4


class Centred(torch.autograd.Function):
    """Takes the mean of the whole batch off, in a batching rule of its own."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x - x.mean(0, keepdim=True), 0


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@torch.library.custom_op("lap2_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x.clone()


centred.register_autograd(lambda ctx, grad: grad)
centred.register_vmap(lambda info, in_dims, x: (x - x.mean(0, keepdim=True), 0))


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(context: Any) -> Any:
    def function(module: nn.Module, x: Tensor) -> Tensor:
        with context:
            return module.layer(x)

    return function


def _hooked(module: nn.Module, x: Tensor) -> Tensor:
    y = module.layer(x)
    y.register_hook(lambda grad: grad * 3)
    return y


def _penalty(module: nn.Module, x: Tensor) -> Tensor:
    y = module.layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), y, create_graph=True)
    return y + gradient


def _by_flag(module: nn.Module, x: Tensor) -> Tensor:
    y = module.layer(x)
    assert not x.requires_grad
    return y * (3.0 if y.requires_grad else 1.0)


def _functional_gradient(module: nn.Module, x: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda v: torch.tanh(module.layer(v)).square().sum())(x)
    return module.layer(gradient)


def _functional_vmap(module: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: module.layer(row).cumsum(0))(x)


class Module(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self.function(self, batch).square().sum()


def module_of(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return Module(function)


def run(module: nn.Module) -> None:
    layout = ParameterLayout(module)
    total = layout.zeros()
    try:
        GhostEngine(module).accumulate(StepCall((torch.randn(B, 3), 0), B), layout, FlatClipper(1.0), total)
    finally:
        assert "requires_grad" not in vars(Tensor)
        assert not total.any()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: Centred.apply(m.layer(x)), r"batching rule of its own.*engine='auto'"),
        (lambda m, x: centred(m.layer(x)), r"batching rule of its own.*engine='auto'"),
        pytest.param(
            lambda m, x: m.layer(x) + torch.func.debug_unwrap(x).mean(),
            "looks behind vmap",
            marks=pytest.mark.skipif(
                not hasattr(torch.func, "debug_unwrap"), reason="this torch has no torch.func.debug_unwrap"
            ),
        ),
        (_under(Looking()), "enters Looking, a TorchDispatchMode"),
        (_under(saved_tensors_hooks(lambda t: t, lambda t: t)), r"test_whole_batch\.py:\d+.*saved_tensors_hooks"),
        (_under(save_on_cpu()), r"test_whole_batch\.py:\d+.*saved_tensors_hooks"),
        (_hooked, "registers a hook on a tensor's gradient"),
        (_penalty, r"test_whole_batch\.py:\d+.*asks autograd for a gradient"),
    ],
    ids=["Function.vmap", "register_vmap", "debug_unwrap", "dispatch mode", "saved", "save_on_cpu", "hook", "grad"],
)
def test_refused_by_name(function: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        run(module_of(function))


def test_backward_hooks_of_layers_are_refused_and_forward_hooks_run() -> None:
    module, batch = module_of(lambda m, x: m.layer(x)), torch.randn(B, 3)
    for register in (module.layer.register_full_backward_hook, module.layer.register_full_backward_pre_hook):
        handle = register(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"a Linear has a backward hook.*remove the hook"):
            run(module)
        handle.remove()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="every layer has a backward hook"):
        run(module)
    handle.remove()
    module.layer.register_forward_hook(lambda layer, args, output: 2 * output)
    assert_equals_loop(module, batch)


@pytest.mark.parametrize(
    "function",
    [lambda m, x: Doubled.apply(m.layer(x)), _by_flag, _functional_gradient, _functional_vmap],
    ids=["generate_vmap_rule", "requires_grad", "torch.func.grad", "torch.func.vmap"],
)
def test_ordinary_relatives_run(function: Any) -> None:
    assert_equals_loop(module_of(function), torch.randn(B, 3))
    assert_equals_loop(module_of(function), torch.randn(3, 3))
