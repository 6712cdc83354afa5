"""How far one record moves the released sum, by brute force: two fits that differ in that record alone.

Everything else is held equal: the other records' coins, the noise (same seed, taken off by the difference), the weights
(learning rate 0), and the random numbers that the other records' code draws. The last holds because every draw takes
all records in order and the record in question is the last: what comes before it is the same with and without it.
(That the position of a record does not matter for the guarantee is what secret seeds are for.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_lap2 import Lap2Privacy
from lightning_lap2.callback.probe import Probe
from lightning_lap2.sampling import PoissonBatchSampler

N, FEATURES = 9, 4
CLIP = 1.0
LIMIT = CLIP * (1 + 1e-4)
EPOCHS = 3


class Recorded(Probe):
    """Keeps each release; with ``absent`` the data without that record."""

    cells = 2**30  # two releases with one noise are compared: finer than what is compared

    def __init__(self, absent: Sequence[int] = ()) -> None:
        self.absent = frozenset(absent)
        self.values: list[Tensor] = []

    def begin(self, release: Any) -> None:
        self.normaliser = release.normaliser

    def released(self, values: Tensor) -> None:
        self.values.append(values.double() * self.normaliser)


class Rows(Dataset[Any]):
    """Eight quiet records, and a loud one at the end."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(N, FEATURES, generator=generator)
        self.x[-1] *= 30
        self.y = (self.x.sum(1) > 0).float()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Plain(L.LightningModule):
    """Logistic regression, to be varied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))

    def each(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], y, reduction="none")

    def loss(self, x: Tensor, y: Tensor) -> Tensor | None:
        return self.each(x, y).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        return self.loss(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@dataclass
class Attack:
    """One way to mix records: what to put in place of the plain pieces."""

    module: Callable[[], L.LightningModule] = Plain
    dataset: Callable[[], Any] = Rows
    loader: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    privacy: dict[str, Any] = field(default_factory=dict)
    datamodule: Callable[[Any], Any] | None = None

    def releases(self, absent: Sequence[int], engine: str) -> list[Tensor]:
        """The sums of all releases of one fit, each with the same noise."""
        probe = Recorded(absent)
        privacy = Lap2Privacy(
            eps="inf",
            noise_multiplier=1e-3,
            max_grad_norm=CLIP,
            delta=1e-3,
            noise_seed=7,
            engine=engine,
            **self.privacy,
        )
        privacy.attach(probe)
        loader = DataLoader(self.dataset(), **{"batch_size": N, **self.loader})
        trainer = L.Trainer(
            **{"max_epochs": EPOCHS, **self.trainer},
            callbacks=[privacy, *self.callbacks()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        if self.datamodule is None:
            trainer.fit(self.module(), loader)
        else:
            trainer.fit(self.module(), datamodule=self.datamodule(loader))
        return probe.values

    def moved(self, monkeypatch: pytest.MonkeyPatch, engine: str = "auto") -> float:
        """The largest l2 distance, over the releases, between the sums with and without the last record."""
        monkeypatch.setattr(PoissonBatchSampler, "_draw", _everyone)
        with_it, without = self.releases([], engine), self.releases([N - 1], engine)
        assert len(with_it) == len(without) > 0
        return max(float((a - b).norm()) for a, b in zip(with_it, without, strict=True))


def _everyone(sampler: PoissonBatchSampler, release: int, parts: int) -> list[tuple[list[int], int]]:
    """All records in order, every other one in the second part where there are two."""
    return [(list(range(part, N, parts)), len(range(part, N, parts))) for part in range(parts)]
