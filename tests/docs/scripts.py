"""The documentation's own scripts, imported."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.examples.conftest import ROOT


def script(name: str) -> ModuleType:
    """``docs/NAME.py``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
