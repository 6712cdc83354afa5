"""python -m benchmarks.matrix: the test suite at the ends of the ranges that pyproject.toml states (``make matrix``).

Four environments: the lowest and the newest torch, each with the lowest and the newest Lightning, on four Pythons. In
the first, the library's other dependencies stand at their lowest too; elsewhere, what is not named is the newest. Each
environment is a folder of its own of up to 6 GB (torch comes as a CUDA build, which runs on CPUs), in the system's
temporary folder unless ``--folder`` names another. It is kept, and built anew when pyproject.toml asks for something
else.

A row that cannot be had (no such Python here, no wheel) is left out, with the reason. Results are kept, so that rows
may be run one at a time; ``--write`` puts those of all rows into a document.

    python -m benchmarks.matrix --list
    python -m benchmarks.matrix --only lowest -- -n 2 tests/gradients
    python -m benchmarks.matrix --kept --write docs/versions.md

What follows ``--`` is handed to pytest, in place of what ``make test`` does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.document import replace_block

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest and mypy install there

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(tempfile.gettempdir()) / "lightning-lap2-matrix"
EXTRAS = ("examples", "plot", "models", "paper", "dev")
LOWERED = ("examples", "plot", "models")
"""Extras that users install, so that their lower ends are held too; the others are ours."""
SUITE = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
SHOWN = ("torch", "lightning", "numpy", "scipy", "transformers")


@dataclass(frozen=True)
class Row:
    """One environment."""

    name: str
    python: str
    """Major and minor version."""
    lowest: tuple[str, ...]
    """Distributions that stand at the lower end of their range; ``"*"`` for all."""


ROWS = (
    Row("lowest", "3.10", ("*",)),
    Row("lowest-torch", "3.11", ("torch",)),
    Row("lowest-lightning", "3.12", ("lightning", "pytorch-lightning")),
    Row("newest", "3.13", ()),
)


@dataclass(frozen=True)
class Result:
    """What the suite said in one row, or why it was not run."""

    reason: str = ""
    """Why the row was not run; empty where it was."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python and of the distributions in ``SHOWN``."""
    passed: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """How many tests were skipped for which reason."""
    minutes: float = 0.0
    date: str = ""
    arguments: str = ""
    """What pytest was called with; empty for the whole suite."""


def load_project() -> dict[str, Any]:
    """The table ``[project]`` of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def requirements(project: dict[str, Any]) -> Iterator[str]:
    """What users install, and the second name that Lightning is published under."""
    yield from project["dependencies"]
    for extra in LOWERED:
        yield from project["optional-dependencies"][extra]
    yield from (text for text in project["optional-dependencies"]["dev"] if text.startswith("pytorch-lightning"))


def pins(project: dict[str, Any], row: Row) -> list[str]:
    """``name==version`` for each requirement that stands at its lower end in this row.

    Raises:
        ValueError: such a requirement has no lower end.
    """
    found = set()
    for text in requirements(project):
        name = re.split(r"[\[<>=!~ ;]", text, maxsplit=1)[0]
        if name not in row.lowest and "*" not in row.lowest:
            continue
        bound = re.search(r">=\s*([0-9.]+)", text)
        if bound is None:
            raise ValueError(f"pyproject.toml: {text!r} has no lower end")
        found.add(f"{name}=={bound[1]}")
    return sorted(found)


def find_python(version: str) -> str | None:
    """An interpreter of this version, on the path or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        if candidate is not None:
            said = subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
            if said.startswith(f"Python {version}."):
                return candidate
    return None


def build(row: Row, place: Path) -> str:
    """Makes the environment, unless it is there as it should be; why it could not be made, or ``""``."""
    project = load_project()
    pinned = pins(project, row)
    asked = [project["dependencies"], project["optional-dependencies"], pinned]
    stamp, wanted = place / "built_for.json", json.dumps(asked)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return ""
    interpreter = find_python(row.python)
    if interpreter is None:
        return f"no Python {row.python} on this machine"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", place], check=True)
    constraints = place / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pinned), encoding="utf-8")
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--constraint", constraints, "--editable", f".[{','.join(EXTRAS)}]"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return " ".join(errors) or f"pip ended with code {done.returncode}"
    stamp.write_text(wanted, encoding="utf-8")
    return ""


def read_versions(python: Path) -> dict[str, str]:
    """Which Python an environment has, and which versions of what is shown."""
    code = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code, *SHOWN], text=True))
    return found


def read_report(path: Path) -> dict[str, Any]:
    """The counts of a ``Result`` in pytest's report: errors are failures, skips are counted by reason."""
    counts, skipped = Counter[str](), Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skip is not None:
            skipped[skip.get("message", "")] += 1
        else:
            counts["passed"] += 1
    return {"passed": counts["passed"], "failed": counts["failed"], "skipped": dict(skipped)}


def run(row: Row, folder: Path, arguments: Sequence[str]) -> Result:
    """The suite in one row's environment; its output goes to ``NAME.log`` in the folder."""
    place, log, report = folder / row.name, folder / f"{row.name}.log", folder / f"{row.name}.xml"
    reason = build(row, place)
    if reason:
        return Result(reason)
    python = place / "bin" / "python"
    report.unlink(missing_ok=True)
    start = datetime.datetime.now(datetime.timezone.utc)
    command = [python, "-m", "pytest", *(arguments or SUITE), f"--junitxml={report}"]
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    if not report.exists():
        return Result(f"pytest ended with code {code} and no report")
    spent = datetime.datetime.now(datetime.timezone.utc) - start
    return Result(
        versions=read_versions(python),
        minutes=round(spent.total_seconds() / 60, 1),
        date=start.date().isoformat(),
        arguments=" ".join(arguments),
        **read_report(report),
    )


def table(results: dict[str, Result]) -> str:
    """Markdown: a line for each row's result, by name; below it the rows that were not run, and what was skipped."""
    lines = [
        "| row | Python | torch | Lightning | numpy | scipy | transformers | passed | failed | skipped | min | date |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes, reasons = [], {reason for result in results.values() for reason in result.skipped}
    for row in ROWS:
        result = results.get(row.name, Result("not asked for"))
        if result.reason:
            notes.append(f"* `{row.name}` (Python {row.python}) was not run: {result.reason}.")
            continue
        shown = " | ".join(result.versions[name] for name in ("python", *SHOWN))
        counts = f"{result.passed:,} | {result.failed:,} | {sum(result.skipped.values()):,}"
        lines.append(f"| {row.name} | {shown} | {counts} | {result.minutes:.0f} | {result.date} |")
        if result.arguments:
            notes.append(f"* `{row.name}` ran `pytest {result.arguments}` only.")
    for reason in sorted(reasons):
        where = ", ".join(f"{n} in {name}" for name, r in results.items() if (n := r.skipped.get(reason)))
        notes.append(f"* Skipped ({where}): {reason}.")
    return "\n".join([*lines, "", *notes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS], help="this row; may be repeated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"environments, logs, results; {FOLDER}")
    parser.add_argument("--kept", action="store_true", help="run nothing: only the results that are kept")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the table of all kept results there")
    parser.add_argument("--list", action="store_true", help="print what each row pins, and stop")
    parser.add_argument("pytest", nargs="*", help="after --: arguments for pytest")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only is None or row.name in options.only]
    if options.list:
        for row in rows:
            print(f"{row.name}: Python {row.python}, {', '.join(pins(load_project(), row)) or 'all the newest'}")
        return 0
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for row in [] if options.kept else rows:
        print(f"{row.name}: Python {row.python}, output in {folder / row.name}.log", flush=True)
        result = run(row, folder, options.pytest)
        (folder / f"{row.name}.json").write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
    kept = {row.name: folder / f"{row.name}.json" for row in ROWS}
    results = {
        name: Result(**json.loads(path.read_text(encoding="utf-8"))) for name, path in kept.items() if path.exists()
    }
    text = table(results)
    print(text)
    if options.write is not None:
        replace_block(options.write, "matrix", text)
    return int(any(result.failed for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
