"""Data of which a trial at fit start learns little or nothing train all the same: nothing rests on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall
from lightning_lap2.gradients.engines import make_engine
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, quiet_trainer
from tests.settings.fuzz_build import LENGTH, Fuzzed, make_loader

pytestmark = LIGHTNING_WARNINGS
SPEC = {"kind": "attention"}
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", "engine": "ghost"}


def test_a_first_batch_as_long_as_its_sequences() -> None:
    """An engine that told examples apart by sizes took one for the other here, without a sign."""
    torch.manual_seed(0)
    module = Fuzzed(SPEC)
    batch = next(iter(make_loader({"batch_size": LENGTH}, SPEC)))
    layout = ParameterLayout(module)
    sums = []
    for name in ("ghost", "loop"):
        total = layout.zeros()
        make_engine(name, module, chunk_size=None).accumulate(
            StepCall((batch, 0), LENGTH), layout, FlatClipper(0.01), total
        )
        sums.append(total)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "given"),
    [
        ({"order": "iterable"}, {"sampling": "none"}),
        ({"size": 1, "batch_size": 1}, {}),
        ({"size": 2, "batch_size": 2, "poison": "nan"}, {}),
    ],
    ids=["iterable", "one record", "poisoned"],
)
def test_data_that_allow_no_comparison_train(data: dict[str, Any], given: dict[str, Any]) -> None:
    callback = LIGHTNING.lap2(**{**GIVEN, **given})
    quiet_trainer(LIGHTNING.pl, callback, max_epochs=1).fit(Fuzzed(SPEC), make_loader(data, SPEC))
    assert callback.steps > 0
