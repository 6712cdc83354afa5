"""What every subcommand shares: help, the reader of a pipe that leaves, messages that name options, warnings."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from lightning_lap2.cli import main
from lightning_lap2.cli.entry import BROKEN_PIPE, SUBCOMMANDS
from lightning_lap2.cli.parsing import Parser, Result

SETTING = ["--delta", "1e-5", "--sample-rate", "0.5", "--steps", "2", "--dimension", "10"]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_each_subcommand(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert SUBCOMMANDS[name].help.split()[0] in out and f"lightning-lap2 {name} " in out and "--json" in out
    assert err == ""


@pytest.mark.parametrize(
    ("argv", "status"),
    [(["compare", "--eps", "1", *SETTING], BROKEN_PIPE), (["--help"], 0)],  # argparse ignores it for its help
)
def test_a_reader_that_leaves_early_sees_no_traceback(argv: list[str], status: int) -> None:
    """As under ``| head``: the pipe is closed before anything is written to it."""
    command = [sys.executable, "-m", "lightning_lap2", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == status


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("option calibrate.eps is bad", "option --eps is bad"),
        ("audit.privacy.delta", "--privacy.delta"),
        ("no module my.audit.nets, see tests.replay.x", "no module my.audit.nets, see tests.replay.x"),
    ],
)
def test_messages_name_options_as_they_are_typed(message: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        Parser(SUBCOMMANDS).error(message)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"lightning-lap2: error: {shown}\n"


def test_each_warning_is_one_line_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> Result:
        for _ in range(2):
            warnings.warn("two\nlines", stacklevel=1)
        return Result({}, "done")

    command = SUBCOMMANDS["epsilon"]
    monkeypatch.setitem(SUBCOMMANDS, "epsilon", type(command)(**{**vars(command), "run": run}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["epsilon", "--noise-multiplier", "1", *SETTING]) == 0
    assert capsys.readouterr() == ("done\n", "lightning-lap2: warning: two lines\n")
