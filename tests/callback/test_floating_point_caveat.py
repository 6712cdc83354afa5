"""What the report says about floating point and the generator of the noise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_lap2.mechanism import MARGIN
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2


def report_of(**arguments: Any) -> Any:
    callback = Lap2Privacy(**{"eps": 5.0, **arguments})
    quiet_trainer(pl, callback, max_steps=2).fit(classifier(pl), loader(32, 8))
    return callback.report()


@pytest.mark.parametrize("source", ["aes", "torch"])
def test_the_report_states_margin_theorem_and_generator(source: str) -> None:
    report = report_of(noise_source=source)
    margin = MARGIN + 8 * 2**-22  # 8 examples in fp32
    assert report.rounding_margin == report.to_dict()["rounding_margin"] == pytest.approx(margin)
    (stated,) = (text for text in report.caveats if "Theorem 8" in text)
    assert f"clipped to {1 - margin:.6g} of max_grad_norm" in stated and "measured, not proven" in stated
    assert any("not a cryptographic one" in text for text in report.caveats) == (source == "torch")
    assert "real arithmetic" not in str(report)


def test_without_noise_there_is_nothing_to_state() -> None:
    report = report_of(eps=math.inf, noise_multiplier=0.0)
    assert report.rounding_margin is None
    assert not any("Theorem 8" in text for text in report.caveats)
