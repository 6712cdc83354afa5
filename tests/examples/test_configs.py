"""The configuration files that the README names, as its commands read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lightning_lap2.cli import main
from tests.examples.conftest import ROOT


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_replay_takes_the_audit_config(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Run where ``examples`` is on the path; ``replay`` and ``audit`` read the same file."""
    example("digits")
    config = ROOT / "examples" / "configs" / "audit.yaml"
    assert main(["replay", "--config", str(config), "--records", "1", "--steps", "2"]) == 0
    assert "no fault found" in capsys.readouterr().out
