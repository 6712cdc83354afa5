"""Every ordinary step: the engine that ``auto`` ends with, gradients, and what is logged."""

from __future__ import annotations

import pytest
import torch

from tests.ordinary.cases import CASES
from tests.ordinary.harness import ENGINES, alone, plainly, privately
from tests.ordinary.more_cases import MORE_CASES

EVERY = {**CASES, **MORE_CASES}

# torch's own words on what these steps do
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


@pytest.mark.parametrize("name", EVERY)
def test_gradients_and_logged_values(name: str) -> None:
    case = EVERY[name]
    got = privately(case)
    assert list(got.engines) == [case.engine], got.why
    want = alone(case)
    assert got.gradient.keys() == want.keys()
    size = max(float(g.abs().max()) for g in want.values())
    assert size > 0
    for key in want:
        torch.testing.assert_close(got.gradient[key], want[key], rtol=0, atol=case.tolerance * size)
    if case.logs:
        assert got.logged == pytest.approx(plainly(case).logged, rel=1e-5, abs=1e-6)


def _behind() -> list[tuple[str, str]]:
    """Each case with each engine behind the one that takes it first."""
    return [
        (name, engine)
        for name, case in EVERY.items()
        for engine in ENGINES[ENGINES.index(case.engine) + 1 :]
        if engine not in case.refused_by
    ]


@pytest.mark.parametrize(("name", "engine"), _behind())
def test_slower_engines_agree(name: str, engine: str) -> None:
    case = EVERY[name]
    want, got = privately(case), privately(case, engines=(engine,))
    size = max(float(g.abs().max()) for g in want.gradient.values())
    for key in want.gradient:
        torch.testing.assert_close(got.gradient[key], want.gradient[key], rtol=0, atol=case.tolerance * size)
    if case.logs:
        assert got.logged == pytest.approx(want.logged, rel=1e-5, abs=1e-6)
