"""Every family of the zoo: covered, or refused by name."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from tests.gradients.ghost.oracle import assert_equals_loop
from tests.zoo.cases import CASES, REFUSED, Case

os.environ["HF_HUB_OFFLINE"] = "1"


def _name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [c for c in CASES if "ghost" not in c.refused], ids=_name)
def test_each_example_has_its_gradient(case: Case) -> None:
    for package in case.needs:
        pytest.importorskip(package)
    module = case.build()
    assert_equals_loop(module, case.batch(5))


@pytest.mark.parametrize("case", [c for c in CASES if "ghost" in c.refused], ids=_name)
def test_what_is_not_covered_is_refused(case: Case) -> None:
    module = case.build()
    layout = ParameterLayout(module)
    with pytest.raises(UnsupportedModelError, match=case.refused["ghost"]) as refusal:
        GhostEngine(module).accumulate(StepCall((case.batch(5), 0), 5), layout, FlatClipper(1.0), layout.zeros())
    assert "engine='auto'" in str(refusal.value)


@pytest.mark.parametrize("case", [c for c in REFUSED if "ghost" in c.refused], ids=_name)
@pytest.mark.parametrize("count", [1, 5])
def test_what_no_engine_may_run_is_refused(case: Case, count: int) -> None:
    module = case.build(train=True)
    layout = ParameterLayout(module)
    call = StepCall((case.batch(count), 0), count)
    with pytest.raises(UnsupportedModelError) as refusal:
        GhostEngine(module).accumulate(call, layout, FlatClipper(1.0), layout.zeros())
    assert case.refused["ghost"] in str(refusal.value)


def test_training_mode_leaves_the_module_alone() -> None:
    for case in CASES:
        if "ghost" in case.refused or not case.available:
            continue
        module = case.build(train=True)
        state = {k: v.clone() for k, v in module.state_dict().items()}
        layout = ParameterLayout(module)
        total = layout.zeros()
        GhostEngine(module).accumulate(StepCall((case.batch(2), 0), 2), layout, FlatClipper(1.0), total)
        assert 0 < float(total.norm()) <= 2 * (1 + 1e-6), case.name
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items()), case.name
