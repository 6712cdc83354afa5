"""One virtual environment for each group of requirements."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks.field.cases import Package

ROOT = Path(__file__).parents[2]


class InstallError(Exception):
    """A requirement could not be installed."""


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def prepare(folder: Path, package: Package) -> Path:
    """The interpreter of an environment that holds ``package`` and this checkout; a second call is quick.

    Raises:
        InstallError: with the end of what pip said.
    """
    wanted = [*package.torch, *package.requires]
    mark = folder / f".{package.name}-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:12]}"
    if mark.exists():
        return python_of(folder)
    if not python_of(folder).exists():
        _call([sys.executable, "-m", "venv", str(folder)])
        _pip(folder, *package.torch)
    _pip(folder, *package.torch, "--editable", str(ROOT), *package.requires)
    mark.touch()
    return python_of(folder)


def _pip(folder: Path, *requirements: str) -> None:
    _call([str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError((done.stderr or done.stdout).strip().splitlines()[-1])
