"""Epsilon in the logs is what ``self.log`` at every step would have put there: same steps, values, bar and metrics."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_lap2.callback.trainer.logged import StepValue
from tests.helpers import LIGHTNING_WARNINGS, NAMESPACES, Namespace, classifier, loader, quiet_trainer

pytestmark = [
    *LIGHTNING_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*np\\.bool8.*"),  # tensorboard's reader on some numpy versions
]
NAME = "privacy/epsilon"


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return Namespace.named(request.param)


class Always(StepValue):
    """The plain way, which the cheaper one must equal."""

    calls = 0

    def log(self, trainer: Any, module: Any, value: float) -> None:
        Always.calls += 1
        module.log(NAME, value, on_step=True, on_epoch=False, prog_bar=True)


def watcher(namespace: Namespace, seen: list[Any]) -> Any:
    class Watcher(namespace.pl.Callback):  # type: ignore[name-defined, misc]
        """What other callbacks can read at the end of every batch, and after every epoch."""

        def __init__(self, privacy: Any) -> None:
            self.privacy = privacy

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            metrics = trainer.callback_metrics
            assert metrics[NAME].item() == pytest.approx(self.privacy.epsilon, rel=1e-6)
            assert not metrics[NAME].requires_grad
            seen.append(
                (
                    trainer.global_step,
                    metrics[NAME].item(),
                    trainer.progress_bar_metrics[NAME],
                    trainer.logged_metrics[NAME].item(),
                    sorted(trainer.progress_bar_metrics),
                    sorted(metrics),
                )
            )

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            seen.append((trainer.current_epoch, {k: float(v) for k, v in trainer.callback_metrics.items()}))

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            seen.append(("validation", NAME in trainer.callback_metrics, trainer.sanity_checking))

    return Watcher


def run(namespace: Namespace, folder: Path, log: type[StepValue], **options: Any) -> tuple[list[Any], Any, Any]:
    """A seeded fit with both loggers and validation in the middle of epochs: what was seen, events and rows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = import_module(f"{namespace.pl.__name__}.loggers")
    tensorboard, table = home.TensorBoardLogger(folder / "events", name=""), home.CSVLogger(folder / "rows", name="")
    privacy = namespace.lap2(eps=2.0, noise_seed=3)
    privacy._logged = log(NAME, prog_bar=True)
    seen: list[Any] = []

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = module.loss(batch)
        module.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("public", module.loss(batch))

    model = classifier(namespace.pl, step=step)
    type(model).validation_step = validation_step
    trainer = quiet_trainer(
        namespace.pl,
        privacy,
        watcher(namespace, seen)(privacy),
        logger=[tensorboard, table],
        max_epochs=3,
        limit_val_batches=2,
        **options,
    )
    trainer.fit(model, loader(32, 4), loader(8, 4))
    accumulator = EventAccumulator(tensorboard.log_dir)
    accumulator.Reload()
    events = [(event.step, event.value) for event in accumulator.Scalars(NAME)]
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = [(row["step"], row[NAME], row["epoch"]) for row in csv.DictReader(file) if row[NAME]]
    return seen, events, rows


@pytest.mark.parametrize(
    "options",
    [
        {"log_every_n_steps": 1},
        {"log_every_n_steps": 3, "num_sanity_val_steps": 1, "val_check_interval": 3},
        {"log_every_n_steps": 2, "accumulate_grad_batches": 3},
    ],
    ids=["every step", "validation in between", "accumulation"],
)
def test_logs_bar_and_metrics_are_those_of_self_log(
    namespace: Namespace, tmp_path: Path, options: dict[str, Any]
) -> None:
    Always.calls = 0
    expected = run(namespace, tmp_path / "plain", Always, **options)
    found = run(namespace, tmp_path / "cheap", StepValue, **options)
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert found[2] == expected[2]
    steps = 24 // options.get("accumulate_grad_batches", 1)
    assert Always.calls == 24
    assert len(found[1]) == len(found[2]) == steps // options["log_every_n_steps"]


def test_self_log_is_called_once_an_epoch(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(namespace.pl)
    calls: list[float] = []
    plain = namespace.pl.LightningModule.log

    def log(self: Any, name: str, value: Any, **options: Any) -> None:
        if name == NAME:
            calls.append(value)
        plain(self, name, value, **options)

    monkeypatch.setattr(namespace.pl.LightningModule, "log", log)
    privacy = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, privacy, max_epochs=2)
    trainer.fit(model, loader(32, 4))
    assert len(calls) == 2
    assert calls == sorted(calls)
    # a second fit has results of its own
    again = quiet_trainer(namespace.pl, privacy, max_epochs=1)
    with pytest.warns(UserWarning, match="already spent"):
        again.fit(model, loader(32, 4))
    assert len(calls) == 2
