"""``docs/packages.md`` from the results beside it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.field.cases import Package, packages
from benchmarks.field.environments import ROOT

RESULTS = ROOT / "docs" / "results" / "packages"
PAGE = ROOT / "docs" / "packages.md"

INTRODUCTION = """\
# Packages

This page is written by `make field` (`python -m benchmarks.field`). Packages that bring their own LightningModule,
loader or training loop were installed as they are, each group in an environment of its own, and small models of them
trained on made-up data as their documentation shows, once plainly and once with `Lap2Privacy` handed over as their
users would. Then, without noise and with every record in the batch, the released gradient was compared with the sum of
plain gradients of the records, one at a time (*error*: the largest, relative to the largest entry; where it is below
1e-8, in float64, since in float32 two ways to compute an activation may fall on two sides of a kink). *Engine* is what
`engine="auto"` took; *private* is the time of a step as a multiple of the plain step's on the same machine (two cores,
which other work may have shared: *load* is the machine's own count of processes that wanted to run; and small models,
where what each step costs at all counts more than in real training). The callback that was handed over
must have counted every release, whatever the package did with it.
"""


def file_of(package: str, model: str) -> Path:
    return RESULTS / f"{package}-{re.sub(r'[^a-z0-9]+', '-', model.lower())}.json"


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """What is known, by package and model."""
    read = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return {(result["package"], result["model"]): result for result in read}


def page() -> str:
    known = results()
    lines = [
        INTRODUCTION,
        "| package | model | outcome | engine | plain step | private | load | error |",
        "|---" * 8 + "|",
    ]
    found = [(package, [known[key] for case in package.cases if (key := (package.name, case.model)) in known])
             for package in packages().values()]  # fmt: skip
    for _, rows in found:
        lines += [_row(result) for result in rows]
    lines += ["", "## What users write, and what is refused", ""]
    for package, rows in found:
        if rows:
            lines += _section(package, rows)
    return _wrapped("\n".join(lines).rstrip() + "\n")


def _row(result: dict[str, Any]) -> str:
    plain, private, load, error = result["plain"], result["private"], result["load"], result["error"]
    return (
        f"| {result['package']} {result['version']} | {result['model']} | {result['outcome']} | "
        f"{result['engine'] or '–'} | {_milliseconds(plain)} | "
        f"{f'{private / plain:.1f} ×' if plain and private else '–'} | "
        f"{'–' if load is None else f'{load:.0f}'} | {'–' if error is None else f'{error:.0e}'} |"
    )


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _section(package: Package, rows: Sequence[dict[str, Any]]) -> list[str]:
    first = rows[0]
    ran = f"Run with torch {first['torch']}, Lightning {first['lightning']}, Python {first['python']}."
    lines = [f"### {package.name} {first['version']}", "", *([package.notes, ""] if package.notes else []), ran, ""]
    for result in rows:
        lines.append(f"* **{result['model']}**: {result['wrote']}" + _what_was_said(result))
    return [*lines, ""]


def _what_was_said(result: dict[str, Any]) -> str:
    if result["outcome"] != "trained":
        word = "Refused" if result["outcome"] == "refused" else "Failed"
        return f" {word}: “{result['message']}”"
    return f" Gradients not compared: {result['not_compared']}." if result["not_compared"] else ""


def _wrapped(text: str) -> str:
    """As ``docs/wrap.py`` does it, which is a script and no module."""
    spec = importlib.util.spec_from_file_location("wrap", ROOT / "docs" / "wrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.wrapped(text))


def write() -> None:
    PAGE.write_text(page())
