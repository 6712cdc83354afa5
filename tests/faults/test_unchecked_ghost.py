"""Ghost without its comparison with plain autograd: refused, since it could take a sequence for the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.engines import make_engine
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, quiet_trainer
from tests.settings.fuzz_build import LENGTH, Fuzzed, make_loader

pytestmark = LIGHTNING_WARNINGS
SPEC = {"kind": "attention"}
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", "engine": "ghost"}


def test_why() -> None:
    """The first batch an engine sees is as long as its sequences: the sum is not that of plain autograd."""
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
    assert torch.linalg.vector_norm(sums[0] - sums[1]) > 0.01 * torch.linalg.vector_norm(sums[1])


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [
        ({"order": "iterable"}, {"sampling": "none"}, "an IterableDataset has no records to look at twice"),
        ({"size": 1, "batch_size": 1}, {}, "two records with a finite loss and gradient"),
        ({"size": 2, "batch_size": 2, "poison": "nan"}, {}, "two records with a finite loss and gradient"),
    ],
    ids=["iterable", "one record", "poisoned"],
)
def test_data_that_allow_no_comparison_are_refused(data: dict[str, Any], given: dict[str, Any], words: str) -> None:
    callback = LIGHTNING.lap2(**{**GIVEN, **given})
    trainer = quiet_trainer(LIGHTNING.pl, callback, max_epochs=1)
    with pytest.raises(UnsupportedModelError, match=f"engine='ghost' must be compared.*{words}.*use engine='vmap'"):
        trainer.fit(Fuzzed(SPEC), make_loader(data, SPEC))
    assert callback.steps == 0
