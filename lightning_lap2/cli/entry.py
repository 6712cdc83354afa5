"""From a command line to its result: one parser, one way to print, one way to fail."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jsonargparse import ArgumentParser

from lightning_lap2.accounting import UnsoundBoundWarning
from lightning_lap2.cli import accounting, audit, compare, norms, plot, replay, report, search
from lightning_lap2.cli.parsing import FAILED, Parser, Result, Subcommand, fail, find_local_modules
from lightning_lap2.cli.text import strict, tell

BROKEN_PIPE = 128 + 13
"""Exit status where the reader of stdout has left (``| head``), as a shell gives it for SIGPIPE."""

SUBCOMMANDS: dict[str, Subcommand] = {
    **accounting.SUBCOMMANDS,
    "compare": compare.SUBCOMMAND,
    "norms": norms.SUBCOMMAND,
    "plot": plot.SUBCOMMAND,
    "report": report.SUBCOMMAND,
    "audit": audit.SUBCOMMAND,
    "replay": replay.SUBCOMMAND,
    "search": search.SUBCOMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    try:
        status = _main(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered would raise again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _main(argv: list[str]) -> int:
    try:
        parser, work = build_parser(argv)
        config = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    with _warnings_in_one_line():
        try:
            result = work[config.subcommand](config[config.subcommand])
        except BrokenPipeError:
            raise
        except (TypeError, ValueError, RuntimeError, OSError, ImportError) as error:
            return fail(str(error))
    print(json.dumps(strict(result.data)) if config[config.subcommand].json else result.text)
    for note in result.notes:
        tell(note)
    return result.status


def build_parser(argv: Sequence[str] = ()) -> tuple[ArgumentParser, dict[str, Callable[[Any], Result]]]:
    """The parser, and what each subcommand does with its arguments.

    Args:
        argv: the command line to come. A subcommand that loads user code has its options only if it is named.
    """
    parser = Parser(
        SUBCOMMANDS,
        prog="lightning-lap2",
        description=(
            "Differential privacy accounting for Laplace noise with l2 clipping. Adjacency: add or remove one\n"
            "example (one unit with all its records: calibrate --units). Example:\n\n"
            "  lightning-lap2 calibrate --eps 1 --delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
        ),
    )
    subcommands = parser.add_subcommands(required=True, dest="subcommand")
    work: dict[str, Callable[[Any], Result]] = {}
    for name, command in SUBCOMMANDS.items():
        sub = Parser(SUBCOMMANDS, description=command.description(name))
        if not command.loads_user_code:
            command.add_arguments(sub)
        elif name in argv[:1]:
            find_local_modules()
            command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        subcommands.add_subcommand(name, sub, help=command.help)
        work[name] = _bound(command, sub)
    return parser, work


def _bound(command: Subcommand, parser: ArgumentParser) -> Callable[[Any], Result]:
    return lambda config: command.run(parser, config)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Warnings look like errors do, and each is given once."""
    given = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in given:
            given.add(text)
            tell(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UnsoundBoundWarning)
        warnings.showwarning = show
        yield
