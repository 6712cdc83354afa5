"""What every subcommand is made of, and how each fails."""

from __future__ import annotations

import os
import re
import sys
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.cli.text import tell

FAILED = 2
"""Exit status of an error."""


@dataclass(frozen=True)
class Result:
    """What a subcommand found.

    Attributes:
        data: printed by ``--json``.
        text: printed without it.
        status: the exit status.
        notes: lines for stderr.
    """

    data: dict[str, Any]
    text: str
    status: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One subcommand.

    Attributes:
        run: from its parser and its arguments to its result.
        help: one sentence.
        add_arguments: gives the parser its options.
        examples: arguments of examples, shown in the help.
        details: more of the help.
        loads_user_code: whether the options name classes that are imported and built. Such options are only added when
            the subcommand is the one called, since they need torch and Lightning.
    """

    run: Callable[[ArgumentParser, Namespace], Result]
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    examples: tuple[str, ...]
    details: str = ""
    loads_user_code: bool = False

    def description(self, name: str) -> str:
        shown = "\n".join(f"  lightning-lap2 {name} {example}" for example in self.examples)
        parts = [self.help, self.details.strip(), f"Example{'s' if len(self.examples) > 1 else ''}:\n{shown}"]
        return "\n\n".join(part for part in parts if part)


class _Formatter(RawDescriptionHelpFormatter):
    """Descriptions as written; a "1 %" in the docstring of a class that is an option's type stays one."""

    def _get_help_string(self, action: Action) -> str:
        return re.sub(r"%(?![(%])", "%%", action.help or "")


class Parser(ArgumentParser):
    """Errors are one line on stderr and exit status 2; the description is printed as written.

    Args:
        subcommands: names that stand before an option in messages (``calibrate.eps``), which say ``--eps`` instead.
    """

    def __init__(self, subcommands: Collection[str] = (), *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=_Formatter, **kwargs)
        self._inside = re.compile(rf"(?<![\w.])(?:{'|'.join(subcommands)})\.(?=[a-z_])")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise SystemExit(fail(self._inside.sub("--", message)))


def fail(message: str) -> int:
    """One line on stderr; the exit status."""
    tell(f"error: {' '.join(message.split())}")
    return FAILED


def find_local_modules() -> None:
    """User modules in the current folder are found, as by ``python -m``, but never before installed ones."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def plain(run: Callable[[Namespace], Result]) -> Callable[[ArgumentParser, Namespace], Result]:
    """A subcommand that needs its arguments only."""
    return lambda _, config: run(config)
