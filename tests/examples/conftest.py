"""The examples as a user runs them: imported from their own folder, in a directory of their own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("cli", "data", "digits", "fashion_mnist", "finetune_image", "finetune_text", "finetuning", "steptime")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """``example("digits")`` is the module ``examples/digits.py``; what it writes goes to ``tmp_path``."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])  # LightningCLI warns when it has arguments beside pytest's
    hidden = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)
