"""One optimizer step's clipped sum: gathered part by part, noised once, handed out once.

The un-noised sum lives here and nowhere else. It is never in ``.grad``, where other hooks would see it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.gradients import ParameterLayout
from lightning_lap2.noise import NoiseSource
from lightning_lap2.sampling import Part

_ALONE = Ranks()


class Window:
    """The sum over the parts of one draw (``accumulate_grad_batches`` loader batches).

    Soundness rests on two facts that are checked here: all parts belong to one draw, in which each example occurs at
    most once, and no part is added twice. Then each example enters a release at most once.

    Args:
        counted: one more entry behind the gradient, for the count of adaptive clipping.
    """

    def __init__(self, layout: ParameterLayout, *, counted: bool = False) -> None:
        self.layout = layout
        self._entries = int(counted)
        self._total: Tensor | None = None
        self._parts: list[Part] = []

    @property
    def empty(self) -> bool:
        return self._total is None

    @property
    def size(self) -> int:
        """Loader batches in the draw that is gathered; 0 when empty."""
        return self._parts[-1].of if self._parts else 0

    @property
    def complete(self) -> bool:
        """Whether every part of the draw is gathered, and not taken yet."""
        return bool(self._parts) and self._parts[-1].index == self._parts[-1].of - 1

    def begins(self, part: Part) -> bool:
        """Whether ``part`` belongs to another draw than what is gathered so far."""
        return self.empty or part.index == 0 or part.release != self._parts[-1].release

    def restart(self, layout: ParameterLayout) -> bool:
        """Starts a new draw; whatever was gathered and never released is dropped. True if something was."""
        dropped = not self.empty
        self.layout = layout
        self._total, self._parts = None, []
        return dropped

    def open(self, part: Part) -> Tensor:
        """The flat sum ``[held]`` that ``part`` is to be added to; one more entry with a count.

        Raises:
            RuntimeError: this part was added before: the user's optimizer or ``optimizer_step`` ran its closure twice.
        """
        if part in self._parts:
            raise RuntimeError(
                "training_step ran twice for the same batch before the optimizer stepped (an optimizer or an "
                "optimizer_step override that calls its closure several times), so an example would enter one "
                "release twice; use an optimizer that calls the closure once"
            )
        self._parts.append(part)
        if self._total is None:
            self._total = self.layout.zeros(self._entries)
        return self._total

    def take(self) -> Tensor | None:
        """The sum, which the window then no longer holds; ``None`` if nothing was gathered since the last call."""
        total = self._total
        self._total, self._parts = None, []
        return total


def release_(
    total: Tensor,
    *,
    noise: NoiseSource,
    scale: float,
    distribution: str,
    normaliser: float,
    release: int,
    last_factor: float = 1.0,
    ranks: Ranks = _ALONE,
) -> None:
    """Turns rank-local clipped sums into the noised mean, in place: ``(sum over ranks + noise) / normaliser``.

    First the sums are added up, each slice of the flat vector on the rank that it belongs to. That rank adds noise to
    its slice and rounds to the grid, once and for the whole job; then it tells all others. So noise costs 1/ranks,
    and what has its noise is never added to anything again, which would round it by what the records are. (Noise for
    each rank's own sum would not do either: a sum of Laplace draws is not Laplace.)

    Where parameters are sharded, the first entries are this rank's shards and hold the sum over ranks already. They are
    noised here and stay here; where other ranks hold the same shards, one of them noises and tells the others.

    Args:
        total: flat ``[held]``, fp32 or fp64, contiguous; a count behind the gradient is a coordinate like the others.
        scale: b of the Laplace or sigma of the Gaussian noise on the sum. 0: neither noise nor rounding.
        normaliser: the public expected batch size, never the number drawn.
        release: number of this release; keys seeded noise.
        last_factor: what the last coordinate's sum is multiplied by before its noise, for a count.
        ranks: of the job.

    Raises:
        ValueError: a scale that is NaN, infinite or negative, under which the sum would go out without noise.
    """
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(f"noise scale must be finite and not negative, got {scale!r}: nothing is released")
    ranks.sum_(total)
    factor = last_factor if ranks.owns_last(total) else 1.0
    _add_noise(ranks.own(total), noise, scale, distribution, release, factor)
    ranks.share_(total)
    total.div_(normaliser)


def _add_noise(
    own: list[Tensor], noise: NoiseSource, scale: float, distribution: str, release: int, last_factor: float
) -> None:
    """Noise for the coordinates of this rank, in one call: a source's random numbers are of a release, and two calls
    would have the same."""
    if not scale or not own:
        return
    together = own[0] if len(own) == 1 else torch.cat(own)
    noise.add_(together, scale, distribution, release=release, last_factor=last_factor)
    if len(own) > 1:
        for part, noised in zip(own, together.split([part.numel() for part in own]), strict=True):
            part.copy_(noised)
