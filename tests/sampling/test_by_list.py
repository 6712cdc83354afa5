"""Loaders whose sampler gives lists of indices: their data set is asked for one record at a time."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset

from lightning_lap2 import Lap2Privacy
from tests.helpers import quiet_trainer

N = 6


class Cells(Dataset[dict[str, Tensor]]):
    """As single-cell packages have it: ``__getitem__`` takes a list, and may centre what it reads."""

    users = ("a", "a", "b", "c", "c", "c")

    def __init__(self, mixing: bool = False) -> None:
        self.x = torch.arange(N * 3.0).view(N, 3).cos()
        self.mixing = mixing
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        self.asked.append(list(indices))
        x = self.x[indices]
        return {"x": x - x.mean(0) / 2 if self.mixing else x, "weight": self.x[indices, :1]}


def loader(cells: Dataset[Any], sampler: Any = None, **options: Any) -> DataLoader[Any]:
    sampler = RandomSampler(cells) if sampler is None else sampler  # type: ignore[arg-type]
    return DataLoader(cells, sampler=BatchSampler(sampler, N, drop_last=False), batch_size=None, **options)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.net.weight)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch["x"]) * batch["weight"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def step(data: DataLoader[Any], **options: Any) -> Tensor:
    """What a step without noise, every record in it, subtracts from the weights."""
    privacy = Lap2Privacy(eps="inf", noise_multiplier=0.0, max_grad_norm=1e6, **options)
    model = Model()
    quiet_trainer(L.pytorch, privacy, max_epochs=1).fit(model, data)
    assert privacy.sample_rate == 1.0
    return 1 - model.net.weight.detach().flatten()


def gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Of the mean of (w x . 1)^2."""
    return (2 * weight.square() * x.sum(1, keepdim=True) * x).mean(0)


@pytest.mark.parametrize("sampling", ["poisson", "none"])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_record_is_read_alone_and_counts_once(sampling: Any, workers: int) -> None:
    cells = Cells()
    found = step(loader(cells, num_workers=workers), sampling=sampling)
    torch.testing.assert_close(found, gradient(cells.x, cells.x[:, :1]))
    if not workers:
        alone = [asked for asked in cells.asked if len(asked) == 1]
        together = [asked for asked in cells.asked if len(asked) > 1]
        assert sorted(i for (i,) in alone[-N:]) == list(range(N))
        assert len(together) <= 1  # the trial's plain batch at fit start


def test_what_the_data_set_mixes_has_no_effect() -> None:
    cells = Cells(mixing=True)
    # each record less half of its own mean
    torch.testing.assert_close(step(loader(cells)), gradient(cells.x / 2, cells.x[:, :1]))


def test_units_and_parts_are_those_of_the_data_set_inside() -> None:
    cells = Cells()
    privacy = Lap2Privacy(eps="inf", noise_multiplier=0.0, unit="users", records_per_unit=2)
    lists = BatchSampler(SequentialSampler(cells), 3, drop_last=False)
    quiet_trainer(L.pytorch, privacy, max_epochs=1).fit(Model(), DataLoader(cells, sampler=lists, batch_size=None))
    assert privacy.sample_rate == 1.0  # three users
    part = Subset(cells, [4, 2, 0])
    found = step(DataLoader(part, sampler=BatchSampler(RandomSampler(part), 3, drop_last=False), batch_size=None))
    torch.testing.assert_close(found, gradient(cells.x[[4, 2, 0]], cells.x[[4, 2, 0], :1]))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (loader(Cells(), RandomSampler(Cells(), replacement=True, num_samples=N)), "replacement=True"),
        (loader(Subset(Cells(), [1, 1, 2])), "holds a record several times"),
        (DataLoader(Cells(), sampler=[[0, 1], [2]], batch_size=None), "batch_size=None"),
        (Own(Cells(), sampler=BatchSampler(RandomSampler(Cells()), 2, False), batch_size=None), "its own way"),
    ],
)
def test_what_is_refused_of_others_is_refused_here(data: DataLoader[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        step(data)
