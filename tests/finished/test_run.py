"""A run's folder, read back."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_lap2.finished import read_run
from lightning_lap2.report import PrivacyReport
from tests.finished.folder import REPORT, log, write_report_file


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_report_and_curves_come_from_the_folder(logger: Any, tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "version_0"
    log(folder, logger, {"privacy/epsilon": [0.5, 1.0, 1.25], "privacy/max_grad_norm": [1.0, 0.75, 0.5]})
    report = write_report_file(folder)
    run = read_run(folder)
    assert run.report == report
    assert run.epsilon == ((0, 0.5), (10, 1.0), (20, 1.25))  # exact in the float32 of event files
    assert run.threshold == ((0, 1.0), (10, 0.75), (20, 0.5))


def test_a_resumed_run_keeps_the_later_of_two_values(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "version_0"
    write_report_file(folder)
    log(folder, TensorBoardLogger, {"privacy/epsilon": [0.5, 1.0]})
    log(folder, TensorBoardLogger, {"privacy/epsilon": [0.5, 1.5, 2.0]})
    assert [step for step, _ in read_run(folder).epsilon] == [0, 10, 20]
    assert read_run(folder).epsilon[-1] == (20, 2.0)


def test_no_log_is_no_error(tmp_path: Path) -> None:
    write_report_file(tmp_path)
    run = read_run(tmp_path)
    assert run.epsilon == run.threshold == ()


def test_the_latest_report_of_a_folder_is_taken(tmp_path: Path) -> None:
    write_report_file(tmp_path, "privacy_report_old.json", steps=1)
    write_report_file(tmp_path, "privacy_report_new.json", steps=2)
    os.utime(tmp_path / "privacy_report_old.json", (1, 1))
    assert read_run(tmp_path).report.steps == 2
    write_report_file(tmp_path, steps=3)
    os.utime(tmp_path / "privacy_report.json", (0, 0))
    assert read_run(tmp_path).report.steps == 3
    assert read_run(tmp_path / "privacy_report_old.json").report.steps == 1


def test_a_folder_above_one_run_will_do_and_above_two_will_not(tmp_path: Path) -> None:
    write_report_file(tmp_path / "logs" / "version_0", steps=7)
    assert read_run(tmp_path).report.steps == 7
    write_report_file(tmp_path / "logs" / "version_1")
    with pytest.raises(ValueError, match=r"holds 2 runs, name one: .*version_0, .*version_1"):
        read_run(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no privacy_report\.json in .*when training ends"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "an object with named fields, got a list"),
        ("{", "is not a privacy report"),
        (json.dumps({key: value for key, value in REPORT.items() if key not in ("eps", "steps")}), "missing: eps, st"),
    ],
)
def test_what_is_no_report_is_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "privacy_report.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path)


def test_a_report_survives_its_file_and_later_fields_are_left_out() -> None:
    report = PrivacyReport.from_dict(REPORT | {"eps": "inf", "epsilon": "inf", "planned_steps": "inf", "colour": "red"})
    assert math.isinf(report.eps) and math.isinf(report.epsilon)
    assert PrivacyReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("changes", "standing", "words"),
    [
        ({}, "guarantee", "The weights after 40 releases are (2.5, 1e-05)-differentially private"),
        ({"steps": 0}, "nothing", "Nothing was released"),
        ({"reproducible": True}, "reproducible", "Not private: the noise is reproducible"),
        ({"bound": "published", "reproducible": True}, "invalid", "Not a valid guarantee"),
        ({"epsilon": math.inf, "bound": "published"}, "infinite", "No privacy guarantee"),
    ],
)
def test_the_worst_that_can_be_said_is_said(changes: dict[str, Any], standing: str, words: str) -> None:
    report = PrivacyReport.from_dict(REPORT | changes)
    assert report.standing == standing
    assert words in report.statement()
    assert report.statement() in str(report)
