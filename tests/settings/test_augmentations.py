"""``augmentations=K``: K views of a record are one example, at the price, the rate and the ledger of one view."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_lap2.callback.checks import UnsupportedSettingError
from lightning_lap2.gradients import UnsupportedModelError
from tests.helpers import (
    LIGHTNING,
    LIGHTNING_WARNINGS,
    Viewed,
    batch_spy,
    by_hand,
    classifier,
    part_spy,
    quiet_trainer,
    records,
    weights,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
RATE, CLIP = 0.1, 0.4
IDENTICAL = "all views of each record looked at are identical"


class Jittered(Dataset[Any]):
    """A random transform: the process's own generator, afresh at each fetch."""

    def __init__(self, number: int) -> None:
        self.records = records(number)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.records[index]
        return x + 0.5 * torch.randn(3), y


def no_noise(**options: Any) -> Any:
    return Lap2Privacy(eps=math.inf, noise_multiplier=0.0, max_grad_norm=CLIP, **options)


@pytest.mark.parametrize(
    ("options", "accumulate", "workers"),
    [
        ({"engine": "vmap"}, 1, 0),
        ({"engine": "vmap", "chunk_size": 2}, 3, 0),
        ({"engine": "ghost"}, 3, 0),
        ({"engine": "loop"}, 1, 0),
        ({"engine": "ghost"}, 1, 2),
        ({"engine": "vmap", "sampling": "none"}, 3, 0),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_without_noise_a_run_is_the_plain_formula(options: dict[str, Any], accumulate: int, workers: int) -> None:
    callback, spy = no_noise(augmentations=3, **options), batch_spy(pl, views=3)
    module = classifier(pl, learning_rate=RATE)
    several = {"num_workers": workers, "persistent_workers": True} if workers else {}
    trainer = quiet_trainer(pl, callback, spy, max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(Jittered(32), batch_size=4, **several))
    assert callback.steps == 2 * math.ceil(8 / accumulate)
    assert callback.expected_batch_size == 4 * accumulate
    assert spy.rows == [3 * max(part.count, 1) for part, _, _ in spy.batches]
    views = torch.cat([x for _, x, _ in spy.batches])
    assert (views[:, 0] != views[:, 1]).all(), "two views of a record are the same"
    labels = torch.cat([y for _, _, y in spy.batches])
    assert (labels == labels[:, :1]).all(), "the views of an example are not of one record"
    torch.testing.assert_close(
        weights(module), by_hand(spy.batches, 4 * accumulate, rate=RATE, clip=CLIP), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("sampling", ["poisson", "none"])
def test_plan_draws_and_ledger_are_those_of_one_view(sampling: str) -> None:
    runs = []
    for views in (1, 4):
        callback, spy = Lap2Privacy(eps=3.0, noise_seed=2, sampling=sampling, augmentations=views), part_spy(pl)
        trainer = quiet_trainer(pl, callback, spy, max_epochs=3, accumulate_grad_batches=2)
        trainer.fit(classifier(pl), DataLoader(Viewed(30, 4), batch_size=3))
        runs.append((callback, spy.parts))
    (one, parts), (several, same) = runs
    assert parts == same
    assert several.accountant == one.accountant
    for name in ("noise_multiplier", "scale", "sample_rate", "expected_batch_size", "planned_steps", "steps"):
        assert getattr(several, name) == getattr(one, name), name
    told, there = several.report().to_dict(), one.report().to_dict()
    assert (told.pop("augmentations"), there.pop("augmentations")) == (4, 1)
    assert told == there
    assert "| augmentations | 4 |" in str(several.report())


def test_an_empty_draw_shows_the_views_of_a_template() -> None:
    """Expected batch 1 of 20: empty about every third step."""
    seen: list[int] = []

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if module.trainer.global_step or seen:
            seen.append(len(batch[0]))
        loss = module.loss(batch)
        module.log("train_loss", loss, on_epoch=True)
        return loss

    callback, spy = Lap2Privacy(eps=math.inf, noise_multiplier=1.0, noise_seed=1, augmentations=2), part_spy(pl)
    trainer = quiet_trainer(pl, callback, spy, max_steps=40)
    trainer.fit(classifier(pl, step=step), DataLoader(Viewed(20, 2), batch_size=1))
    assert callback.steps == callback.accountant.steps == 40
    assert 5 < sum(part.count == 0 for part in spy.parts) < 25
    assert set(seen) == {2}
    assert math.isfinite(trainer.callback_metrics["train_loss_epoch"])


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """From the middle of the second epoch; the noise is seeded, so all but the interruption is the same."""

    def run(callback: Any, *more: Any, path: Path | None = None) -> Tensor:
        module = classifier(pl)
        trainer = quiet_trainer(pl, callback, *more, max_epochs=3, accumulate_grad_batches=2)
        trainer.fit(module, DataLoader(Viewed(32, 3), batch_size=4), ckpt_path=path)
        return weights(module)

    options = {"eps": 4.0, "noise_seed": 5, "augmentations": 3}
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    whole = Lap2Privacy(**options)
    want = run(whole, checkpoint)
    resumed = Lap2Privacy(**options)
    torch.testing.assert_close(run(resumed, path=tmp_path / "step=6.ckpt"), want, rtol=0, atol=1e-6)
    assert resumed.accountant == whole.accountant
    # another number of views is no other release
    other = Lap2Privacy(**{**options, "augmentations": 2})
    run(other, path=tmp_path / "step=6.ckpt")
    assert other.accountant == whole.accountant
    assert other.noise_multiplier == whole.noise_multiplier


# -- said at fit start ------------------------------------------------------------------------------------------------


def warned(data: Any, module: Any = None, **options: Any) -> list[str]:
    """What a fit of one step warns of."""
    trainer = quiet_trainer(pl, Lap2Privacy(eps=math.inf, noise_multiplier=1.0, **options), max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(classifier(pl) if module is None else module, DataLoader(data, batch_size=4))
    return [str(w.message) for w in caught if "augmentations" in str(w.message)]


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_identical_views_warn_once(engine: str) -> None:
    (warning,) = warned(records(16), engine=engine, augmentations=2)
    assert IDENTICAL in warning
    assert "augmentations=2" in warning


def test_views_that_differ_or_may_differ_do_not_warn() -> None:
    assert not warned(records(16), augmentations=1)
    assert not warned(Jittered(16), augmentations=2)

    class Dropping(type(classifier(pl))):  # type: ignore[misc]
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.layer(F.dropout(x, 0.5, self.training)), y)

    assert not warned(records(16), Dropping(), augmentations=2)

    class OnDevice(type(classifier(pl))):  # type: ignore[misc]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return (x + torch.randn_like(x) if self.trainer.training else x), y

    assert not warned(records(16), OnDevice(), augmentations=2)


# -- refused ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(records(12))


def test_records_that_cannot_be_asked_for_twice_are_refused() -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=9.0, sampling="none", augmentations=2), max_steps=2)
    with pytest.raises(UnsupportedSettingError, match="augmentations=2 asks the data set several times"):
        trainer.fit(classifier(pl), DataLoader(Stream(), batch_size=4))


def test_batch_norm_over_the_views_of_an_example_is_refused() -> None:
    class Normalised(type(classifier(pl))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.layer(self.norm(batch[0])), batch[1])

    trainer = quiet_trainer(pl, no_noise(augmentations=4), max_steps=2)
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        trainer.fit(Normalised(), DataLoader(Viewed(24, 4), batch_size=4))
