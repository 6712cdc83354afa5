"""Settings that are refused by name, before the first step: each message says what to use instead.

Every check is a function of what it inspects; ``pl`` is the Lightning namespace in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from lightning_lap2.callback.trainer.loaders import start_method
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients.physical import held_here
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise.base import scale_range
from lightning_lap2.noise.grid import LARGEST_SUM, spacing

_TYPES = (torch.float32, torch.float64, torch.bfloat16)
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")

_CALLBACKS = {
    "GradientAccumulationScheduler": "a changing window changes the sampling rate; use a fixed accumulate_grad_batches",
    "LearningRateFinder": "it trains outside the ledger; choose the learning rate on public data",
    "ModelPruning": "it replaces parameters while training runs; prune before fit and make it permanent with "
    "torch.nn.utils.prune.remove",
    "BatchSizeFinder": "it trains outside the ledger; choose the batch size beforehand",
    "StochasticWeightAveraging": "it runs an extra epoch of training batches; use WeightAveraging (since Lightning "
    "2.6; an average of released weights costs nothing)",
}


def check_trainer(trainer: Any, pl: ModuleType) -> None:
    """Strategy, precision, data options and neighbouring callbacks.

    Raises:
        UnsupportedSettingError: by name.
    """
    _check_strategy(trainer.strategy, pl)
    precision = str(trainer.precision)
    if precision not in _PRECISIONS:
        reason = (
            "its loss scaler skips steps depending on the data and hides overflows of single examples"
            if precision in ("16-mixed", "16-true")
            else "norms and sums in fp32 are not proven for it"
        )
        raise UnsupportedSettingError(
            f"Trainer(precision={precision!r}) is not supported with Lap2Privacy: {reason}; use 'bf16-mixed', "
            "'bf16-true', '32-true' or '64-true'"
        )
    if trainer.overfit_batches:
        raise UnsupportedSettingError(
            f"Trainer(overfit_batches={trainer.overfit_batches!r}) reuses the same records in every step, which "
            "Poisson sampling cannot describe; use a Subset of the data set instead"
        )
    _check_callbacks(trainer.callbacks)


def _check_strategy(strategy: Any, pl: ModuleType) -> None:
    name = type(strategy).__name__
    if type(strategy) is pl.strategies.SingleDeviceStrategy:
        return
    if type(strategy) is getattr(pl.strategies, "ModelParallelStrategy", None):
        size = strategy.device_mesh["tensor_parallel"].size()
        if size > 1:
            raise UnsupportedSettingError(
                f"ModelParallelStrategy has tensor_parallel_size={size}: norms of gradients whose parts lie on several "
                "ranks are not proven. Use ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1) with "
                "fully_shard in configure_model, which shards over all ranks"
            )
        return
    if type(strategy) is not pl.strategies.DDPStrategy:
        raise UnsupportedSettingError(
            f"Trainer(strategy=...) gave {name}, which Lap2Privacy does not support; use strategy='ddp' (whole "
            "model on every device), a single device, or for a model larger than one device "
            "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1) with fully_shard in configure_model"
        )
    method = start_method(strategy)
    if method != "popen":
        raise UnsupportedSettingError(
            f"strategy 'ddp_{method}' starts processes whose privacy ledger would be lost when they end; use "
            "strategy='ddp' (from a script, not a notebook) or devices=1"
        )


def _check_callbacks(callbacks: Iterable[Any]) -> None:
    seen = 0
    for callback in callbacks:
        if getattr(callback, "is_lap2_privacy", False):
            seen += 1
        for base in type(callback).__mro__:
            reason = _CALLBACKS.get(base.__name__)
            if reason and base.__module__.startswith(("lightning.", "pytorch_lightning.")):
                raise UnsupportedSettingError(f"the callback {base.__name__} is not supported: {reason}")
    if seen > 1:
        raise UnsupportedSettingError(
            f"Trainer(callbacks=...) holds {seen} Lap2Privacy callbacks; noise and ledger need exactly one"
        )


def check_module(module: Any, pl: ModuleType) -> None:
    """How the LightningModule trains.

    Raises:
        UnsupportedSettingError: manual optimization, an own ``backward``, or a ``training_step`` that pulls its own
        batches.
    """
    if not module.automatic_optimization:
        raise UnsupportedSettingError(
            f"{type(module).__name__}.automatic_optimization is False: with manual optimization un-noised gradients "
            "reach the optimizer; use automatic optimization"
        )
    for name in ("backward", "manual_backward"):
        own = getattr(pl.LightningModule, name)
        if name in vars(module) or getattr(type(module), name) is not own:
            raise UnsupportedSettingError(
                f"{type(module).__name__} overrides {name}, which private training never calls: gradients are taken of "
                "each example's loss by the engine. Remove the override; what it does to the loss belongs into "
                "training_step, what it does to gradients into on_before_optimizer_step"
            )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedSettingError(
            f"{type(module).__name__}.training_step takes dataloader_iter and draws batches itself, so their "
            "sampling rate is unknown; take (batch, batch_idx)"
        )


def check_optimizers(optimizers: Iterable[Any], module: Any) -> None:
    """Optimizers that step more than once per release, on what the module does not hold, or that want gradients which
    noise does not leave.

    Raises:
        UnsupportedSettingError: LBFGS, SparseAdam; a parameter that is not the module's.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in own:
                    raise UnsupportedSettingError(
                        f"the optimizer {type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} "
                        f"(param_groups[{number}]['params'][{place}]) that {type(module).__name__}.parameters() does "
                        "not: it would get no private gradient. Make it a parameter of the module (nn.Parameter, "
                        "nn.ParameterList or a submodule as attribute), or leave it out of the optimizer"
                    )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedSettingError(
                "the optimizer LBFGS calls its closure several times per step, each a release of its own; use SGD, "
                "Adam, AdamW or another first-order optimizer"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UnsupportedSettingError(
                "the optimizer SparseAdam takes sparse gradients only, but noise falls on every row of a table: use "
                "Adam; nn.Embedding(sparse=True) may stay"
            )


def check_parameter_hooks(module: Any) -> None:
    """Hooks that see each gradient of a parameter as autograd makes it.

    Raises:
        UnsupportedSettingError: naming the parameter.
    """
    for parameter in module.parameters():
        if not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks:
            continue
        name = next(name for name, found in module.named_parameters() if found is parameter)
        kind = "register_hook" if parameter._backward_hooks else "register_post_accumulate_grad_hook"
        raise UnsupportedSettingError(
            f"the parameter {name} has a hook ({kind}; WandbLogger.watch(log='gradients') or 'all' installs one "
            "too): it would see gradients of single examples without noise, and what it returns would reach nobody. "
            "Remove it (handle.remove(), watch(log=None)) and read the private gradient from parameter.grad in the "
            "module's on_before_optimizer_step"
        )


def monitors(trainer: Any) -> dict[str, str]:
    """What callbacks and schedulers watch: monitored name -> who watches it."""
    found: dict[str, str] = {}
    for callback in trainer.callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str):
            found.setdefault(name, type(callback).__name__)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            found.setdefault(config.monitor, type(config.scheduler).__name__)
    return found


def check_names(logged: Iterable[str]) -> None:
    """Names that the module or its callbacks logged, without the ledger's own.

    Raises:
        UnsupportedSettingError: naming a metric that would be taken for a private one.
    """
    for name in sorted(logged):
        if name.startswith("privacy/"):
            raise UnsupportedSettingError(
                f"a metric is logged as {name!r}: names that start with 'privacy/' are Lap2Privacy's, for values that "
                "the guarantee covers; give it another name"
            )


def feedback(watched: dict[str, str], logged: Iterable[str]) -> list[str]:
    """Watchers of values that were computed from the training batches without noise, as sentences."""
    names = set(logged)
    # what Lightning calls a value that is logged both on_step and on_epoch
    from_training = names | {f"{name}{suffix}" for name in names for suffix in ("_step", "_epoch")}
    return [f"{who} watches {name!r}" for name, who in watched.items() if name in from_training]


def check_unwatched(sentences: list[str]) -> None:
    """
    Raises:
        UnsupportedSettingError: if there is any sentence.
    """
    if sentences:
        raise UnsupportedSettingError(
            f"{'; '.join(sentences)}: it is computed from the training data without noise, so what it decides is "
            "not covered by the guarantee; watch a validation metric on public data or 'privacy/epsilon', or pass "
            "allow_feedback=True (the report then says so)"
        )


def check_parameter_types(module: Any) -> None:
    """Types in which a noised gradient can be kept.

    Raises:
        UnsupportedSettingError: naming the trainable parameter: fp16 and narrower, complex, or of a lazy layer whose
            shape is not known yet.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise UnsupportedSettingError(
                f"the trainable parameter {name} belongs to a lazy layer and has no shape yet, so n is unknown; run "
                "the module once on a made-up batch before fit, or give the layer's sizes"
            )
        if parameter.dtype not in _TYPES:
            raise UnsupportedSettingError(
                f"the trainable parameter {name} is {parameter.dtype}; norms, sums and noise are proven for "
                f"{', '.join(map(str, _TYPES))}: convert it, or freeze it"
            )


def check_range(mechanism: Mechanism, dtype: torch.dtype, num_examples: int | None, batch_size: int) -> None:
    """Whether the sum and its noise can be held by ``dtype``.

    Args:
        num_examples: N; the sum of as many gradients of norm C must not overflow. ``None``: taken as 2^31.
        batch_size: the normaliser.

    Raises:
        UnsupportedSettingError: C or the scale of the noise is too small or too large, or the rounding of sum and noise
            could take half of C.
    """
    scale, clip, limits = mechanism.scale, mechanism.max_grad_norm, torch.finfo(dtype)
    if not scale:
        return
    largest_sum = clip * (num_examples or 2**31)
    smallest, largest = scale_range(dtype)
    low, high = smallest * batch_size, largest / 2
    if not low <= scale <= high or largest_sum > limits.max / 2:
        raise UnsupportedSettingError(
            f"max_grad_norm={clip:g} with noise_multiplier={mechanism.noise_multiplier:g} (scale {scale:g}) is "
            f"outside what {dtype} can hold, {low:.3g} to {high:.3g}; choose another max_grad_norm (rescale the "
            "loss), or Trainer(precision='64-true')"
        )
    if largest_sum > LARGEST_SUM * spacing(scale):
        raise UnsupportedSettingError(
            f"noise_multiplier={mechanism.noise_multiplier:g} is too little beside a sum of up to {largest_sum:g}, "
            "which float64 cannot round to the noise's grid; give at least 1e-3"
        )
    if mechanism.margin > 0.5:
        raise UnsupportedSettingError(
            f"rounding could take {mechanism.margin:.0%} of max_grad_norm with mechanism={mechanism.name!r}, "
            f"noise_multiplier={mechanism.noise_multiplier:g} and batches of {batch_size} examples in {dtype}; use "
            "mechanism='laplace', smaller batches, or Trainer(precision='64-true')"
        )


def not_finite(module: Any) -> str | None:
    """Name of the first trainable parameter with a NaN or infinite entry."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(held_here(parameter).detach()).all()):
            return str(name)
    return None


def check_delta(delta: float, num_examples: int | None) -> None:
    """
    Raises:
        UnsupportedSettingError: delta >= 1/N allows publishing a whole record.
    """
    if num_examples is not None and delta >= 1 / num_examples:
        raise UnsupportedSettingError(
            f"delta={delta!r} is not below 1/N for N={num_examples} examples: such a guarantee allows one record to "
            f"be published whole; use delta below {1 / num_examples:.3g}, better 1/N^1.1"
        )
