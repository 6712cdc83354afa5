"""The tutorial's cells run, in their order; ``make docs`` runs them too, as a notebook."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_lap2.accounting import MajorizedAccountant
from tests.examples.conftest import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:.*non-interactive, and thus cannot be shown")
def test_the_tutorial_ends_with_a_private_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    known: dict[str, Any] = {}
    for number, cell in enumerate(NOTEBOOK["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), known)
    privacy, report = known["privacy"], known["run"].report
    accountant = MajorizedAccountant()
    accountant.step(
        noise_multiplier=privacy.noise_multiplier, sample_rate=256 / 1438, dimension=2410, steps=privacy.steps
    )
    assert privacy.steps == 180
    assert report.epsilon == pytest.approx(accountant.epsilon(delta=1e-4), rel=1e-9) and report.epsilon <= 3.0
    assert [step for step, _ in known["run"].epsilon] == list(range(180))
    assert math.isclose(known["run"].epsilon[-1][1], report.epsilon, rel_tol=1e-5)
    assert "Privacy report" in capsys.readouterr().out


def test_it_is_kept_without_outputs() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
