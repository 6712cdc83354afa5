"""python -m benchmarks.field [--only NAME ...] [--environments DIR]: packages trained privately, docs/packages.md.

Each package is installed into a virtual environment of its group, each case runs in a process of its own with a time
limit, and what came of it is kept as JSON beside the page. A package that cannot be installed does not end the run.
Ends with exit code 1 where an outcome is not the one that the case says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.field.cases import Case, packages
from benchmarks.field.environments import ROOT, InstallError, prepare
from benchmarks.field.page import RESULTS, file_of, write

SECONDS = 300


def run_case(python: Path, package: str, case: Case) -> bool:
    """Whether the outcome is what the case says; prints it."""
    target = file_of(package, case.model)
    command = [str(python), "-W", "ignore", "-m", "benchmarks.field.run_case", package, case.model, str(target)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = target.with_suffix(".log")
    try:
        with log.open("w") as out:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=SECONDS, cwd=ROOT, env=environment, check=False
            )
    except subprocess.TimeoutExpired:
        print(f"  {case.model}: not done after {SECONDS} s, see {log}", flush=True)
        return False
    if done.returncode:
        print(f"  {case.model}: ended with code {done.returncode}, see {log}", flush=True)
        return False
    result = json.loads(target.read_text())
    said = result["message"] or f"{result['engine']}, error {result['error']}"
    print(f"  {case.model}: {result['outcome']} ({said[:300]})", flush=True)
    if result["expected"]:
        log.unlink()
    return bool(result["expected"])


def run(names: Iterable[str], home: Path, models: list[str] | None) -> bool:
    """Whether everything came out as the cases say."""
    good, known = True, packages()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in names:
        package = known[name]
        print(f"{name}: environment {package.environment}", flush=True)
        try:
            python = prepare(home / package.environment, package)
        except InstallError as error:
            print(f"  cannot be installed: {error}", flush=True)
            good = False
            continue
        for case in package.cases:
            if not models or case.model in models:
                good &= run_case(python, name, case)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=packages(), default=list(packages()), help="packages; default: all"
    )
    parser.add_argument("--models", nargs="+", help="models of these packages; default: all")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-field", help="default: ./.venv-field")
    parser.add_argument("--render", action="store_true", help="write the page from what is known, and run nothing")
    options = parser.parse_args()
    good = options.render or run(options.only, options.environments.absolute(), options.models)
    write()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
