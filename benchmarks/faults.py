"""Five faults that void a privacy guarantee, each planted in one named place of the library.

An audit must catch every one of them. Each is a context manager; nothing is changed once it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from lightning_lap2.accounting import Release
from lightning_lap2.callback import preparing
from lightning_lap2.callback.release import releases
from lightning_lap2.callback.release.releases import Releases
from lightning_lap2.gradients import vmap
from lightning_lap2.sampling import PoissonBatchSampler


@contextmanager
def half_noise() -> Iterator[None]:
    """Noise at half the scale that the ledger is charged for."""
    release = releases.release_

    def weaker(total: Any, *, scale: float, **options: Any) -> None:
        release(total, scale=scale / 2, **options)

    with mock.patch.object(releases, "release_", weaker):
        yield


@contextmanager
def bare_layer() -> Iterator[None]:
    """No noise on the first parameter tensor of the module."""
    release, layouts = releases.release_, preparing.make_layout
    sizes: list[int] = []

    def layout(*args: Any) -> Any:
        made = layouts(*args)
        sizes[:] = made.sizes
        return made

    class Skipping:
        def __init__(self, noise: Any) -> None:
            self.noise = noise

        def add_(self, values: Any, scale: float, distribution: str, **options: Any) -> None:
            self.noise.add_(values[sizes[0] :], scale, distribution, **options)

    def partial(total: Any, *, noise: Any, **options: Any) -> None:
        release(total, noise=Skipping(noise), **options)

    with mock.patch.object(releases, "release_", partial), mock.patch.object(preparing, "make_layout", layout):
        yield


@contextmanager
def clipped_mean() -> Iterator[None]:
    """The mean of the gradients is clipped instead of each of them."""

    def after_averaging(gradients: Any, layout: Any, clipper: Any, total: Any) -> None:
        rows = torch.cat([g.reshape(len(g), -1).to(total.dtype) for g in gradients], dim=1)
        mean = rows.mean(dim=0)
        weight = clipper.weights(mean.double().norm()[None, None])
        total.add_(mean * float(weight), alpha=len(rows))

    with mock.patch.object(vmap, "add_clipped_sum", after_averaging):
        yield


@contextmanager
def drawn_twice() -> Iterator[None]:
    """Every sampled record is in the batch twice."""
    draw = PoissonBatchSampler._draw

    def doubled(sampler: PoissonBatchSampler, release: int, parts: int) -> list[tuple[list[int], int]]:
        return [(batch * 2 if count else batch, 2 * count) for batch, count in draw(sampler, release, parts)]

    with mock.patch.object(PoissonBatchSampler, "_draw", doubled):
        yield


@contextmanager
def small_rate() -> Iterator[None]:
    """The ledger is charged for a quarter of the sampling rate."""
    event = Releases.event

    def less(made: Releases, dimension: int) -> Release:
        full = event(made, dimension)
        return replace(full, sample_rate=full.sample_rate / 4)

    with mock.patch.object(Releases, "event", less):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "half_noise": half_noise,
    "bare_layer": bare_layer,
    "clipped_mean": clipped_mean,
    "drawn_twice": drawn_twice,
    "small_rate": small_rate,
}
