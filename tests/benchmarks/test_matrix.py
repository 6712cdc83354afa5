"""What ``make matrix`` pins, counts and writes, from a project and reports that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import matrix
from benchmarks.matrix import ROWS, Result, Row, load_project, pins, read_report, table

PROJECT = {
    "dependencies": ["torch>=2.6.0,<3", "jsonargparse[signatures]>=4.49.0", "numpy >= 2.0.0"],
    "optional-dependencies": {
        "examples": [],
        "plot": ["matplotlib>=3.9.0"],
        "models": [],
        "paper": ["onnx>=1.16"],
        "dev": ["pytest>=7.4", "pytorch-lightning>=2.5.0,<3"],
    },
}


def test_lower_ends_of_what_users_install_are_pinned() -> None:
    pinned = pins(PROJECT, Row("all", "3.10", ("*",)))
    names = ["jsonargparse==4.49.0", "matplotlib==3.9.0", "numpy==2.0.0", "pytorch-lightning==2.5.0", "torch==2.6.0"]
    assert pinned == names
    assert pins(PROJECT, Row("torch", "3.11", ("torch",))) == ["torch==2.6.0"]
    assert pins(PROJECT, Row("newest", "3.13", ())) == []
    with pytest.raises(ValueError, match="'numpy' has no lower end"):
        pins({**PROJECT, "dependencies": ["numpy"]}, Row("all", "3.10", ("*",)))


def test_the_rows_hold_every_lower_end_and_every_python_that_pyproject_names() -> None:
    project = load_project()
    for row in ROWS:
        pins(project, row)
    python = "Programming Language :: Python ::"
    named = {line.split()[-1] for line in project["classifiers"] if line.startswith(python)}
    assert named - {"3"} <= {row.python for row in ROWS}


def test_errors_are_failures_and_skips_are_counted_by_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = ["", "", "<failure/>", "<error/>", *['<skipped message="no CUDA"/>'] * 2, '<skipped message="as root"/>']
    report.write_text(f"<a><b>{''.join(f'<testcase>{inner}</testcase>' for inner in cases)}</b></a>", encoding="utf-8")
    assert read_report(report) == {"passed": 2, "failed": 2, "skipped": {"no CUDA": 2, "as root": 1}}


def test_the_table_names_rows_that_were_not_run_and_why_tests_were_skipped() -> None:
    versions = {"python": "3.10.1", **dict.fromkeys(matrix.SHOWN, "1.0")}
    results = {
        "lowest": Result(versions=versions, passed=1234, skipped={"no CUDA": 2}, minutes=9.6, date="2026-01-01"),
        "newest": Result(versions=versions, passed=5, failed=1, date="2026-01-02", arguments="tests/noise"),
        "lowest-torch": Result("no Python 3.11 on this machine"),
    }
    lines = table(results).splitlines()
    assert lines[2].startswith("| lowest | 3.10.1 | 1.0 |") and lines[2].endswith("| 1,234 | 0 | 2 | 10 | 2026-01-01 |")
    assert lines[3].endswith("| 5 | 1 | 0 | 0 | 2026-01-02 |")
    assert lines[5:] == [
        "* `lowest-torch` (Python 3.11) was not run: no Python 3.11 on this machine.",
        "* `lowest-lightning` (Python 3.12) was not run: not asked for.",
        "* `newest` ran `pytest tests/noise` only.",
        "* Skipped (2 in lowest): no CUDA.",
    ]
