"""``lightning-lap2 report``: a file, text, data and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_lap2.cli import main
from tests.finished.folder import write_report_file


def test_a_page_is_written_beside_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_report_file(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    written = tmp_path / "privacy_report.html"
    assert capsys.readouterr().out == f"wrote {written}\n"
    assert written.read_text().startswith("<!DOCTYPE html>")


def test_text_is_printed_or_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = write_report_file(tmp_path)
    assert main(["report", str(tmp_path), "--text"]) == 0
    out = capsys.readouterr().out
    assert report.statement() in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 96
    target = tmp_path / "new" / "report.txt"
    assert main(["report", str(tmp_path), "--text", "--output", str(target)]) == 0
    assert target.read_text() == out
    assert not (tmp_path / "privacy_report.html").exists()


def test_json_holds_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = write_report_file(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == report.to_dict()
    assert result["epsilon"] == [] and result["file"] is None


@pytest.mark.parametrize(("argv", "words"), [([], "run_folder"), (["missing"], "missing does not exist")])
def test_errors_are_one_line_and_status_two(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 1
