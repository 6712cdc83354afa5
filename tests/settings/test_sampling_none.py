"""``sampling="none"``: the user's own order, un-amplified; one charge per pass where no example can repeat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_lap2.accounting import MajorizedAccountant
from tests.helpers import (
    DELTA,
    LIGHTNING,
    LIGHTNING_WARNINGS,
    classifier,
    loader,
    quiet_trainer,
    records,
    watched_releases,
    weights,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2


class Stream(IterableDataset[Any]):
    """The records, one after the other, without a length."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(records(self.number))


def unsampled(noise_multiplier: float, steps: int) -> float:
    accountant = MajorizedAccountant(bound="tight", mechanism="laplace")
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0, dimension=8, steps=steps)
    return accountant.epsilon(delta=DELTA)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "num_workers": 1}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_map_style_loader_is_charged_once_per_pass(options: dict[str, Any], accumulate: int) -> None:
    callback = Lap2Privacy(eps=50.0, sampling="none", noise_multiplier=2.0)
    trainer = quiet_trainer(pl, callback, max_epochs=3, accumulate_grad_batches=accumulate)
    with watched_releases() as seen:
        trainer.fit(classifier(pl), loader(20, 4, **options))
    per_pass = -(-5 // accumulate)
    assert callback.steps == len(seen) == trainer.global_step == 3 * per_pass
    assert callback.accountant.steps == 3
    assert callback.sample_rate == 1
    assert callback.expected_batch_size == 4 * accumulate
    assert callback.accountant.epsilon(delta=DELTA) == pytest.approx(unsampled(2.0, 3), rel=1e-9)
    report = callback.report()
    assert report.adjacency == "zero-out of one example"
    assert any("not sampled" in caveat for caveat in report.caveats)


def test_calibrated_for_the_passes() -> None:
    callback = Lap2Privacy(eps=2.0, sampling="none")
    trainer = quiet_trainer(pl, callback, max_epochs=4)
    trainer.fit(classifier(pl), loader(20, 4))
    assert (callback.steps, callback.planned_steps, callback.accountant.steps) == (20, 20, 4)
    assert 1.99 < callback.accountant.epsilon(delta=DELTA) <= 2.0


def test_budget_ends_at_the_end_of_an_affordable_pass() -> None:
    eps = (unsampled(2.0, 3) + unsampled(2.0, 4)) / 2
    callback = Lap2Privacy(eps=eps, sampling="none", noise_multiplier=2.0)
    trainer = quiet_trainer(pl, callback, max_epochs=9, min_epochs=9)
    trainer.fit(classifier(pl), loader(20, 4))
    assert (callback.steps, callback.accountant.steps) == (15, 3)
    assert callback.accountant.epsilon(delta=DELTA) <= eps


def test_partial_pass_is_charged_as_a_pass() -> None:
    callback = Lap2Privacy(eps=50.0, sampling="none", noise_multiplier=2.0)
    trainer = quiet_trainer(pl, callback, max_epochs=3, limit_train_batches=2)
    trainer.fit(classifier(pl), loader(20, 4))
    assert (callback.steps, callback.accountant.steps) == (6, 3)


def test_without_noise_and_clipping_it_is_plain_training() -> None:
    """The user's order really is kept."""
    pl.seed_everything(3, verbose=False)
    plain = classifier(pl)
    quiet_trainer(pl, max_epochs=2).fit(plain, loader(20, 4, generator=torch.Generator().manual_seed(5), shuffle=True))
    private = classifier(pl)
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=float("inf"), sampling="none")
    trainer = quiet_trainer(pl, callback, max_epochs=2)
    trainer.fit(private, loader(20, 4, generator=torch.Generator().manual_seed(5), shuffle=True))
    torch.testing.assert_close(weights(private), weights(plain), rtol=0, atol=1e-6)


def test_pass_resumed_in_its_middle_is_charged_anew(tmp_path: Path) -> None:
    """Nothing tells whether the rest of the order repeats what was used before."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    options = {"eps": 50.0, "sampling": "none", "noise_multiplier": 2.0}
    quiet_trainer(pl, Lap2Privacy(**options), Save(), max_epochs=2).fit(classifier(pl), loader(20, 4, shuffle=True))
    callback = Lap2Privacy(**options)
    trainer = quiet_trainer(pl, callback, max_epochs=2)
    trainer.fit(classifier(pl), loader(20, 4, shuffle=True), ckpt_path=tmp_path / "middle.ckpt")
    assert callback.steps == 10
    assert callback.accountant.steps == 3, "two passes before, one more for the rest of the second"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scenario_13_iterable_data_set_is_charged_every_step(accumulate: int) -> None:
    callback = Lap2Privacy(eps=float("inf"), sampling="none", noise_multiplier=3.0)
    trainer = quiet_trainer(pl, callback, max_epochs=2, accumulate_grad_batches=accumulate)
    with watched_releases() as seen:
        trainer.fit(classifier(pl), DataLoader(Stream(20), batch_size=4))
    steps = 2 * -(-5 // accumulate)
    assert callback.steps == callback.accountant.steps == len(seen) == steps
    assert callback.accountant.epsilon(delta=DELTA) == pytest.approx(unsampled(3.0, steps), rel=1e-9)
    assert any("cannot be checked for repeats" in caveat for caveat in callback.report().caveats)


def test_iterable_data_set_with_a_last_step_is_calibrated() -> None:
    callback = Lap2Privacy(eps=3.0, sampling="none")
    trainer = quiet_trainer(pl, callback, max_steps=7, max_epochs=-1)
    trainer.fit(classifier(pl), DataLoader(Stream(20), batch_size=4))
    assert callback.steps == callback.planned_steps == 7
    assert 2.99 < callback.accountant.epsilon(delta=DELTA) <= 3.0


def test_iterable_data_set_of_unknown_length_cannot_be_calibrated() -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0, sampling="none"), max_epochs=2)
    with pytest.raises(ValueError, match="no last step.*max_steps"):
        trainer.fit(classifier(pl), DataLoader(Stream(20), batch_size=4))


def test_scenario_13_iterable_data_set_is_refused_under_poisson() -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0), max_steps=3)
    with pytest.raises(TypeError, match="IterableDataset"):
        trainer.fit(classifier(pl), DataLoader(Stream(20), batch_size=4))


class Shuffled(Sampler[int]):
    """A user's own sampler, of which nothing is known."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def __len__(self) -> int:
        return 20


DATA = records(20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": RandomSampler(DATA, replacement=True)}, "replacement=True"),
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20)}, "WeightedRandomSampler"),
        ({"sampler": SubsetRandomSampler([1, 2, 2, 3])}, "twice"),
        ({"sampler": Shuffled()}, "Shuffled"),
        ({"sampler": RandomSampler(DATA, num_samples=30)}, "num_samples=30"),
    ],
)
def test_scenario_19_what_may_repeat_is_refused(options: dict[str, Any], words: str) -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=50.0, sampling="none"), max_epochs=1)
    with pytest.raises(ValueError, match=f"more than once in a pass.*{words}"):
        trainer.fit(classifier(pl), DataLoader(DATA, batch_size=4, **options))


def test_own_batch_sampler_is_refused() -> None:
    class Batches(BatchSampler):
        pass

    sampler = Batches(SequentialSampler(DATA), 4, False)
    trainer = quiet_trainer(pl, Lap2Privacy(eps=50.0, sampling="none"), max_epochs=1)
    with pytest.raises(ValueError, match="batch_sampler is a Batches"):
        trainer.fit(classifier(pl), DataLoader(DATA, batch_sampler=sampler))


def test_scenario_19_padding_for_four_ranks_is_refused() -> None:
    from torch.utils.data import DistributedSampler

    from lightning_lap2.callback.data import TrainingData

    def on_four_ranks(number: int) -> TrainingData:
        data = records(number)
        shards = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 4, 0))
        return TrainingData(shards, sampling="none", limit=1.0, accumulate=1, rank=0, world_size=4, seed=None)

    with pytest.raises(ValueError, match="pads by repetition: 13 examples on 4 ranks, 3 of them twice"):
        on_four_ranks(13)
    assert on_four_ranks(12).facts.once_per_pass
