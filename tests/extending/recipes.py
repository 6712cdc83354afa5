"""The code blocks of docs/extending.md, run as they stand."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from tests.examples.conftest import ROOT


def blocks(heading: str) -> list[str]:
    """The Python blocks below ``## heading``."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return [
        textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", section, re.MULTILINE | re.DOTALL)
    ]


def follow(heading: str) -> dict[str, Any]:
    """What the names stand for after all blocks of a recipe were run."""
    found = blocks(heading)
    assert found, f"## {heading} has no code"
    names: dict[str, Any] = {"__name__": "recipe"}
    for code in found:
        exec(compile(code, f"docs/extending.md, {heading}", "exec"), names)
    return names
