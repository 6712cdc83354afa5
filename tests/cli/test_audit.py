"""``lightning-lap2 audit``: a config like LightningCLI's, a statement or JSON, a picture, three exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS
from lightning_lap2.cli import main

CONFIG = """
model:
  class_path: tests.audit.nets.Net
  init_args: {lr: 0.05}
data:
  class_path: tests.audit.nets.Classes
  init_args: {records: 500, batch_size: 500}
privacy:
  eps: .inf
  delta: 1.0e-6
  mechanism: laplace_l1
  noise_multiplier: 1.0
trainer:
  max_steps: 1
  accelerator: cpu
seed: 1
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.yaml").write_text(CONFIG)
    return tmp_path / "audit.yaml"


def test_audit_prints_and_draws(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert "claimed epsilon      1.0" in out or "claimed epsilon      0.9999" in out
    assert "not refuted" in out
    assert (config.parent / "audit.png").stat().st_size > 5000
    assert "Traceback" not in err


def test_a_refuted_claim_exits_with_one_and_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS["half_noise"]():
        status = main(["audit", "--config", str(config), "--json", "--plot", str(config.parent / "picture.svg")])
    out, err = capsys.readouterr()
    assert status == 1
    told = json.loads(out)
    assert told["violated"] is True
    assert told["epsilon_lower_bound"] > told["claimed_epsilon"]
    assert "the training is not (0.999998, 1e-06)-differentially private" in err
    assert (config.parent / "picture.svg").read_text().startswith("<?xml")


def test_many_runs_and_no_plot(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--method", "many_runs", "--runs", "6", "--canary", "even_spread", "--plot", "null", "--json"]
    assert main(["audit", "--config", str(config), *told]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["method"], result["runs"], result["canaries"]) == ("many_runs", 6, 1)
    assert not list(config.parent.glob("*.png"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--privacy.delta", "2"], "delta must lie strictly between 0 and 1"),
        (["--canaries", "700"], "canaries=700"),
        (["--method", "some_runs"], "method"),
        (["--model", "tests.audit.nets.Nothing"], "Nothing"),
    ],
)
def test_errors_exit_with_two(config: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--config", str(config), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.strip().splitlines()[-1].startswith("lightning-lap2: error: ")


def test_a_picture_that_cannot_be_written_is_no_failure(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--config", str(config), "--plot", str(config.parent / "nowhere" / "a.png")]) == 0
    out, err = capsys.readouterr()
    assert "audited lower bound" in out
    assert "warning: no plot" in err


def test_help_lists_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "audit" in capsys.readouterr().out
