"""Small models, data and Trainers for the multi-process, resume and settings tests.

Everything takes the Lightning namespace ``pl`` (``lightning.pytorch`` or ``pytorch_lightning``), whose classes are
unrelated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.release import releases as releases_module
from lightning_lap2.sampling import Part

DELTA = 1e-5

# Warnings are errors in these tests; these are Lightning's own, on runs that are short or resumed.
LIGHTNING_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*that ended before the epoch ended.*",  # mid-epoch checkpoints
        ".*callbacks used to create the checkpoint.*",  # resuming with fewer callbacks
        ".*The dirpath has changed from.*",  # a ModelCheckpoint of another folder
    )
]
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
_HOMES = {"lightning.pytorch": "lightning_lap2", "pytorch_lightning": "lightning_lap2.pytorch_lightning"}


@dataclass(frozen=True)
class Namespace:
    """One Lightning and the callback made for it."""

    pl: ModuleType
    lap2: type

    @classmethod
    def named(cls, name: str) -> Namespace:
        return cls(import_module(name), import_module(_HOMES[name]).Lap2Privacy)


LIGHTNING = Namespace.named("lightning.pytorch")


def records(number: int, *, seed: int = 0) -> TensorDataset:
    """``number`` examples ``(x [3], class 0 or 1)``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader(number: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(records(number), batch_size=batch_size, **options)


class Viewed(Dataset[Any]):
    """:func:`records` that differ at each fetch: fetch number k of a record gives its view k mod ``views``.

    ``views`` fetches in a row give every view once, wherever they begin, so a run does not depend on which process
    fetches what.
    """

    def __init__(self, number: int, views: int) -> None:
        self.records, self.views = records(number), views
        self.shifts = torch.randn(views, 3, generator=torch.Generator().manual_seed(4))
        self.fetched = [0] * number

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.records[index]
        self.fetched[index] += 1
        return x + self.shifts[self.fetched[index] % self.views], y


Step = Callable[[Any, Any, int], Any]


def classifier(pl: ModuleType, *, step: Step | None = None, unused: int = 0, learning_rate: float = 0.1) -> Any:
    """A LightningModule of 8 parameters for :func:`records`, always the same initial weights.

    Args:
        step: ``step(module, batch, batch_idx)`` in place of the plain ``training_step`` that logs ``train_loss``.
        unused: parameters that no loss ever touches: their gradient is the noise.
    """

    class Classifier(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in self.layer.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if unused:
                self.unused = nn.Parameter(torch.zeros(unused))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.layer(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if step is not None:
                return step(self, batch, batch_idx)
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=learning_rate)

    return Classifier()


def quiet_trainer(pl: ModuleType, *callbacks: Any, **options: Any) -> Any:
    """A CPU Trainer that prints and writes nothing unless asked to."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def budget_for(
    steps: int, *, noise_multiplier: float, sample_rate: float, dimension: int, bound: str = "tight"
) -> float:
    """An eps that pays for exactly ``steps`` such releases: half way to the next."""
    spent = []
    for number in (steps, steps + 1):
        accountant = MajorizedAccountant(bound=bound, mechanism="laplace")
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, dimension=dimension, steps=number)
        spent.append(accountant.epsilon(delta=DELTA))
    return sum(spent) / 2


def weights(module: nn.Module) -> Tensor:
    """All parameters in one flat fp64 vector."""
    return torch.cat([p.detach().reshape(-1).double() for p in module.parameters()]).clone()


@dataclass(frozen=True)
class Release:
    """What one release was made of, seen from inside."""

    number: int
    scale: float
    dtype: torch.dtype
    before: Tensor
    after: Tensor

    @property
    def is_noise_alone(self) -> bool:
        """Nothing was summed, and noise came of it: 0 is a point of the grid, met once in a hundred coordinates."""
        noised = int(self.after.count_nonzero()) >= len(self.after) - 2
        return bool(noised and not self.before.any() and torch.isfinite(self.after).all())


@contextmanager
def watched_releases() -> Iterator[list[Release]]:
    """Every call of ``release_`` inside, with the rank-local clipped sum before it and the noised mean after."""
    seen: list[Release] = []
    original = releases_module.release_

    def release_(total: Tensor, **options: Any) -> None:
        before = total.clone()
        original(total, **options)
        seen.append(Release(options["release"], options["scale"], total.dtype, before, total.clone()))

    releases_module.release_ = release_  # type: ignore[assignment]
    try:
        yield seen
    finally:
        releases_module.release_ = original


def part_spy(pl: ModuleType) -> Any:
    """A callback that notes the :class:`Part` of every trained batch; put it after Lap2Privacy."""

    class PartSpy(pl.Callback):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.parts: list[Part] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            lap2 = next(c for c in trainer.callbacks if getattr(c, "is_lap2_privacy", False))
            self.parts.append(lap2._session._part)

    return PartSpy()


Drawn = tuple[Part, Tensor, Tensor]


def batch_spy(pl: ModuleType, *, views: int = 1) -> Any:
    """A callback that keeps every trained batch of :func:`records` with its :class:`Part`, as ``[count, views, ...]``;
    the rows of an empty draw's template are dropped. Put it after Lap2Privacy."""

    class BatchSpy(pl.Callback):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.batches: list[Drawn] = []
            self.rows: list[int] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            part = trainer.callbacks[0]._session._part
            self.rows.append(len(batch[0]))
            x, y = (t.unflatten(0, (-1, views))[: part.count].clone() for t in batch)
            self.batches.append((part, x, y))

    return BatchSpy()


def by_hand(batches: list[Drawn], normaliser: int, *, rate: float, clip: float) -> Tensor:
    """The weights of :func:`classifier` after SGD without noise, each window one big batch, by the plain formula: a
    gradient for every view by itself, averaged over an example's views, clipped, summed."""
    layer = classifier(LIGHTNING.pl).layer
    parameters = {name: p.detach().double() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(layer, parameters, (x[None],)), y[None])

    of_views = vmap(vmap(grad(loss), in_dims=(None, 0, 0)), in_dims=(None, 0, 0))
    for number in sorted({part.release for part, _, _ in batches}):
        x = torch.cat([x for part, x, _ in batches if part.release == number]).double()
        y = torch.cat([y for part, _, y in batches if part.release == number])
        if not len(x):
            continue
        gradients = {name: g.mean(dim=1) for name, g in of_views(parameters, x, y).items()}
        norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in gradients.values()))
        weight = (clip / norms).clamp_max(1.0)
        for name, gradient in gradients.items():
            parameters[name] = parameters[name] - rate * torch.einsum("b,b...->...", weight, gradient) / normaliser
    return torch.cat([p.reshape(-1) for p in parameters.values()])


def gradient_spy(pl: ModuleType) -> Any:
    """A callback that keeps the ``.grad`` each optimizer step gets, flat; put it after Lap2Privacy."""

    class GradientSpy(pl.Callback):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.gradients: list[Tensor | None] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found = [p.grad for p in pl_module.parameters()]
            if any(g is None for g in found):
                self.gradients.append(None)
            else:
                self.gradients.append(torch.cat([g.detach().reshape(-1) for g in found]).clone())

    return GradientSpy()


def only_file(directory: Path, pattern: str) -> Path:
    found = sorted(directory.rglob(pattern))
    assert len(found) == 1, f"{pattern} in {directory}: {found}"
    return found[0]


def dataset_of(loader: DataLoader[Any]) -> Dataset[Any]:
    return loader.dataset
