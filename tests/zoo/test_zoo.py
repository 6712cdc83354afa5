"""Every family under every engine and chunk size against plain autograd, one example at a time."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_lap2.gradients import StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.vmap import VmapEngine
from tests.zoo.cases import CASES, REFUSED, Case
from tests.zoo.compare import worst_error
from tests.zoo.table import PAGE

os.environ["HF_HUB_OFFLINE"] = "1"
COUNT = 4
TOLERANCE = 1e-5


def _name(case: Case) -> str:
    return case.name


def _skip_unavailable(case: Case) -> None:
    for package in case.needs:
        pytest.importorskip(package)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_loop_gives_each_example_its_gradient(case: Case) -> None:
    _skip_unavailable(case)
    module = case.build()
    assert worst_error(LoopEngine(module), module, case.batch(COUNT), COUNT, each=False) < TOLERANCE


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("case", [c for c in CASES if "vmap" not in c.refused], ids=_name)
def test_vmap_gives_each_example_its_gradient(case: Case, chunk: int | None) -> None:
    _skip_unavailable(case)
    module = case.build()
    before = dict(module.named_parameters(remove_duplicate=False))
    engine = VmapEngine(module, chunk_size=chunk)
    assert worst_error(engine, module, case.batch(COUNT), COUNT, each=chunk is None) < TOLERANCE
    after = dict(module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, id=f"{case.name}-{engine.name}")
        for case in CASES
        for engine in (LoopEngine, VmapEngine)
        if engine.name not in case.refused
    ],
)
def test_training_mode_runs_and_leaves_the_module_alone(case: Case, engine: type[LoopEngine | VmapEngine]) -> None:
    _skip_unavailable(case)
    module = case.build(train=True)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    layout = ParameterLayout(module)
    total = layout.zeros()
    loss = engine(module).accumulate(StepCall((case.batch(2), 0), 2), layout, FlatClipper(1.0), total)
    assert torch.isfinite(loss)
    assert 0 < float(total.norm()) <= 2 * (1 + 1e-6)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, id=f"{case.name}-{engine.name}")
        for case in CASES + REFUSED
        for engine in (LoopEngine, VmapEngine)
        if engine.name in case.refused
    ],
)
def test_what_an_engine_refuses(case: Case, engine: type[LoopEngine | VmapEngine]) -> None:
    _skip_unavailable(case)
    module = case.build(train=True)
    before = dict(module.named_parameters(remove_duplicate=False))
    layout = ParameterLayout(module)
    with pytest.raises(UnsupportedModelError) as refusal:
        engine(module).accumulate(StepCall((case.batch(3), 0), 3), layout, FlatClipper(1.0), layout.zeros())
    assert case.refused[engine.name] in str(refusal.value)
    if engine is VmapEngine and case in CASES:
        assert "modules.py:" in str(refusal.value)
        assert "engine='loop'" in str(refusal.value)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)


def test_the_page_of_models_has_every_family() -> None:
    page = PAGE.read_text()
    assert [case.name for case in CASES + REFUSED if f"| {case.name} |" not in page] == []
