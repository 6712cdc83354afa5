"""Ordinary code through the default engines, compared with plain autograd and plain Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_lap2.gradients import ParameterLayout, StepCall, StepRunner
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.sampling.alone import Collator

ENGINES = ("ghost", "vmap", "loop")
"""Those of ``engine="auto"``, in its order."""

Step = Callable[..., Any]


class Net(L.LightningModule):
    """A LightningModule around one step; ``parts`` become its attributes."""

    def __init__(self, step: Step, **parts: Any) -> None:
        super().__init__()
        self.step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case:
    """One ordinary step.

    Attributes:
        step: ``step(module, batch)``.
        records: what the data set holds.
        parts: makes the module's attributes; called under a fixed seed.
        engine: the one that ``auto`` ends with; those behind it take the step too.
        refused_by: but for these.
        logs: whether plain Lightning's logged values are the reference: ``False`` where the step cannot run on a whole
            batch, or its mean over the batch is not the mean over the examples.
        twins: whether plain autograd needs two rows, which are then the record twice.
        tolerance: relative, of gradients.
        collate: the ``collate_fn``.
    """

    step: Step
    records: Sequence[Any]
    parts: Callable[[], Mapping[str, Any]]
    engine: str = "ghost"
    refused_by: tuple[str, ...] = ()
    logs: bool = True
    twins: bool = False
    tolerance: float = 1e-5
    collate: Callable[[list[Any]], Any] = field(default=default_collate)

    def module(self) -> Net:
        torch.manual_seed(3)
        return Net(self.step, **self.parts())


@dataclass(frozen=True)
class Result:
    """What came of the examples of one draw.

    Attributes:
        gradient: the sum of per-example gradients, by name.
        logged: values by name, in the order of the calls.
        output: of the step.
        engines: that ran.
        why: what the engines that were passed over said.
    """

    gradient: dict[str, Tensor]
    logged: dict[str, Any]
    output: Any
    engines: Sequence[str] = ()
    why: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def logging() -> Iterator[dict[str, Any]]:
    """What reaches ``LightningModule.log`` inside, as numbers."""
    seen: dict[str, Any] = {}
    original = L.LightningModule.log

    @functools.wraps(original)
    def log(self: Any, name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, nn.Module):
            value = value._forward_cache if getattr(value, "_forward_cache", None) is not None else value.compute()
        seen[name] = float(value)

    L.LightningModule.log = log  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        L.LightningModule.log = original  # type: ignore[method-assign]


def privately(case: Case, module: Net | None = None, engines: Sequence[str] = ENGINES) -> Result:
    """Through the engines, without clipping and noise."""
    module = module or case.module()
    layout = ParameterLayout(module)
    total = layout.zeros()
    runner = StepRunner(module, [make_engine(name, module) for name in engines])
    examples = Collator(case.collate).of_stream(list(case.records))
    with logging() as seen:
        call = StepCall((examples, 0), examples.count)
        output = runner.accumulate(call, layout, FlatClipper(float("inf")), total)
    gradient = dict(zip(layout.names, layout.views(total), strict=True))
    return Result(gradient, seen, output, runner.used, runner.passed_over)


def alone(case: Case) -> dict[str, Tensor]:
    """The sum of gradients by plain autograd, each record in a batch of one and with a module of its own."""
    sums = {name: torch.zeros_like(p) for name, p in case.module().named_parameters() if p.requires_grad}
    for record in case.records:
        fresh = case.module()
        with logging():
            loss = _loss(fresh.training_step(case.collate([record, record] if case.twins else [record]), 0))
        loss.backward()
        for name, parameter in fresh.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                sums[name] += grad.to_dense() if grad.is_sparse else grad
    return sums


def plainly(case: Case) -> Result:
    """Plain Lightning on the whole batch; gradients as a sum over examples are not its matter."""
    module = case.module()
    with logging() as seen:
        output = module.training_step(case.collate(list(case.records)), 0)
    return Result({}, seen, output)


def _loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss.reshape(())
