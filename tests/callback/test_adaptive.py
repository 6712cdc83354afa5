"""Clipping modes in whole fits: the threshold follows its quantile, and what is charged is what was released."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.adaptive import RANGE, AdaptiveThreshold
from tests.helpers import (
    LIGHTNING,
    LIGHTNING_WARNINGS,
    Release,
    classifier,
    loader,
    part_spy,
    quiet_trainer,
    watched_releases,
    weights,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2

FREE: dict[str, Any] = {"eps": math.inf, "noise_multiplier": 0.0, "clipping": "adaptive"}
# The looser bound: its epsilon costs less time than the default's, and what is charged does not depend on it.
NOISY: dict[str, Any] = {
    "eps": 1e4,
    "noise_multiplier": 1.5,
    "bound": "joint",
    "clipping": "adaptive",
    "count_noise_scale": 4.0,
    "noise_seed": 5,
}


class Norms(pl.LightningModule):
    """The gradient of record x is x itself, wherever the weights are: the norms are known and stay."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_norms(norms: Tensor, batch_size: int) -> DataLoader[Any]:
    directions = torch.randn(len(norms), 4, generator=torch.Generator().manual_seed(0))
    x = directions / directions.norm(dim=1, keepdim=True) * norms[:, None]
    return DataLoader(TensorDataset(x), batch_size=batch_size)


def fit(callback: Any, data: DataLoader[Any], module: Any = None, *others: Any, **options: Any) -> list[Release]:
    with watched_releases() as seen:
        trainer = quiet_trainer(pl, callback, *others, **{"max_epochs": -1, **options})
        trainer.fit(Norms() if module is None else module, data)
    return seen


# -- the quantile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantile", "start"), [(None, 3000.0), (0.25, 1.0), (0.9, 20.0)])
def test_without_noise_the_threshold_reaches_the_quantile(quantile: float | None, start: float) -> None:
    """All 41 norms 1, 2 .. 41 in every step: C ends between the two at which the fraction passes the target."""
    callback = Lap2Privacy(**FREE, max_grad_norm=start, target_quantile=quantile, clip_learning_rate=0.5)
    fit(callback, of_norms(torch.arange(1.0, 42.0), 41), max_steps=90)
    below = 41 * (0.5 if quantile is None else quantile)
    assert math.floor(below) - 0.5 <= callback.clipping_threshold <= math.ceil(below) + 0.5
    assert callback.max_grad_norm == start


def test_with_noise_and_draws_it_stays_near_the_median() -> None:
    norms = torch.exp(torch.randn(400, generator=torch.Generator().manual_seed(3)))
    callback = Lap2Privacy(**{**NOISY, "count_noise_scale": None}, max_grad_norm=50.0)
    seen = fit(callback, of_norms(norms, 100), max_steps=80)
    assert 0.75 < callback.clipping_threshold / float(norms.median()) < 1.33
    assert seen[0].scale == 75.0
    assert callback.scale == 1.5 * callback.clipping_threshold


def test_the_threshold_stays_in_its_public_range() -> None:
    up = Lap2Privacy(**FREE, max_grad_norm=2.0, clip_learning_rate=1e3)
    fit(up, of_norms(torch.full((8,), 1e6), 8), max_steps=3)
    assert up.clipping_threshold == 2.0 * RANGE
    down = Lap2Privacy(**FREE, max_grad_norm=2.0, clip_learning_rate=1e300)
    fit(down, of_norms(torch.full((8,), 1e-6), 8), max_steps=3)
    assert down.clipping_threshold == 2.0 / RANGE


def test_a_short_window_moves_the_threshold_by_its_share() -> None:
    """Where the fraction is at its target nothing moves, whole window or part of one."""
    threshold = AdaptiveThreshold(Lap2Privacy(**FREE, target_quantile=0.75, clip_learning_rate=1.0).settings, {})
    threshold.follow(count=25.0, expected=100)  # 75 below, 25 above
    threshold.follow(count=10.0, expected=100, part=0.4)  # 30 below, 10 above
    assert threshold.value == pytest.approx(1.0, rel=1e-12)
    threshold.follow(count=-50.0, expected=100)
    assert threshold.value == pytest.approx(math.exp(0.75), rel=1e-12)
    threshold.follow(count=math.nan, expected=100)
    assert threshold.value == pytest.approx(math.exp(0.75), rel=1e-12)


# -- releases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "batch_size", "epochs"), [(1, 12, 6), (3, 4, 6), (4, 2, 3)])
def test_accumulated_windows_count_once(accumulate: int, batch_size: int, epochs: int) -> None:
    """C by hand from what each window held, also where the last one of an epoch is short (6 batches in fours)."""
    spy = part_spy(pl)
    callback = Lap2Privacy(**FREE, max_grad_norm=9.5, target_quantile=0.3)
    data = of_norms(torch.arange(1.0, 13.0), batch_size)
    seen = fit(callback, data, None, spy, max_epochs=epochs, accumulate_grad_batches=accumulate)
    shares = {part.release: part.of / accumulate for part in spy.parts}
    assert len(seen) == callback.steps == len(shares)
    threshold = 9.5
    for release in seen:
        count = float(release.before[-1])
        if accumulate * batch_size == 12:  # q = 1: everybody is in it
            assert count == sum(0.5 if norm <= threshold else -0.5 for norm in range(1, 13))
        excess = count / callback.expected_batch_size + shares[release.number] * (0.5 - 0.3)
        threshold *= math.exp(-0.2 * excess)
    assert callback.clipping_threshold == pytest.approx(threshold, rel=1e-6)
    assert len(set(shares.values())) == (2 if accumulate == 4 else 1)


def test_empty_draws_count_nobody_and_are_noised() -> None:
    spy = part_spy(pl)
    callback = Lap2Privacy(**NOISY)
    seen = fit(callback, of_norms(torch.arange(1.0, 13.0), 1), None, spy, max_steps=30)
    empty = [release for release, part in zip(seen, spy.parts, strict=True) if part.count == 0]
    assert 3 < len(empty) < 25
    for release in empty:
        assert release.is_noise_alone, "its count too"
    assert sum(bool(release.after[-1]) for release in empty) >= len(empty) - 1
    assert callback.accountant.steps == 30


def test_noise_follows_the_threshold_and_the_count_has_its_own_scale() -> None:
    callback = Lap2Privacy(**NOISY, max_grad_norm=0.5)
    seen = fit(callback, of_norms(torch.arange(1.0, 61.0), 20), max_steps=150)
    threshold, noise, shares = 0.5, [], []
    for release in seen:
        assert release.scale == pytest.approx(1.5 * threshold, rel=1e-4)
        factor = release.scale / 4.0
        own, count = float(release.before[-1]), float(release.after[-1]) / factor * 20
        assert own == round(2 * own) / 2, "halves"
        noise.append(count - own)
        shares.append((release.after[:-1] * 20 - release.before[:-1]) / release.scale)
        threshold *= math.exp(-0.2 * count / 20)
    assert callback.clipping_threshold == pytest.approx(threshold, rel=1e-4)
    # 150 draws of Laplace(4), whose mean absolute value is 4 within 8 %
    assert torch.tensor(noise).abs().mean() == pytest.approx(4.0, rel=0.24)
    assert torch.stack(shares).abs().mean() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_engines_agree_over_a_whole_fit(engine: str) -> None:
    ends = []
    for name in ("vmap", engine):
        callback = Lap2Privacy(**{**NOISY, "bound": "tight", "eps": math.inf}, engine=name)
        module = classifier(pl)
        fit(callback, loader(24, 8), module, max_steps=6)
        ends.append((callback.clipping_threshold, weights(module)))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-6)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-5, atol=1e-6)


# -- the ledger -------------------------------------------------------------------------------------------------------


def charged(callback: Any) -> list[dict[str, Any]]:
    return callback.accountant.state_dict()["releases"]


@pytest.mark.filterwarnings("ignore:.*noisy count costs")
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "laplace_l1"])
@pytest.mark.parametrize("clipping", ["automatic", "per_layer", "adaptive"])
def test_what_is_charged(clipping: str, mechanism: str) -> None:
    """Blocks by hand; tests/accounting/test_composite.py holds what blocks cost."""
    module = pl.LightningModule()
    module.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(module.layers(batch[0]), batch[1])
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    callback = Lap2Privacy(eps=math.inf, noise_multiplier=1.5, clipping=clipping, mechanism=mechanism)
    fit(callback, loader(40, 10), module, max_steps=4)
    (release,) = charged(callback)
    assert (release["dimension"], release["sample_rate"], release["steps"]) == (66, 0.25, 4)
    share = {"laplace": 0.5, "laplace_l1": 0.25}.get(mechanism)
    layers = [[16, share, 1], [20, share, 2], [10, share, 1]] if clipping == "per_layer" and share else None
    assert release.get("layers") == layers
    # a twentieth of the expected batch is 1/2, all that one example can add to the count
    assert release["extra_blocks"] == ([[1, 1]] if clipping == "adaptive" else [])
    assert release["noise_multiplier"] == 1.5


def test_a_pass_over_unsampled_data_charges_one_count() -> None:
    callback = Lap2Privacy(**NOISY, sampling="none")
    seen = fit(callback, loader(24, 8), classifier(pl), max_epochs=2)
    assert (len(seen), callback.steps, callback.accountant.steps) == (6, 6, 2)
    assert charged(callback)[0]["extra_blocks"] == [[1, 8]]


def test_a_count_that_costs_more_than_the_budget_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"noisy count alone \(count_noise_scale=0.2 examples\) .* eps=1; give a larger"
    ):
        fit(Lap2Privacy(eps=1.0, clipping="adaptive"), loader(16, 4), classifier(pl), max_steps=100)


def test_a_dear_count_warns() -> None:
    callback = Lap2Privacy(**{**NOISY, "count_noise_scale": 0.5})
    with pytest.warns(UserWarning, match=r"noisy count costs about 69% of what a release costs"):
        fit(callback, loader(16, 4), classifier(pl), max_steps=1)


def test_unfreezing_changes_the_layers_that_are_charged() -> None:
    module = classifier(pl)
    module.head = nn.Parameter(torch.ones(2))
    module.head.requires_grad_(False)
    plain = module.loss
    module.loss = lambda batch: plain(batch) * module.head.sum()

    class Unfreezing(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            module.head.requires_grad_(trainer.current_epoch > 0)

    callback = Lap2Privacy(**{**NOISY, "clipping": "per_layer", "count_noise_scale": None})
    fit(callback, loader(16, 4), module, Unfreezing(), max_epochs=2)
    half = 1 / math.sqrt(2)
    assert [(r["dimension"], r["layers"], r["steps"]) for r in charged(callback)] == [
        (8, [[8, 1, 1]], 4),
        (10, [[2, half, 1], [8, half, 1]], 4),
    ]


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Interrupt(Exception):
    """Ends a run as a kill would: nothing is closed in order."""


class Interrupting(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise Interrupt


def checkpoints(directory: Path) -> Any:
    return pl.callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=4, save_top_k=-1, filename="{step}")


def test_a_resumed_run_equals_one_that_was_not(tmp_path: Path) -> None:
    whole, module = Lap2Privacy(**NOISY), classifier(pl)
    fit(whole, loader(16, 4), module, checkpoints(tmp_path), max_epochs=2)
    resumed, again = Lap2Privacy(**NOISY), classifier(pl)
    quiet_trainer(pl, resumed, max_epochs=2).fit(again, loader(16, 4), ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.clipping_threshold == whole.clipping_threshold != 1.0
    assert torch.equal(weights(module), weights(again))
    assert resumed.accountant == whole.accountant


def test_after_a_kill_clipping_and_noise_use_the_checkpoints_threshold(tmp_path: Path) -> None:
    killed = Lap2Privacy(**NOISY)
    with pytest.raises(Interrupt):
        fit(killed, loader(16, 4), classifier(pl), checkpoints(tmp_path), Interrupting(), max_epochs=3)
    path = tmp_path / "step=4.ckpt"
    kept = torch.load(path, weights_only=True)["callbacks"][killed.state_key]["clipping"]["threshold"]
    assert killed.steps == 6 and killed.clipping_threshold != kept != 1.0
    resumed = Lap2Privacy(**NOISY)
    trainer = quiet_trainer(pl, resumed, max_steps=5, max_epochs=-1)
    with watched_releases() as seen:
        trainer.fit(classifier(pl), loader(16, 4), ckpt_path=path)
    assert [release.number for release in seen] == [6], "no release number, and so no seeded noise, is used twice"
    assert seen[0].scale == 1.5 * kept
    truth = MajorizedAccountant(bound="joint")
    truth.step(noise_multiplier=1.5, sample_rate=0.25, dimension=8, extra_blocks=[(1, 8.0)], steps=7)
    assert resumed.accountant == truth


def test_another_start_begins_anew_and_another_clipping_ignores_the_threshold(tmp_path: Path) -> None:
    fit(Lap2Privacy(**NOISY), loader(16, 4), classifier(pl), checkpoints(tmp_path), max_epochs=1)
    for changes, scale in (
        ({"max_grad_norm": 3.0}, 4.5),
        ({"clipping": "flat", "count_noise_scale": None}, 1.5),
    ):
        callback = Lap2Privacy(**{**NOISY, **changes})
        with watched_releases() as seen:
            trainer = quiet_trainer(pl, callback, max_steps=5, max_epochs=-1)
            trainer.fit(classifier(pl), loader(16, 4), ckpt_path=tmp_path / "step=4.ckpt")
        assert seen[0].scale == scale
        assert len(charged(callback)) == (2 if "clipping" in changes else 1)


def test_calibrated_noise_is_kept_on_resume(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eps": 30.0, "bound": "joint", "clipping": "adaptive", "count_noise_scale": 4.0}
    first = Lap2Privacy(**arguments)
    fit(first, loader(16, 4), classifier(pl), checkpoints(tmp_path), max_epochs=2)
    second = Lap2Privacy(**arguments)
    quiet_trainer(pl, second, max_epochs=2).fit(classifier(pl), loader(16, 4), ckpt_path=tmp_path / "step=4.ckpt")
    assert second.noise_multiplier == first.noise_multiplier
    assert 29.8 < second.accountant.epsilon(delta=1e-5) <= 30.0


@pytest.mark.parametrize(
    "damaged", [{"threshold": 1.0}, {"start": 1.0, "threshold": -1.0}, {"start": 1.0, "threshold": math.nan}]
)
def test_a_damaged_threshold_is_refused(damaged: dict[str, float]) -> None:
    callback = Lap2Privacy(**NOISY)
    callback._ledger.clipping = damaged
    with pytest.raises(ValueError, match="damaged"):
        Lap2Privacy(**NOISY).load_state_dict(callback.state_dict())


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_threshold_is_logged_and_reported(tmp_path: Path) -> None:
    callback = Lap2Privacy(**NOISY)
    trainer = quiet_trainer(pl, callback, max_epochs=1, logger=pl.loggers.CSVLogger(tmp_path))
    trainer.fit(classifier(pl), loader(16, 4))
    logged = float(trainer.logged_metrics["privacy/max_grad_norm"])
    assert logged == pytest.approx(callback.clipping_threshold, rel=1e-6)
    report = callback.report()
    assert report.max_grad_norm == 1.0
    assert report.clipping_threshold == callback.clipping_threshold
    assert (report.target_quantile, report.clip_learning_rate, report.count_noise_scale) == (0.5, 0.2, 4.0)
    flat = MajorizedAccountant(bound="joint")
    flat.step(noise_multiplier=1.5, sample_rate=0.25, dimension=8, steps=4)
    assert report.epsilon_without_count == flat.epsilon(delta=1e-5) < report.epsilon
    assert f"The clipping threshold went from 1 to {callback.clipping_threshold:.4g}, after the 0.5 quantile" in str(
        report
    )


def test_other_clippings_say_nothing_of_a_threshold() -> None:
    callback = Lap2Privacy(**{**NOISY, "clipping": "automatic", "count_noise_scale": None})
    trainer = quiet_trainer(pl, callback, max_epochs=1)
    trainer.fit(classifier(pl), loader(16, 4))
    assert "privacy/max_grad_norm" not in trainer.logged_metrics
    assert "threshold" not in str(callback.report())
    assert callback.report().clipping == "automatic"


def test_yaml_reaches_every_argument() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Lap2Privacy, "privacy")
    text = (
        "{privacy: {eps: 1.0, clipping: adaptive, target_quantile: 0.7, clip_learning_rate: 0.1, count_noise_scale: 3}}"
    )
    settings = Lap2Privacy(**parser.parse_string(text).privacy.as_dict()).settings
    assert (settings.clipping, settings.target_quantile) == ("adaptive", 0.7)
    assert (settings.clip_learning_rate, settings.count_noise_scale) == (0.1, 3)


@pytest.mark.parametrize("bound", ["tight", "joint"])
def test_layers_that_may_be_unfrozen_are_planned_for_under_the_tight_bound_only(bound: str) -> None:
    """As one vector all parameters never cost less than some of them in layers: true of "tight", not of "joint"."""

    class Unfreeze(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            pass

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            pass

    callback = Lap2Privacy(eps=3.0, clipping="per_layer", bound=bound)
    fit = quiet_trainer(pl, callback, Unfreeze(), max_epochs=1).fit
    if bound == "joint":
        with pytest.raises(ValueError, match=r"bound='joint' with clipping='per_layer' and a finetuning callback"):
            fit(classifier(pl), loader(40, 8))
        assert callback.steps == 0
    else:
        fit(classifier(pl), loader(40, 8))
        assert 0 < callback.epsilon <= 3.0
