"""The command line: same numbers as the accountant, one-line errors, JSON that any reader takes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.cli import main
from lightning_lap2.report import rounded_up

SETTING = ["--delta", "1e-5", "--sample-rate", "0.0043", "--steps", "5860", "--dimension", "26010"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" or "not a valid bound" in err
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "epsilon", "--noise-multiplier", "1.5", *SETTING)
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.5, sample_rate=0.0043, dimension=26_010, steps=5860)
    assert result["epsilon"] == accountant.epsilon(delta=1e-5)
    assert result["best_order"] == 17
    assert result["arguments"]["bound"] == "tight"
    assert main(["epsilon", "--noise_multiplier", "1.5", *SETTING]) == 0
    assert capsys.readouterr().out.startswith("epsilon = 0.958923 at delta = 1e-05 after 5860 steps")


def test_underscores_exponents_and_default_delta(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["epsilon", "--noise_multiplier=1.5", "--sample_rate=.0043", "--steps=5_860", "--dimension=2.601e4"]
    assert run_json(capsys, *argv)["arguments"] == {
        "noise_multiplier": 1.5,
        "delta": 1e-5,
        "sample_rate": 0.0043,
        "steps": 5860,
        "dimension": 26010,
        "bound": "tight",
        "mechanism": "laplace",
    }


def test_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "calibrate", "--eps", "1", *SETTING)
    m = calibrate_noise_multiplier(eps=1.0, delta=1e-5, sample_rate=0.0043, steps=5860, dimension=26_010)
    assert result["noise_multiplier"] == m
    assert result["epsilon"] <= 1.0
    assert result["std_over_clip"] == pytest.approx(math.sqrt(2.0) * m)
    assert main(["calibrate", "--eps", "1", *SETTING]) == 0
    assert float(capsys.readouterr().out.split()[3]) >= m


def test_calibrate_for_units(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--eps", "2", "--steps", "200", "--dimension", "1000"]
    units = run_json(capsys, "calibrate", "--units", "500", "--batch-size", "25", *rest)
    rate = run_json(capsys, "calibrate", "--sample-rate", "0.05", *rest)
    assert units["noise_multiplier"] == rate["noise_multiplier"]
    assert units["arguments"]["sample_rate"] == 0.05
    assert main(["calibrate", "--units", "500", "--batch-size", "25", *rest]) == 0
    assert "add/remove one of 500 units with all its records" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give --sample-rate, or --units and --batch-size"),
        (["--units", "500"], "give --sample-rate, or --units and --batch-size"),
        (["--units", "500", "--batch-size", "5", "--sample-rate", "0.1"], "give --sample-rate, or --units"),
        (["--units", "500", "--batch-size", "2.5"], "--batch-size must be an integer"),
        (["--units", "5", "--batch-size", "6"], "--batch-size 6 is more than --units 5"),
    ],
)
def test_a_rate_is_given_once(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--eps", "2", "--steps", "200", "--dimension", "1000", *given]) == 2
    assert message in capsys.readouterr().err


def test_steps(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["steps", "--noise-multiplier", "1.5", "--sample-rate", "0.0043", "--dimension", "26010"]
    assert run_json(capsys, *argv, "--eps", "1")["steps"] == MajorizedAccountant().steps_within(
        eps=1.0, delta=1e-5, noise_multiplier=1.5, sample_rate=0.0043, dimension=26_010
    )
    assert run_json(capsys, *argv, "--eps", ".inf")["steps"] == "inf"


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "compare", "--eps", "0.13", "3.42", *SETTING)["rows"]
    assert [r["eps"] for r in rows] == [0.13] * 5 + [3.42] * 5
    by = {(r["eps"], r["mechanism"], r["bound"]): r for r in rows}
    for eps in (0.13, 3.42):
        tight, joint = by[eps, "laplace", "tight"], by[eps, "laplace", "joint"]
        gaussian = by[eps, "gaussian", "tight"]
        assert tight["noise_multiplier"] < joint["noise_multiplier"]
        assert gaussian["noise_multiplier"] < tight["noise_multiplier"]
        assert tight["std_over_clip"] == pytest.approx(math.sqrt(2.0) * tight["noise_multiplier"])
        assert tight["snr"] == pytest.approx(1.0 / tight["noise_multiplier"])
    assert main(["compare", "--eps", "1", *SETTING]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert len(lines) == 7
    assert len({len(line) for line in lines}) == 1
    assert "not a valid bound" in lines[4]


def test_compare_in_the_units_of_the_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "compare", "--eps", "1", *SETTING, "--max-grad-norm", "0.25")["rows"]
    for row in rows:
        m = row["noise_multiplier"]
        deviation = m if row["mechanism"] == "gaussian" else math.sqrt(2.0) * m
        assert row["scale"] == pytest.approx(0.25 * m)
        assert row["std"] == pytest.approx(0.25 * deviation)
        assert row["std_over_clip"] == pytest.approx(deviation)
        assert row["total_snr"] == pytest.approx(0.0043 * math.sqrt(5860) / m)
        assert row["valid"] == (row["bound"] != "published")
    assert main(["compare", "--eps", "1", *SETTING, "--max-grad-norm", "0.25"]) == 0
    head, _, tight, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, tight)), strict=True))
    assert list(cells) == [
        "epsilon", "method", "noise multiplier", "scale", "std", "std / C", "C / scale", "q sqrt(T) C / scale",
    ]  # fmt: skip
    assert float(cells["scale"]) == pytest.approx(rows[0]["scale"], rel=1e-5)
    assert float(cells["std"]) == pytest.approx(rows[0]["std"], rel=1e-3)


def test_compare_where_no_noise_serves(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(
        capsys, "compare", "--eps", "1", "--delta", "0", "--sample-rate", "0.1", "--steps", "2", "--dimension", "4"
    )["rows"]
    assert [r["noise_multiplier"] == "inf" for r in rows] == [False, False, True, True, False]


def test_optimize(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "optimize", "--eps", "1", *SETTING, "--max-grad-norms", "0.5", "2")["rows"]
    assert [r["max_grad_norm"] for r in rows] == [0.5, 2]
    assert rows[1]["scale"] == pytest.approx(4 * rows[0]["scale"])


def test_published_warns_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", "--noise-multiplier", "1.5", *SETTING, "--bound", "published"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("epsilon = ")
    assert err.startswith("lightning-lap2: warning: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["calibrate", "--eps", "-1", *SETTING], "eps must not be negative, got -1"),
        (["calibrate", "--eps", "abc", *SETTING], "--eps: invalid number value: 'abc'"),
        (["calibrate", "--eps", "0", *SETTING, "--delta", "0"], "finite noise multiplier"),
        (["calibrate"], "required: --eps"),
        (
            ["epsilon", "--noise-multiplier", "1", *SETTING, "--dimension", "2.5"],
            "dimension must be a non-negative integer or inf, got 2.5",
        ),
        (["epsilon", "--noise-multiplier", "1", *SETTING, "--bound", "best"], "invalid choice: 'best'"),
        (["epsilon", "--noise-multiplier", "1", *SETTING, "--mechanism", "gaussian", "--bound", "joint"], "bound must"),
        (["compare", "--eps", "1", *SETTING, "--max-grad-norm", "0"], "max_grad_norm must be positive and finite"),
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "subcommand"),
    ],
)
def test_errors_are_one_line_and_status_two(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


def test_printed_numbers_are_rounded_up() -> None:
    for value in [1.2345601, 9.9999991, 0.012345649, 123456.7, 1e-7, 8.0]:
        assert value <= float(rounded_up(value)) <= value * (1.0 + 2e-5)


def run_python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


def test_help_and_module_entry_point() -> None:
    assert "calibrate" in run_python("-m", "lightning_lap2", "--help").stdout
    code = "import sys, lightning_lap2.cli; print([m for m in ('torch', 'lightning') if m in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"
    done = run_python("-m", "lightning_lap2", "bogus")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
