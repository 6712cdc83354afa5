"""Hyperparameters in trackers that refuse to change them, or refuse them at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import LIGHTNING_WARNINGS, Namespace, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
GIVEN: dict[str, Any] = {"noise_multiplier": None, "bound": "joint"}


def tracker(namespace: Namespace, directory: Path, *, raises: type[Exception] | None = None) -> Any:
    """As MLflow: what was logged once under a name cannot be changed."""
    from importlib import import_module

    home = import_module(f"{namespace.pl.__name__}.loggers")

    class Tracker(home.CSVLogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(directory)
            self.params: dict[str, Any] = {}

        def log_hyperparams(self, params: Any = None, *args: Any, **options: Any) -> None:
            if raises is not None and params:
                raise raises("no")
            for name, value in dict(params or {}).items():
                if self.params.setdefault(name, value) != value:
                    raise ValueError(f"changing param values is not allowed: {name}")

    return Tracker()


def fit(namespace: Namespace, logger: Any, directory: Path, *, path: Path | None = None, **arguments: Any) -> Any:
    callback = namespace.lap2(**{**GIVEN, **arguments})
    trainer = quiet_trainer(namespace.pl, callback, logger=logger, max_epochs=1 if path is None else 2)
    trainer.fit(classifier(namespace.pl), loader(32, 4), ckpt_path=path)
    trainer.save_checkpoint(directory / "last.ckpt")
    return callback


def test_multiplier_of_a_resumed_run_is_logged_under_a_name_of_its_own(namespace: Namespace, tmp_path: Path) -> None:
    logger = tracker(namespace, tmp_path)
    first = fit(namespace, logger, tmp_path, eps=1.0)
    second = fit(namespace, logger, tmp_path, eps=3.0, path=tmp_path / "last.ckpt")
    assert second.steps == 16
    assert first.noise_multiplier != second.noise_multiplier
    assert logger.params == {
        "privacy/delta": 1e-5,
        "privacy/sample_rate": 1 / 8,
        "privacy/max_grad_norm": 1.0,
        "privacy/noise_multiplier": first.noise_multiplier,
        "privacy/noise_multiplier_from_release_9": second.noise_multiplier,
    }


def test_logger_that_raises_is_warned_of_and_training_goes_on(namespace: Namespace, tmp_path: Path) -> None:
    loggers = [tracker(namespace, tmp_path, raises=ConnectionError), tracker(namespace, tmp_path)]
    with pytest.warns(UserWarning, match=r"could not be logged with Tracker \(ConnectionError: no\)") as warned:
        callback = fit(namespace, loggers, tmp_path, eps=1.0)
    assert callback.steps == 8
    assert sum("could not be logged" in str(w.message) for w in warned) == 1
    assert loggers[1].params["privacy/noise_multiplier"] == callback.noise_multiplier
