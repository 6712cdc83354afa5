"""Which coordinates belong to which process; how they add up is tests/ddp's and tests/sharded's matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.callback.release.window import release_
from lightning_lap2.noise import make_noise_source


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("alike", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("sharded", [0, 4])
def test_each_coordinate_has_one_owner(size: int, alike: int, sharded: int) -> None:
    """Shards are their holder's; of what all hold alike, each entry one process'; what lies last is known as such."""
    owners = torch.zeros(alike)
    for rank in range(size):
        ranks, total = Ranks(rank, size, sharded=sharded), torch.zeros(sharded + alike)
        parts = ranks.own(total)
        assert all(part.numel() for part in parts)
        for part in parts:
            part += 1  # views
        assert bool((total[:sharded] == 1).all())
        owners += total[sharded:]
        assert ranks.owns_last(total) == bool(alike and total[-1])
        if ranks.owns_last(total):
            assert parts[-1].data_ptr() + parts[-1].nbytes == total.data_ptr() + total.nbytes
    assert bool((owners == 1).all())


def test_shards_and_slices_are_noised_in_one_call() -> None:
    """Two calls would draw the same numbers for both, since a release has one stream of them."""

    def noised(shards: int, alike: int) -> Tensor:
        total, source = torch.zeros(shards + alike), make_noise_source("aes", torch.device("cpu"), seed=1)
        # one process: nothing is sent
        release_(total, noise=source, scale=2.0, distribution="laplace", normaliser=1.0, release=3,
                 ranks=Ranks(0, 1, sharded=shards))  # fmt: skip
        return total

    assert torch.equal(noised(400, 600), noised(0, 1000))
    assert float((noised(400, 600)[:400] == noised(400, 600)[400:800]).float().mean()) < 0.1
