"""Callbacks that look on in a fit: times of steps, and private gradients beside plain ones.

Packages copy, pickle and clone the callbacks that they are given, so what is found is kept by the class.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Watchers(NamedTuple):
    """Callback classes of one Lightning namespace."""

    times: Any
    gradients: Any


def watchers(pl: ModuleType) -> Watchers:
    """Made for one process: what a class has found stays."""

    class Times(pl.Callback):  # type: ignore[misc,name-defined]
        """When each optimizer step was done."""

        ends: list[float] = []  # noqa: RUF012 (kept by the class on purpose)

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        @classmethod
        def take(cls) -> float | None:
            """Median seconds from one step's end to the next, loading included; the first two are left out."""
            gaps = [b - a for a, b in zip(cls.ends, cls.ends[1:], strict=False)][1:]
            cls.ends.clear()
            return statistics.median(gaps) if gaps else None

    class Gradients(pl.Callback):  # type: ignore[misc,name-defined]
        """The first released gradient of a fit without noise, against the sum of the records' plain gradients.

        Goes behind ``Lap2Privacy``; every record must be in the draw, and no gradient clipped.
        """

        error: float | None = None
        size: float | None = None
        _want: dict[str, Tensor] = {}  # noqa: RUF012

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loader = trainer.train_dataloader
            without_dropout(pl_module)
            # a copy, since a step may write to its module
            alone = copy.deepcopy(pl_module)
            alone.trainer = trainer  # copies have none
            with trainer.precision_plugin.train_step_context():
                type(self)._want = plain_sum(alone, loader.dataset, loader.collate_fn)
            type(self).size = len(loader.dataset)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            kind = type(self)
            if kind.error is None and kind.size:
                kind.error = largest_error(pl_module, kind._want, kind.size)

    return Watchers(Times, Gradients)


def without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for holder in (part, getattr(part, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def _half_a_deviation(normal: Any, sample_shape: Any = ()) -> Tensor:
    return (normal.loc + 0.5 * normal.scale).expand(normal._extended_shape(sample_shape))


@contextmanager
def without_noise() -> Iterator[None]:
    """``Normal(...).rsample()`` is its mean plus half a deviation: the same number for everyone."""
    kind: Any = torch.distributions.Normal
    before = kind.rsample
    kind.rsample = _half_a_deviation
    try:
        yield
    finally:
        kind.rsample = before


@contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]


def plain_sum(module: Any, dataset: Any, collate: Any) -> dict[str, Tensor]:
    """The sum over all records of the gradient of each record's loss, by plain autograd on a batch of that record."""
    sums = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    fetch = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[i] for i in indices])
    with _unlogged(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(len(dataset)):
            module.zero_grad(set_to_none=True)
            batch = module.trainer.precision_plugin.convert_input(collate(fetch([index])))
            output = module.training_step(module._apply_batch_transfer_handler(batch), 0)
            loss = output["loss"] if isinstance(output, Mapping) else output
            loss.reshape(()).backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
    return sums


def largest_error(module: Any, want: Mapping[str, Tensor], size: int) -> float:
    """Of the released mean against ``want / size``, relative to the largest entry of the latter."""
    want = {name: gradient for name, gradient in want.items() if gradient.numel()}
    scale = max(float(g.abs().max()) for g in want.values()) / size
    if not scale:
        raise AssertionError("all plain gradients are zero")
    found = dict(module.named_parameters())
    return max(float((found[name].grad - g / size).abs().max()) for name, g in want.items()) / scale
