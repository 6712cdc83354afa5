"""``lightning-lap2 plot``: files, data and errors."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.cli import main
from lightning_lap2.figures import FIGURES

QUICK = ["--sample-rate", "0.02", "--steps", "60", "--dimension", "50", "--points", "3", "--max-order", "8"]


def plot(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plot", *argv, *QUICK]) == 0
    return capsys.readouterr().out


def test_all_figures_into_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "figures"
    out = plot(capsys, "--out", str(folder), "--format", "svg")
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.svg" for name in FIGURES)
    assert out.splitlines() == [f"wrote {folder / f'{name}.svg'}" for name in FIGURES]


def test_one_figure_into_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sub" / "moments.PNG"
    plot(capsys, "--figure", "moments", "--out", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_json_and_csv_hold_the_same_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    result = json.loads(plot(capsys, "--figure", "clip", "--json", "--csv", str(path), "--noise-multiplier", "1.2"))
    (figure,) = result["figures"]
    assert result["files"] == [str(path)]
    assert result["arguments"]["clip_range"] == [0.1, 3.0]
    from_json = [
        (panel["name"], line["label"], line["bound"], line["valid"], float(x), float(y))
        for panel in figure["panels"]
        for line in panel["curves"]
        for x, y in zip(line["x"], line["y"], strict=True)
    ]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    from_csv = [(r["panel"], r["curve"], r["bound"], r["valid"] == "True", float(r["x"]), float(r["y"])) for r in rows]
    assert from_csv == from_json
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.2 / 3.0, sample_rate=0.02, steps=60, dimension=50)
    assert ("epsilon", "Lap2 tight", "tight", True, 3.0, accountant.epsilon(delta=1e-5)) in from_json
    assert {r["valid"] for r in rows if r["bound"] == "published"} == {"False"}


def test_data_need_no_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = json.loads(plot(capsys, "--figure", "moments", "--json"))
    assert len(result["figures"][0]["panels"]) == 2
    assert main(["plot", "--out", str(tmp_path / "f"), *QUICK]) == 2
    captured = capsys.readouterr()
    assert "pip install 'lightning-lap2[plot]'" in captured.err
    assert len(captured.err.splitlines()) == 1  # before anything is computed


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--figure", "wall", "--json", *QUICK]) == 0
    out, err = capsys.readouterr()
    slopes = json.loads(out)["figures"][0]["panels"][0]["curves"]
    assert all(0.0 < y < 2.0 and math.isfinite(y) for line in slopes for y in line["y"])
    assert len(err.splitlines()) == 4
    assert err.startswith("lightning-lap2: epsilon against noise: Lap2 tight, 3 values")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--out file.png, file.svg or folder, or ask for --json or --csv"),
        (["--out", "all.png"], "is one file, but --figure all draws 5: give a folder"),
        (["--out", "figure.pdf", "--figure", "snr"], "must end in .png or .svg"),
        (["--figure", "table"], "invalid choice: 'table'"),
        (["--figure", "snr", "--json", "--points", "1"], "points must be at least 3"),
        (["--figure", "snr", "--json", "--eps-range", "2", "1"], "eps_range must rise"),
        (["--figure", "snr", "--json", "--eps_range", "2"], "eps"),
        (["--figure", "moments", "--csv", "missing/data.csv"], "missing/data.csv"),
    ],
)
def test_errors_are_one_line_and_status_two(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *QUICK, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if "error" in line]
    assert len(errors) == 1 and words in errors[0]
    assert not list(tmp_path.iterdir())
