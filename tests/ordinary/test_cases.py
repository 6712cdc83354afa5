"""Every ordinary step: the engine that ``auto`` ends with, gradients, and what is logged."""

from __future__ import annotations

import pytest
import torch

from tests.ordinary.cases import CASES
from tests.ordinary.harness import alone, plainly, privately

# torch's own words on what these steps do
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_logged_values(name: str) -> None:
    case = CASES[name]
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine == "vmap" and case.loop])
def test_the_loop_takes_what_vmap_takes(name: str) -> None:
    case = CASES[name]
    want, got = privately(case), privately(case, engines=("loop",))
    size = max(float(g.abs().max()) for g in want.gradient.values())
    for key in want.gradient:
        torch.testing.assert_close(got.gradient[key], want.gradient[key], rtol=0, atol=case.tolerance * size)
    if case.logs:
        assert got.logged == pytest.approx(want.logged, rel=1e-5, abs=1e-6)
