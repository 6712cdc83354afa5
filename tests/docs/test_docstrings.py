"""Examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest

import lightning_lap2

PACKAGE = Path(lightning_lap2.__file__).parent


def shown() -> list[str]:
    """Modules with examples that can run by themselves."""
    example = re.compile(r">>> (?!.*# doctest: \+SKIP)")
    files = [path for path in PACKAGE.rglob("*.py") if example.search(path.read_text(encoding="utf-8"))]
    return sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files)


@pytest.mark.parametrize("name", shown())
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


PUBLIC = (
    ("lightning_lap2", "PrivacyReport"),
    ("lightning_lap2.accounting", "MajorizedAccountant"),
    ("lightning_lap2.accounting", "MajorizedAccountant.forecast"),
    ("lightning_lap2.accounting", "MajorizedAccountant.steps_within"),
    ("lightning_lap2.accounting", "calibrate_noise_multiplier"),
    ("lightning_lap2.gradients.clipping", "make_clipper"),
    ("lightning_lap2.batches", "register_batch_type"),
)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_show_an_example(module: str, name: str) -> None:
    found = attrgetter(name)(importlib.import_module(module))
    assert ">>> " in found.__doc__
