"""Neighbour replay: noise and draws frozen, one record replaced by a null record of the same declared N.

The released vectors then differ by at most C / expected batch size in the clipping norm, and nothing else differs:
not the ledger, not the plan, not which other records were drawn. This is what the whole path must satisfy for the
proof to apply to it, whatever lies between the loader and the optimizer.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy
from lightning_lap2.callback import preparing
from tests.scenarios.common import Classifier, data, flat, trainer

N, BATCH, C = 24, 4, 0.05


class Weighted(Classifier):
    """Each record carries a weight; a record of weight 0 has no gradient: the null record."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, weight = batch
        losses = torch.nn.functional.cross_entropy(self.net(x), y, reduction="none")
        loss = (weight * losses).mean()
        self.log("loss", loss)
        return loss


def release(removed: int | None, *, multiplier: float, **settings: Any) -> tuple[Tensor, Lap2Privacy]:
    """The move of one step at learning rate 1, without record ``removed``; weights of 1e3 make every clip bite."""
    torch.manual_seed(0)
    module = Weighted(lr=1.0)
    x, y = data(N).tensors
    weight = torch.full((N,), 1e3)
    if removed is not None:
        weight[removed] = 0.0
    accumulate = settings.pop("accumulate", 1)
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=multiplier, max_grad_norm=C, noise_seed=3, **settings)
    before = flat(module).clone()
    run = trainer(callback, max_steps=1, accumulate_grad_batches=accumulate)
    with mock.patch.object(preparing, "CELLS", 2**30):  # else two releases with one noise differ by whole cells
        run.fit(module, DataLoader(TensorDataset(x, y, weight), batch_size=BATCH, shuffle=True))
    return flat(module) - before, callback


def said(callback: Lap2Privacy) -> dict[str, Any]:
    """The report, without what follows from a released count."""
    report = callback.report().to_dict()
    if report["clipping"] == "adaptive":
        del report["clipping_threshold"], report["scale"]
    return report


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "vmap"},
        {"engine": "vmap", "chunk_size": 2},
        {"engine": "ghost"},
        {"engine": "loop"},
        {"engine": "vmap", "accumulate": 3},
        {"engine": "vmap", "mechanism": "laplace_l1"},
        {"engine": "ghost", "mechanism": "gaussian", "multiplier": 1.0},
        {"engine": "vmap", "sampling": "none", "multiplier": 1.0},
        {"engine": "vmap", "augmentations": 3},
        {"engine": "ghost", "augmentations": 2, "accumulate": 3},
        {"engine": "loop", "augmentations": 2, "sampling": "none", "multiplier": 1.0},
        {"engine": "ghost", "clipping": "automatic"},
        {"engine": "ghost", "clipping": "per_layer", "accumulate": 3},
        {"engine": "vmap", "clipping": "per_layer", "mechanism": "laplace_l1"},
        {"engine": "vmap", "clipping": "adaptive", "multiplier": 1.0, "count_noise_scale": 5.0, "augmentations": 2},
        {"engine": "ghost", "clipping": "adaptive", "sampling": "none", "multiplier": 0.0},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.filterwarnings("ignore:.*all views of each record looked at are identical")
def test_neighbours_differ_by_at_most_c_over_b(settings: dict[str, Any]) -> None:
    settings = {"multiplier": 0.0, **settings}
    whole, reference = release(None, **settings)
    norm = 1 if settings.get("mechanism") == "laplace_l1" else 2
    bound = C / reference.expected_batch_size
    moved = []
    for removed in range(0, N, 2):
        without, callback = release(removed, **settings)
        moved.append(torch.linalg.vector_norm((whole - without).double(), norm).item())
        assert callback.accountant == reference.accountant
        assert said(callback) == said(reference)
    # weights near 1 are fp32: the move of a weight is exact to 1e-7 or so
    assert max(moved) <= bound * (1 + 1e-5) + 1e-6
    assert max(moved) >= bound * 0.99, "a record that was drawn moves the release by all of C"
    if settings.get("sampling") != "none" and settings.get("accumulate", 1) == 1:
        assert min(moved) == 0.0, "a record that was not drawn moves nothing"
