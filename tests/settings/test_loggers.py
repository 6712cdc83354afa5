"""Where epsilon and the report can be read: event files, CSV, progress bar, callbacks; in both namespaces."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import LIGHTNING_WARNINGS, Namespace, classifier, loader, quiet_trainer

pytestmark = [
    *LIGHTNING_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*np\\.bool8.*"),  # tensorboard's reader on some numpy versions
]

HYPERPARAMETERS = {"privacy/delta", "privacy/noise_multiplier", "privacy/sample_rate", "privacy/max_grad_norm"}


def loggers(namespace: Namespace) -> Any:
    return import_module(f"{namespace.pl.__name__}.loggers")


def fit(namespace: Namespace, tmp_path: Path, logger: Any, *callbacks: Any, **options: Any) -> tuple[Any, Any]:
    callback = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(
        namespace.pl, callback, *callbacks, logger=logger, max_epochs=2, default_root_dir=tmp_path, **options
    )
    trainer.fit(classifier(namespace.pl), loader(32, 4))
    return callback, trainer


def check_report(directory: Path, callback: Any) -> None:
    content = json.loads((directory / "privacy_report.json").read_text())
    assert content["steps"] == callback.steps == 16
    assert content["epsilon"] == pytest.approx(callback.accountant.epsilon(delta=callback.delta))
    assert content["eps"] == 2.0
    assert {"delta", "mechanism", "bound", "sampling", "max_grad_norm", "scale", "sample_rate"} <= content.keys()
    assert (directory / "privacy_report.md").read_text() == str(callback.report())
    assert not list(directory.glob("*.partial"))


def epsilons_of_event_file(directory: Path) -> tuple[list[float], Any]:
    """As tensorboard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [event.value for event in accumulator.Scalars("privacy/epsilon")], accumulator


def hyperparameters_of_event_file(accumulator: Any) -> set[str]:
    """Names on TensorBoard's HPARAMS page."""
    from tensorboard.plugins.hparams import metadata

    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return set(metadata.parse_session_start_info_plugin_data(content).hparams)


def check_epsilons(values: list[float]) -> None:
    assert len(values) == 16
    assert values == sorted(values)
    assert 0 < values[0] < values[-1]
    assert 1.99 < values[-1] <= 2.0 + 1e-6  # event files hold fp32


def test_tensorboard(namespace: Namespace, tmp_path: Path) -> None:
    logger = loggers(namespace).TensorBoardLogger(tmp_path, name="runs")
    callback, trainer = fit(namespace, tmp_path, logger)
    directory = Path(trainer.log_dir)
    values, accumulator = epsilons_of_event_file(directory)
    check_epsilons(values)
    assert "privacy/epsilon_epoch" not in accumulator.Tags()["scalars"], "an epoch mean of epsilon would be wrong"
    assert set(logger.hparams) >= HYPERPARAMETERS
    assert hyperparameters_of_event_file(accumulator) >= HYPERPARAMETERS
    check_report(directory, callback)


def test_csv(namespace: Namespace, tmp_path: Path) -> None:
    logger = loggers(namespace).CSVLogger(tmp_path, name="runs")
    callback, trainer = fit(namespace, tmp_path, logger)
    directory = Path(trainer.log_dir)
    with (directory / "metrics.csv").open() as file:
        values = [float(row["privacy/epsilon"]) for row in csv.DictReader(file) if row["privacy/epsilon"]]
    check_epsilons(values)
    check_report(directory, callback)


def test_several_loggers(namespace: Namespace, tmp_path: Path) -> None:
    """Both get everything; the report lies in the first one's folder, which is the Trainer's log_dir."""
    tensorboard = loggers(namespace).TensorBoardLogger(tmp_path, name="tensorboard")
    plain = loggers(namespace).CSVLogger(tmp_path, name="csv")
    callback, trainer = fit(namespace, tmp_path, [tensorboard, plain])
    check_epsilons(epsilons_of_event_file(Path(tensorboard.log_dir))[0])
    assert (Path(plain.log_dir) / "metrics.csv").is_file()
    check_report(Path(trainer.log_dir), callback)
    assert set(tensorboard.hparams) >= HYPERPARAMETERS


def test_no_logger_and_no_checkpoints_write_nothing(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback, _ = fit(namespace, tmp_path, False)
    assert list(tmp_path.iterdir()) == []
    assert callback.report().steps == 16


def test_no_logger_report_beside_the_checkpoints(namespace: Namespace, tmp_path: Path) -> None:
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "checkpoints")
    callback, _ = fit(namespace, tmp_path, False, checkpoint)
    check_report(tmp_path / "checkpoints", callback)


def test_no_logger_report_beside_the_default_checkpoints(namespace: Namespace, tmp_path: Path) -> None:
    callback, _ = fit(namespace, tmp_path, False, enable_checkpointing=True)
    check_report(tmp_path / "checkpoints", callback)


def test_hyperparameters_are_logged_once(namespace: Namespace, tmp_path: Path) -> None:
    home = loggers(namespace)

    class Counting(home.CSVLogger):  # type: ignore[name-defined, misc]
        calls: list[Any] = []  # noqa: RUF012

        def log_hyperparams(self, params: Any = None, *args: Any, **options: Any) -> None:
            if params and "privacy/delta" in params:
                self.calls.append(dict(params))
            super().log_hyperparams(params, *args, **options)

    callback, _ = fit(namespace, tmp_path, Counting(tmp_path))
    assert Counting.calls == [
        {
            "privacy/delta": 1e-5,
            "privacy/noise_multiplier": callback.noise_multiplier,
            "privacy/sample_rate": 4 / 32,
            "privacy/max_grad_norm": 1.0,
        }
    ]


def test_epsilon_is_logged_at_the_trainers_interval(namespace: Namespace, tmp_path: Path) -> None:
    logger = loggers(namespace).TensorBoardLogger(tmp_path, name="runs")
    _, trainer = fit(namespace, tmp_path, logger, log_every_n_steps=4)
    values, _ = epsilons_of_event_file(Path(trainer.log_dir))
    assert len(values) == 4


def test_progress_bar(namespace: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, trainer = fit(namespace, tmp_path, False, enable_progress_bar=True)
    assert 1.99 < trainer.progress_bar_metrics["privacy/epsilon"] <= 2.0 + 1e-6
    printed = capsys.readouterr()
    assert "privacy/epsilon" in printed.out + printed.err


def test_scenario_18_early_stopping_on_epsilon(namespace: Namespace, tmp_path: Path) -> None:
    stopping = namespace.pl.callbacks.EarlyStopping(
        "privacy/epsilon", mode="max", stopping_threshold=1.0, check_on_train_epoch_end=True
    )
    callback = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, callback, stopping, max_epochs=10)
    trainer.fit(classifier(namespace.pl), loader(32, 4))
    assert stopping.stopped_epoch > 0
    assert callback.steps == trainer.global_step == 8 * (stopping.stopped_epoch + 1) < 80
    assert 1.0 < callback.accountant.epsilon(delta=callback.delta) < 2.0
    assert not any("watches" in caveat for caveat in callback.report().caveats)


def test_scenario_18_model_checkpoint_on_epsilon(namespace: Namespace, tmp_path: Path) -> None:
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path, monitor="privacy/epsilon", mode="min", save_top_k=1, filename="{step}"
    )
    fit(namespace, tmp_path, False, checkpoint)
    assert Path(checkpoint.best_model_path).name == "step=8.ckpt"
    assert 0 < float(checkpoint.best_model_score) < 2


def test_report_is_written_when_training_raises(namespace: Namespace, tmp_path: Path) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise ArithmeticError("the user's own error")
        return module.loss(batch)

    logger = loggers(namespace).CSVLogger(tmp_path, name="runs")
    callback = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, callback, logger=logger, max_epochs=2)
    with pytest.raises(ArithmeticError):
        trainer.fit(classifier(namespace.pl, step=step), loader(32, 4))
    content = json.loads((Path(logger.log_dir) / "privacy_report.json").read_text())
    assert content["steps"] == callback.steps == 5
    assert 0 < content["epsilon"] < 2
