"""One optimizer step by each method: forward, backward, clip to C = 1, noise, SGD."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import MeanLoss, Step, Workload
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.noise import make_noise_source

StepFunction = Callable[[], Any]
_LEARNING_RATE = 0.01
_NOISE = 1.0


def plain(workload: Workload) -> StepFunction:
    module, batch = workload.build()
    optimizer = torch.optim.SGD(module.parameters(), _LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()

    return step


def ours(engine_name: str) -> Callable[[Workload], StepFunction]:
    """An engine of this package with Laplace noise."""

    def build(workload: Workload) -> StepFunction:
        module, batch = workload.build()
        optimizer = torch.optim.SGD(module.parameters(), _LEARNING_RATE)
        layout, clipper = ParameterLayout(module), FlatClipper(1.0)
        engine = make_engine(engine_name, module)
        noise = make_noise_source("auto", layout.device)
        call = StepCall((batch, 0), workload.size)

        def step() -> None:
            optimizer.zero_grad()
            total = layout.zeros()
            engine.accumulate(call, layout, clipper, total)
            noise.add_(total, _NOISE, release=0)
            layout.write_grads(total.div_(workload.size))
            optimizer.step()

        return step

    return build


def _trainable_by_opacus(workload: Workload) -> tuple[Step, tuple[Tensor, Tensor]]:
    """Opacus has no rule for parameters outside layers: they stay frozen."""
    module, batch = workload.build()
    for child in module.modules():
        if not isinstance(child, nn.Linear | nn.Conv2d | nn.Embedding | nn.LayerNorm | nn.GroupNorm):
            for parameter in child.parameters(recurse=False):
                parameter.requires_grad_(False)
    return module, batch


def _step_of(net: nn.Module, criterion: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> StepFunction:
    """The peers' step: they hook the network, the loss or the optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()

    return step


def opacus_mode(mode: str) -> Callable[[Workload], StepFunction]:
    """``hooks``, ``functorch`` or ``ew``."""

    def build(workload: Workload) -> StepFunction:
        from opacus.grad_sample import wrap_model
        from opacus.optimizers import DPOptimizer

        module, (x, y) = _trainable_by_opacus(workload)
        net: nn.Module = wrap_model(module.net, grad_sample_mode=mode, loss_reduction="mean")
        trainable = [p for p in net.parameters() if p.requires_grad]
        optimizer = DPOptimizer(
            torch.optim.SGD(trainable, _LEARNING_RATE),
            noise_multiplier=_NOISE, max_grad_norm=1.0, expected_batch_size=workload.size,
        )  # fmt: skip
        return _step_of(net, MeanLoss(), optimizer, x, y)

    return build


def opacus_ghost(workload: Workload) -> StepFunction:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module, (x, y) = _trainable_by_opacus(workload)
    net = GradSampleModuleFastGradientClipping(module.net, max_grad_norm=1.0, use_ghost_clipping=True)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(trainable, _LEARNING_RATE),
        noise_multiplier=_NOISE, max_grad_norm=1.0, expected_batch_size=workload.size,
    )  # fmt: skip
    criterion = DPLossFastGradientClipping(net, optimizer, MeanLoss(), loss_reduction="mean")
    return _step_of(net, criterion, optimizer, x, y)


def fastdp(mode: str) -> Callable[[Workload], StepFunction]:
    """fastDP's book-keeping clipping in its ``MixOpt`` or ``ghost`` mode, with its ghost differentiation trick: only
    the first layer's bias (or weight) asks autograd for a gradient. Parameters outside layers stay as they are."""

    def build(workload: Workload) -> StepFunction:
        from fastDP import PrivacyEngine

        module, (x, y) = _trainable_by_opacus(workload)
        net: nn.Module = module.net
        optimizer = torch.optim.SGD(net.parameters(), _LEARNING_RATE)
        names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        first = names[0].rpartition(".")[0]
        origin = f"{first}.bias" if f"{first}.bias" in names else names[0]
        with redirect_stdout(StringIO()):  # it announces itself
            engine = PrivacyEngine(
                net, batch_size=workload.size, sample_size=1000 * workload.size, epochs=1, noise_multiplier=_NOISE,
                max_grad_norm=1.0, clipping_mode=mode, clipping_fn="Abadi", origin_params=[origin],
            )  # fmt: skip
            engine.attach(optimizer)
        return _step_of(net, MeanLoss(), optimizer, x, y)

    return build


METHODS: dict[str, Callable[[Workload], StepFunction]] = {
    "plain": plain,
    "ghost": ours("ghost"),
    "vmap": ours("vmap"),
    "loop": ours("loop"),
    "opacus-hooks": opacus_mode("hooks"),
    "opacus-functorch": opacus_mode("functorch"),
    "opacus-ew": opacus_mode("ew"),
    "opacus-ghost": opacus_ghost,
    "fastdp-mixopt": fastdp("MixOpt"),
    "fastdp-ghost": fastdp("ghost"),
}
_PACKAGES = {"opacus": "opacus", "fastdp": "fastDP"}


def available(method: str) -> bool:
    """Whether the packages of a method can be imported."""
    package = _PACKAGES.get(method.partition("-")[0])
    return package is None or importlib.util.find_spec(package) is not None
