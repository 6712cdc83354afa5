"""Trainer flags one by one: each keeps one charge per release and the budget; in both namespaces."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.callback import session as session_module
from tests.helpers import (
    LIGHTNING_WARNINGS,
    Namespace,
    classifier,
    loader,
    quiet_trainer,
    records,
    watched_releases,
    weights,
)

pytestmark = LIGHTNING_WARNINGS


def fit(namespace: Namespace, *callbacks: Any, validation: bool = False, **options: Any) -> tuple[Any, Any, int]:
    """Callback, Trainer and number of releases of a fit on 32 examples in batches of 4."""
    workers = options.pop("workers", {})
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, *callbacks, **{"max_epochs": 2, **options})
    with watched_releases() as seen:
        trainer.fit(classifier(namespace.pl), loader(32, 4, **workers), loader(8, 4) if validation else None)
    assert lap2.steps == lap2.accountant.steps == trainer.global_step == len(seen)
    assert lap2.accountant.epsilon(delta=lap2.delta) <= 2.0
    return lap2, trainer, len(seen)


@pytest.mark.parametrize(
    ("options", "releases"),
    [
        ({}, 16),
        ({"limit_train_batches": 3}, 6),
        ({"limit_train_batches": 0.5}, 8),
        ({"limit_train_batches": 100}, 16),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 2}, 4),
        ({"max_epochs": None, "max_steps": 11}, 11),
        ({"max_epochs": 2, "max_steps": 100}, 16),
        ({"max_epochs": 5, "max_steps": 9, "min_epochs": 2}, 9),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, 24),
        ({"workers": {"num_workers": 1, "persistent_workers": True}, "max_epochs": 3}, 24),
        (
            {
                "workers": {"num_workers": 2, "persistent_workers": True},
                "reload_dataloaders_every_n_epochs": 1,
                "limit_train_batches": 3,
            },
            6,
        ),
        ({"validation": True, "val_check_interval": 0.25}, 16),
        ({"validation": True, "val_check_interval": 3}, 16),
        ({"validation": True, "val_check_interval": 5, "check_val_every_n_epoch": None}, 16),
        ({"detect_anomaly": True}, 16),
        ({"inference_mode": False, "validation": True}, 16),
        ({"use_distributed_sampler": False}, 16),
        ({"deterministic": True, "benchmark": False}, 16),
        ({"profiler": "simple"}, 16),
    ],
    ids=str,
)
def test_one_charge_per_release(namespace: Namespace, options: dict[str, Any], releases: int) -> None:
    lap2, _, made = fit(namespace, **options)
    assert made == releases
    assert lap2.planned_steps == releases
    assert lap2.accountant.epsilon(delta=lap2.delta) > 1.99, "the plan was for another number of steps"


def test_no_training_batches_charge_nothing(namespace: Namespace) -> None:
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=2, limit_train_batches=0)
    trainer.fit(classifier(namespace.pl), loader(32, 4))
    assert (lap2.steps, lap2.epsilon) == (0, 0.0)


def test_persistent_workers_draw_anew_every_epoch(namespace: Namespace) -> None:
    draws: list[bytes] = []

    class Witness(namespace.pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            draws.append(batch[0].numpy().tobytes())

    trainer = quiet_trainer(namespace.pl, namespace.lap2(eps=2.0), Witness(), max_epochs=3)
    trainer.fit(classifier(namespace.pl), loader(200, 40, num_workers=2, persistent_workers=True))
    assert len(set(draws)) == len(draws) == 15


def test_scenario_14_fast_dev_run_is_charged_and_says_so(namespace: Namespace, tmp_path: Path) -> None:
    home = Path.cwd()
    lap2, _, made = fit(namespace, fast_dev_run=True, logger=True, default_root_dir=tmp_path)
    assert made == 1
    assert any("fast_dev_run" in caveat for caveat in lap2.report().caveats)
    assert 0 < lap2.epsilon <= 2.0
    assert list(tmp_path.iterdir()) == [], "a trial run leaves no files"
    assert not (home / "privacy_report.json").exists()


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_scenario_14_evaluation_charges_nothing(namespace: Namespace, function: str) -> None:
    lap2 = namespace.lap2(eps=2.0)
    trainer, module = quiet_trainer(namespace.pl, lap2, max_epochs=1), classifier(namespace.pl)
    getattr(trainer, function)(module, loader(8, 4))
    assert (lap2.steps, lap2.accountant.steps, lap2.epsilon) == (0, 0, 0.0)
    trainer.fit(module, loader(32, 4), loader(8, 4))
    spent, before = lap2.epsilon, weights(module)
    getattr(trainer, function)(module, loader(8, 4))
    assert (lap2.steps, lap2.epsilon) == (8, spent)
    assert torch.equal(weights(module), before)


def test_barebones(namespace: Namespace) -> None:
    """Lightning's mode without loggers, bars and checkpoints: our own log call must not warn at every step."""
    lap2 = namespace.lap2(eps=2.0)
    module = classifier(namespace.pl, step=lambda module, batch, batch_idx: module.loss(batch))
    trainer = namespace.pl.Trainer(barebones=True, accelerator="cpu", max_epochs=2, callbacks=[lap2])
    trainer.fit(module, loader(32, 4))
    assert lap2.steps == trainer.global_step == 16
    assert lap2.accountant.epsilon(delta=lap2.delta) <= 2.0


def test_gradient_clip_val_warns(namespace: Namespace) -> None:
    with pytest.warns(UserWarning, match="gradient_clip_val=0.5.*clips the noised gradient"):
        fit(namespace, gradient_clip_val=0.5)


def test_epsilon_is_read_the_same_twice_in_every_hook(namespace: Namespace) -> None:
    values: list[float] = []

    class Reading(namespace.pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            first = trainer.callbacks[0].epsilon
            assert trainer.callbacks[0].epsilon == first
            values.append(first)

    lap2, _, _ = fit(namespace, Reading())
    assert values == sorted(values)
    assert values[-1] >= lap2.accountant.epsilon(delta=lap2.delta)


def test_data_module_and_hooks_of_the_module(namespace: Namespace) -> None:
    """The train loader may come from anywhere."""

    class Data(namespace.pl.LightningDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            return loader(32, 4, shuffle=True)

        def val_dataloader(self) -> Any:
            return loader(8, 4)

    for kind in ("datamodule", "module"):
        lap2, module = namespace.lap2(eps=2.0), classifier(namespace.pl)
        trainer = quiet_trainer(namespace.pl, lap2, max_epochs=2)
        if kind == "datamodule":
            trainer.fit(module, datamodule=Data())
        else:
            module.train_dataloader = lambda: loader(32, 4)
            trainer.fit(module)
        assert lap2.steps == 16
        assert lap2.sample_rate == 4 / 32


@pytest.mark.parametrize("kind", ["list", "dict", "CombinedLoader"])
def test_one_loader_in_a_container(namespace: Namespace, kind: str) -> None:
    """The step gets its batch in the same container, in the self-check too."""
    key: Any = "only" if kind == "dict" else 0
    module = classifier(namespace.pl, step=lambda module, batch, batch_idx: module.loss(batch[key]))
    data: Any = {"only": loader(32, 4)} if kind == "dict" else [loader(32, 4)]
    if kind == "CombinedLoader":
        data = import_module(f"{namespace.pl.__name__}.utilities").CombinedLoader(data)
    lap2 = namespace.lap2(eps=2.0)
    quiet_trainer(namespace.pl, lap2, max_epochs=2).fit(module, data)
    assert lap2.steps == 16


def test_data_that_changes_between_epochs_is_refused(namespace: Namespace) -> None:
    sizes = iter((32, 36, 40))
    lap2, module = namespace.lap2(eps=2.0), classifier(namespace.pl)
    module.train_dataloader = lambda: loader(next(sizes), 4)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ValueError, match="train data changed between epochs"):
        trainer.fit(module)
    assert lap2.steps == 8


def test_on_train_batch_start_that_skips_the_rest_of_an_epoch_is_refused(namespace: Namespace) -> None:
    """What it skips by may be what the batch holds; then the number of releases tells of records."""
    lap2, module = namespace.lap2(eps=2.0), classifier(namespace.pl)
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 5 else None
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=2, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="on_train_batch_start returned -1"), watched_releases() as seen:
        trainer.fit(module, loader(32, 4))
    assert lap2.steps == len(seen) == 2


def test_step_schedulers_see_the_capped_number_of_steps(namespace: Namespace) -> None:
    seen: list[float] = []
    module = classifier(namespace.pl)

    def configure() -> Any:
        seen.append(module.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]

    module.configure_optimizers = configure
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module, loader(32, 4))
    assert seen == [12]
    assert lap2.steps == 12


def test_nothing_stays_patched(namespace: Namespace) -> None:
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=1)
    owners = (trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop)
    before = [set(vars(owner)) for owner in owners]
    trainer.fit(classifier(namespace.pl), loader(32, 4))
    after = [set(vars(owner)) for owner in owners]
    added = {"process_dataloader", "setup_data", "training_step", "on_run_start", "all_gather"}
    assert not any(added & (late - early) for early, late in zip(before, after, strict=True))
    assert session_module.FitSession.__name__ not in repr(vars(lap2)["_session"])


def test_batch_size_of_the_data_is_the_normaliser(namespace: Namespace) -> None:
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(classifier(namespace.pl), torch.utils.data.DataLoader(records(50), batch_size=4, drop_last=True))
    assert lap2.expected_batch_size == 12
    assert lap2.sample_rate == 12 / 50
