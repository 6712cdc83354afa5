"""``lightning-lap2 search``, and ``lightning-lap2 calibrate --mean-runs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.accounting.selection import RunCount, search_epsilon
from lightning_lap2.cli import main
from tests.audit.nets import Classes, Net
from tests.helpers import LIGHTNING_WARNINGS

pytestmark = LIGHTNING_WARNINGS


class Scored(Net):
    """Validates on its ``lr``, so that the best configuration is known; on other data than it trains on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", torch.tensor(self.lr))


class WithValidation(Classes):
    def val_dataloader(self) -> Any:
        return [torch.zeros(1, 10)]


CONFIG = """
model:
  class_path: tests.cli.test_search.Scored
  init_args: {lr: 0.1}
data:
  class_path: tests.cli.test_search.WithValidation
  init_args: {records: 64, batch_size: 32}
trainer: {max_steps: 2, accelerator: cpu}
search:
  eps: 3.0
  delta: 1.0e-3
  mean_runs: 2
  shape: 1
  seed: 4
  plan: {sample_rate: 0.5, steps: 2, dimension: 600}
score: val_score
space:
  model.init_args.lr: [0.1, 0.2, 0.4]
  data.init_args.batch_size: [16, 32]
  privacy.max_grad_norm: [0.5]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search.yaml").write_text(CONFIG)
    return tmp_path / "search.yaml"


def test_search(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["search", "--config", str(config)]
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["config"]["model.init_args.lr"] == pytest.approx(told["score"])
    assert told["run"]["sample_rate"] == told["config"]["data.init_args.batch_size"] / 64
    assert (told["run"]["max_grad_norm"], told["run"]["steps"]) == (0.5, 2)
    assert 0.0 < told["epsilon"] <= told["eps"] == 3.0
    assert "search: 100%" in err and "noise multiplier" not in err
    folder = config.parent / "private_search"
    (checkpoint,) = (folder / "best").rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    assert not list(folder.rglob("*events*"))
    # it is over: the result is printed again, nothing is run
    (checkpoint.parent / "mark").touch()
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("# Search report\n\nThe best run of a secret number")
    assert (checkpoint.parent / "mark").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--search.mean_runs", "0.5"], "mean_runs must be at least 1"),
        (["--score", "val_loss"], "logs no such metric, but val_score"),
        (["--space", '{"model.init_args.rate": [1]}'], "space names 'model.init_args.rate', which the config does not"),
        (["--space", '{"search.eps": [1]}'], "space names 'search.eps'"),
        (["--space", '{"trainer.max_steps": ["many"]}'], "does not fit"),
        (["--space", '{"privacy.sampling": ["none"]}'], "sampling, which must be one for all runs"),
        (["--space", '{"model.init_args.lr": []}'], "has no values"),
        (["--model", "nowhere.Model"], "nowhere"),
    ],
)
def test_errors_are_short_and_status_two(
    config: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "--config", str(config), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "lightning-lap2: error: " in err.splitlines()[-1] + err.splitlines()[0]


SETTING = ["--eps", "2", "--delta", "1e-4", "--sample-rate", "1", "--steps", "4", "--dimension", "100"]
PLAN = {"sample_rate": 1.0, "steps": 4, "dimension": 100}


@pytest.mark.parametrize(
    ("argv", "runs"),
    [
        ([], RunCount(5.0)),
        (["--shape", "1"], RunCount(5.0, shape=1.0)),
        (["--distribution", "poisson"], RunCount(5.0, "poisson")),
    ],
)
def test_the_price_beforehand(argv: list[str], runs: RunCount, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *SETTING, "--mean-runs", "5", *argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    one, search, naive = (row["noise_multiplier"] for row in told["rows"])
    assert one == calibrate_noise_multiplier(eps=2.0, delta=1e-4, **PLAN)
    assert naive == calibrate_noise_multiplier(eps=2.0, delta=1e-4, **{**PLAN, "steps": 20})
    assert one < search < naive
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=search, **PLAN)
    assert search_epsilon(accountant, runs, delta=1e-4) == told["search_epsilon"] <= 2.0
    assert told["rows"][1]["epsilon_of_each_run"] == accountant.epsilon(delta=1e-4)


def test_the_price_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *SETTING, "--mean-runs", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("| private search, logarithmic, mean 5 |")
    assert lines[4].startswith("| 5 runs, naive composition ")
    assert main(["calibrate", *SETTING, "--mean-runs", "0"]) == 2
    assert "mean_runs must be positive" in capsys.readouterr().err
