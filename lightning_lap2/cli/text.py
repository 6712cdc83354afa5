"""Numbers and tables of the command line: read from text, printed as text."""

from __future__ import annotations

import math
import sys
from typing import Any


def number(text: Any) -> int | float:
    """An integer where the text is one (26010, 26_010, 1e9), else a float; ``inf`` and ``.inf`` are infinity."""
    if not isinstance(text, str):
        return text
    try:
        return int(text)
    except ValueError:
        value = float(text.replace(".inf", "inf"))
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in lines)


def strict(value: Any) -> Any:
    """Infinities become the string "inf": JSON has none."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def tell(text: str) -> None:
    """A line on stderr: progress, a warning, an error."""
    print(f"lightning-lap2: {text}", file=sys.stderr, flush=True)
