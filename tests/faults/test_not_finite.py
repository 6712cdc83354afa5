"""NaN and infinity, wherever they come from: sound training, or an error that names the place; never a release
without noise and never one that carries a NaN on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2.callback.release.window import release_
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise import make_noise_source
from tests.helpers import (
    LIGHTNING,
    LIGHTNING_WARNINGS,
    Release,
    classifier,
    quiet_trainer,
    records,
    watched_releases,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
BAD = [math.nan, math.inf, -math.inf]
N, BATCH = 16, 4


def fit(module: Any, x: Tensor | None = None, **arguments: Any) -> tuple[Any, list[Release]]:
    """Callback and releases of 8 steps."""
    data = records(N)
    if x is not None:
        data = TensorDataset(x, data.tensors[1])
    callback = Lap2Privacy(**{"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint", **arguments})
    trainer = quiet_trainer(pl, callback, max_epochs=2)
    with watched_releases() as seen:
        trainer.fit(module, DataLoader(data, BATCH))
    return callback, seen


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("value", BAD)
def test_inputs(engine: str, value: float) -> None:
    """Every second record is poisoned: it adds nothing, the others train."""
    x = records(N).tensors[0].clone()
    x[::2] = value
    module = classifier(pl)
    callback, seen = fit(module, x, engine=engine)
    assert callback.steps == len(seen) == 8
    for release in seen:
        assert torch.isfinite(release.before).all() and torch.isfinite(release.after).all()
        assert torch.linalg.vector_norm(release.before.double()) <= N * callback.max_grad_norm
    assert any((release.before != 0).any() for release in seen)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("value", BAD)
def test_losses(engine: str, value: float) -> None:
    """A loss that is never finite: steps of noise alone, each charged. (Ghost refuses what it cannot check.)"""
    module = classifier(pl, step=lambda module, batch, batch_idx: module.loss(batch) * value)
    callback, seen = fit(module, engine=engine)
    assert callback.steps == callback.accountant.steps == 8
    assert all(release.is_noise_alone for release in seen)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("value", BAD)
def test_rows_are_left_out_of_logged_means_and_never_counted(engine: str, value: float) -> None:
    """Every record is drawn (q = 1): the mean of the others, as plain torch has it. The report is the same text whether
    no record is bad, one, or half of them."""
    reports = set()
    for bad in ([], [3], [*range(0, N, 2)]):
        x, y = (part.clone() for part in records(N).tensors)
        x[bad] = value
        good = [row for row in range(N) if row not in bad]
        module = classifier(pl)
        expected = F.cross_entropy(module.layer(x[good]), y[good])
        callback = Lap2Privacy(eps=20.0, noise_multiplier=1.5, bound="joint", engine=engine)
        trainer = quiet_trainer(pl, callback, max_steps=1)
        trainer.fit(module, DataLoader(TensorDataset(x, y), N))
        torch.testing.assert_close(trainer.callback_metrics["train_loss"], expected.detach())
        reports.add(str(callback.report()))
    assert len(reports) == 1
    assert "left out of logged means" in reports.pop()


@pytest.mark.parametrize("value", BAD)
def test_parameters_before_training_are_refused_by_name(value: float) -> None:
    module = classifier(pl)
    with torch.no_grad():
        module.layer.bias[1] = value
    with pytest.raises(ValueError, match=r"parameter layer\.bias holds NaN or infinite values before the first step"):
        fit(module)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_learning_rate(engine: str, rate: float) -> None:
    """Weights are lost at the first step. What follows is noise alone: charged, and said."""
    module = classifier(pl, learning_rate=rate)
    with pytest.warns(UserWarning, match=r"parameter layer\.weight holds NaN or infinite values") as warned:
        callback, seen = fit(module, engine=engine)
    assert sum("holds NaN" in str(w.message) for w in warned) == 1
    assert callback.steps == callback.accountant.steps == len(seen) == 8
    assert all(torch.isfinite(release.after).all() for release in seen)
    assert all(release.is_noise_alone for release in seen[1:])


@pytest.mark.parametrize("value", [*BAD, -1.0])
def test_scale_of_the_noise(value: float) -> None:
    """At every level that a scale passes through."""
    with pytest.raises(ValueError, match="noise_multiplier must"):
        Lap2Privacy(eps=1.0, noise_multiplier=value)
    if not value > 0:
        with pytest.raises(ValueError, match="noise_multiplier must"):
            Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=value)
        with pytest.raises(ValueError, match="max_grad_norm must"):
            Lap2Privacy(eps=1.0, max_grad_norm=value)
    total = torch.ones(4)
    source = make_noise_source("aes", torch.device("cpu"), seed=None, rank=0)
    with pytest.raises(ValueError, match="noise scale must be finite and not negative.*nothing is released"):
        release_(total, noise=source, scale=value, distribution="laplace", normaliser=4, release=0)
    assert torch.equal(total, torch.ones(4))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_grad_norm": 1e-44},
        {"max_grad_norm": 3e38},
        {"max_grad_norm": 1e300},
        {"max_grad_norm": 1e20, "noise_multiplier": 1e30},
        {"noise_multiplier": 1e-40, "eps": math.inf},
    ],
    ids=str,
)
def test_scale_that_the_sum_cannot_hold_is_refused_before_the_first_step(arguments: dict[str, Any]) -> None:
    module = classifier(pl)
    with pytest.raises(ValueError, match="max_grad_norm=.* outside what torch.float32 can hold"):
        fit(module, **{"eps": 1e9, **arguments})


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_parameter_types_without_a_proof_are_refused_by_name(dtype: torch.dtype) -> None:
    module = classifier(pl)
    module.more = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ValueError, match=f"trainable parameter more is {dtype}"):
        fit(module)
    module.more.requires_grad = False
    callback, _ = fit(module)
    assert callback.dimension == 8


def test_lazy_layer_is_refused_by_name() -> None:
    module = classifier(pl)
    module.more = torch.nn.LazyLinear(2)
    with pytest.raises(ValueError, match=r"parameter more\.weight belongs to a lazy layer"):
        fit(module)
