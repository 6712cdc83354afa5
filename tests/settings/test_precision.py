"""Whatever the Trainer's precision, norms, sums and noise are fp32 or wider; fp16 is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lap2.gradients import FlatClipper
from lightning_lap2.noise import NoiseSource
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer, watched_releases

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2

PARAMETERS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("precision", PARAMETERS)
def test_norms_sums_and_noise_are_wide(precision: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[torch.dtype]] = {"norms": set(), "noise": set()}
    weights, add = FlatClipper.weights, NoiseSource.add_

    def spy_weights(self: FlatClipper, norms: Tensor) -> Tensor:
        seen["norms"].add(norms.dtype)
        return weights(self, norms)

    def spy_add(self: NoiseSource, values: Tensor, *args: Any, **options: Any) -> None:
        seen["noise"].add(values.dtype)
        add(self, values, *args, **options)

    monkeypatch.setattr(FlatClipper, "weights", spy_weights)
    monkeypatch.setattr(NoiseSource, "add_", spy_add)
    callback, module = Lap2Privacy(eps=3.0, engine=engine), classifier(pl)
    trainer = quiet_trainer(pl, callback, max_epochs=2, precision=precision)
    with watched_releases() as releases:
        trainer.fit(module, loader(32, 8))
    wide = torch.float64 if precision == "64-true" else torch.float32
    assert callback.steps == 8
    assert seen == {"norms": {torch.float64}, "noise": {wide}}
    assert {release.dtype for release in releases} == {wide}
    assert {p.dtype for p in module.parameters()} == {PARAMETERS[precision]}
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert callback.report().precision == precision


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_user_code_runs_under_the_precision_of_the_trainer(engine: str) -> None:
    seen: set[torch.dtype] = set()

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        seen.add(module.layer(batch[0]).dtype)
        return module.loss(batch)

    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0, engine=engine), max_epochs=1, precision="bf16-mixed")
    trainer.fit(classifier(pl, step=step), loader(32, 8))
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(
    "plugin",
    [
        pl.plugins.precision.MixedPrecision("16-mixed", "cpu"),
        pl.plugins.precision.HalfPrecision("16-true"),
    ],
    ids=["16-mixed", "16-true"],
)
def test_fp16_is_refused_with_the_reason(plugin: Any) -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0), plugins=[plugin], max_epochs=1)
    with pytest.raises(ValueError, match=rf"precision='{plugin.precision}'.*loss scaler skips steps.*'bf16-mixed'"):
        trainer.fit(classifier(pl), loader(32, 8))
