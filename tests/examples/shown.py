"""Writes into the documentation what its commands print now, where that has changed.

python -m tests.examples.shown
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings

from lightning_lap2 import cli
from tests.examples.conftest import ROOT
from tests.examples.test_readme import PAGES

SELF_MADE = "lightning-lap2 report "
"""Reads a run's folder, which the test makes."""


def printed(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli.main(shlex.split(command)[1:])
    return out.getvalue()


def renewed(text: str) -> str:
    """``text`` with the output below each ``$ lightning-lap2`` command as it is now."""

    def block(found: re.Match[str]) -> str:
        parts = re.split(r"^(?=\$ )", found[1], flags=re.M)
        for place, part in enumerate(parts):
            command = part.partition("\n")[0].removeprefix("$ ")
            if command.startswith("lightning-lap2 ") and not command.startswith(SELF_MADE):
                parts[place] = f"$ {command}\n{printed(command)}"
        return f"```console\n{''.join(parts)}```"

    return re.sub(r"^```console\n(.*?)^```$", block, text, flags=re.M | re.S)


if __name__ == "__main__":
    for page in PAGES:
        before = (ROOT / page).read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            (ROOT / page).write_text(after, encoding="utf-8")
            print(f"renewed: {page}")
