"""``lightning-lap2 norms``: the library's norms, from a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lap2.cli import main
from lightning_lap2.gradients.norms import gradient_norms, suggest_max_grad_norm
from tests.cli.public_model import Model, PublicData

HOME = "tests.cli.public_model"
MODEL = ["--model", f"{HOME}.Model"]
DATA = ["--data", f"{HOME}.PublicData"]
PUBLIC = "--data-is-public"


def norms(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["norms", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_percentiles_of_the_librarys_norms(capsys: pytest.CaptureFixture[str]) -> None:
    result = norms(capsys, *MODEL, *DATA, PUBLIC, "--percentiles", "25", "50", "--seed-everything", "4")
    torch.manual_seed(4)
    expected = gradient_norms(Model(), PublicData().train_dataloader(), data_is_public=True)
    assert result["examples"] == 9
    assert result["non_finite"] == 0
    assert [entry["percentile"] for entry in result["percentiles"]] == [25, 50]
    assert [entry["norm"] for entry in result["percentiles"]] == suggest_max_grad_norm(expected, [25, 50])
    assert result["max"] == float(expected.max())


def test_a_lightning_cli_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "seed_everything: 1\n"
        "trainer: {max_epochs: 3, callbacks: [{class_path: lightning_lap2.Lap2Privacy, init_args: {eps: 1.0}}]}\n"
        f"model: {{class_path: {HOME}.Model, init_args: {{bias: false}}}}\n"
        f"data: {{class_path: {HOME}.PublicData}}\n"
    )
    assert main(["norms", "--config", str(path), PUBLIC, "--split", "val"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "l2 norm" in lines[0]
    assert len(lines) == 10
    assert lines[-1].startswith("7 examples, mean ")


def test_the_models_own_data_and_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    result = norms(
        capsys, "--model", f"{HOME}.WithData", PUBLIC, "--engine", "loop", "--norm", "l1", "--max-examples", "4"
    )
    assert (result["examples"], result["norm"]) == (4, "l1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*MODEL, *DATA], "data_is_public must be True"),
        ([*DATA, PUBLIC], "model"),
        ([*MODEL, PUBLIC], "--data must have a train_dataloader, Model has none"),
        ([*MODEL, *DATA, PUBLIC, "--split", "test"], "--data must have a test_dataloader, PublicData has none"),
        ([*MODEL, *DATA, PUBLIC, "--percentiles", "101"], "percentile must lie in [0, 100], got 101"),
        ([*MODEL, *DATA, PUBLIC, "--engine", "hooks"], "invalid choice: 'hooks'"),
        (["--model", f"{HOME}.Normalised", *DATA, PUBLIC], "BatchNorm"),
        (["--model", "nowhere.Model", *DATA, PUBLIC], "nowhere"),
    ],
)
def test_errors_are_short_and_status_two(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["norms", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("lightning-lap2: error: ")


def test_help_says_that_data_must_be_public(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["norms", "--help"]) == 0
    out = capsys.readouterr().out
    assert "THE DATA MUST BE PUBLIC" in out
    assert "--data-is-public" in out
    assert main(["--help"]) == 0
    assert "norms" in capsys.readouterr().out
