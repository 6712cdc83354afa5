"""YAML = Python, and what else a LightningCLI user types."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from lightning_lap2 import Lap2Privacy
from tests.examples.conftest import ROOT

Example = Callable[[str], ModuleType]
CONFIGS = ROOT / "examples" / "configs"


@pytest.fixture(autouse=True)
def _one_callback_of_the_name() -> None:
    """jsonargparse looks for short names among the classes that live: a search that another test ran may have left one
    of this name for the garbage collector."""
    gc.collect()


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def no_deprecation_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jsonargparse, for what Lightning calls."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def privacy_of(trainer: L.Trainer) -> Lap2Privacy:
    (found,) = [callback for callback in trainer.callbacks if isinstance(callback, Lap2Privacy)]
    return found


def flags(settings: dict[str, Any]) -> list[str]:
    return [f"--trainer.{key}={str(value).lower()}" for key, value in settings.items()]


def test_scenario_15_yaml_gives_the_same_weights_as_python(example: Example, tmp_path: Path) -> None:
    config = yaml.safe_load((CONFIGS / "digits.yaml").read_text())
    config["trainer"] |= {**QUIET, "max_epochs": 2}
    config["trainer"]["callbacks"][0]["init_args"]["noise_seed"] = 7
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    from_yaml = example("cli").main(["fit", "--config", "run.yaml"])

    digits = example("digits")
    L.seed_everything(1, workers=True, verbose=False)
    privacy = Lap2Privacy(eps=3.0, delta=1e-4, noise_seed=7)
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=[privacy], **QUIET)
    model = digits.Digits()
    trainer.fit(model, datamodule=digits.DigitsData())

    assert privacy_of(from_yaml.trainer).settings == privacy.settings
    assert privacy.steps == privacy_of(from_yaml.trainer).steps == 12
    for ours, theirs in zip(model.parameters(), from_yaml.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("config", "more"), [("digits.yaml", []), ("fashion_mnist.yaml", ["--data.data=/nowhere"])])
def test_print_config_shows_every_argument(
    example: Example, capsys: pytest.CaptureFixture[str], config: str, more: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        example("cli").main(["fit", "--config", str(CONFIGS / config), *more, "--print_config"])
    assert exit_.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    (callback,) = shown["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_lap2.Lap2Privacy"
    settings = set(Lap2Privacy(eps=1.0).settings.__dict__) - {"run_limit"}  # set by a search alone
    assert set(callback["init_args"]) == settings
    Lap2Privacy(**callback["init_args"])


def test_a_callback_added_on_the_command_line(example: Example) -> None:
    arguments = ["--model=Digits", "--data=DigitsData", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    added = ["--trainer.callbacks+=Lap2Privacy", "--trainer.callbacks.eps=1.0", "--trainer.callbacks.delta=1e-4"]
    cli = example("cli").main(["fit", *arguments, *flags(QUIET), *added])
    privacy = privacy_of(cli.trainer)
    assert privacy.eps == 1.0 and privacy.delta == 1e-4
    assert privacy.steps == 6 and 0 < privacy.epsilon <= 1.0


def test_no_budget_is_written_inf(example: Example) -> None:
    arguments = ["--model=Digits", "--data=DigitsData", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    added = [
        "--trainer.callbacks+=Lap2Privacy",
        "--trainer.callbacks.eps=.inf",
        "--trainer.callbacks.noise_multiplier=0.0",
        "--trainer.callbacks.delta=1e-4",
    ]
    cli = example("cli").main(["fit", *arguments, *flags(QUIET), *added])
    assert privacy_of(cli.trainer).epsilon == float("inf")
