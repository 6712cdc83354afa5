"""The user's own loader order, without sampling: counted, and watched for repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import islice
from operator import index as as_index

import numpy as np
from torch.utils.data import BatchSampler

from lightning_lap2.sampling.parts import Draw, WindowedBatchSampler


class RecordedBatchSampler(WindowedBatchSampler):
    """Yields the lists of another batch sampler (each index ``views`` times) and keeps the same record of parts.

    Without sampling there is no amplification: a pass in which every example is used at most once costs one
    release at q = 1 (under zero-out adjacency). That "at most once" is checked here index by index, on this
    rank; what other ranks use is for :func:`provably_once`.

    After ``start(batch_idx=k)`` the wrapped sampler begins at *its* beginning, since nothing tells whether
    it would repeat its earlier order: examples used before the interruption can come again. The resumed
    part of an epoch is therefore a pass of its own, to be charged as one.

    Args:
        batch_sampler: an iterable of index lists, one pass per iteration.
        num_batches: loader batches per epoch; by default the length of ``batch_sampler``.
        accumulate: loader batches per optimizer step.
        views: how often each index is given, in a row.
        seed, rank: make the workers' random numbers repeatable, as in :class:`PoissonBatchSampler`.

    Raises:
        TypeError: if ``num_batches`` is not given and ``batch_sampler`` has no length.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        *,
        num_batches: int | None = None,
        accumulate: int = 1,
        views: int = 1,
        seed: int | None = None,
        rank: int = 0,
    ) -> None:
        if num_batches is None:
            if not isinstance(batch_sampler, Sized):
                raise TypeError(f"{type(batch_sampler).__name__} has no length: give num_batches")
            num_batches = len(batch_sampler)
        super().__init__(num_batches, accumulate, views, seed)
        self.rank = rank
        self.num_batches = num_batches
        self.batch_sampler = batch_sampler

    @property
    def batch_size(self) -> int | None:
        """Of the wrapped sampler, if it has one."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def sampler(self) -> object:
        """The wrapped sampler's own sampler, where Lightning looks for ``set_epoch``."""
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        return self.num_batches

    def _open(self) -> Draw:
        batches = iter(self.batch_sampler)
        seen = _Seen()

        def draw(release: int, parts: int) -> list[tuple[list[int], int]]:
            window = list(islice(batches, parts))
            for batch in window:
                if not seen.add(batch):
                    raise RuntimeError(
                        f"{self._name()} gave an example twice in one pass: sampling='none' is accounted for "
                        "each example at most once per pass. Use a sampler without replacement, or "
                        "sampling='poisson'"
                    )
            return [(batch, len(batch)) for batch in window]

        return draw

    def _name(self) -> str:
        inner = self.batch_sampler
        if type(inner) is BatchSampler:
            return type(inner.sampler).__name__
        return type(inner).__name__


class _Seen:
    """The set of indices given in one pass, one bit each."""

    def __init__(self) -> None:
        self._bits = np.zeros(1024, np.uint8)

    def add(self, batch: list[int]) -> bool:
        """Whether the indices are new and distinct; they count as seen from now on.

        Raises:
            TypeError: for an index that is not an integer.
            ValueError: for a negative one, which would be a second name for an example.
        """
        if not batch:
            return True
        indices = np.fromiter((as_index(i) for i in batch), np.int64, len(batch))
        if indices.min() < 0:
            raise ValueError(f"the batch sampler gave the negative index {indices.min()}: use 0 .. N - 1")
        byte, bit = indices >> 3, np.left_shift(1, indices & 7).astype(np.uint8)
        if byte.max() >= len(self._bits):
            self._bits.resize(max(2 * len(self._bits), int(byte.max()) + 1), refcheck=False)
        if (self._bits[byte] & bit).any() or len(np.unique(indices)) < len(indices):
            return False
        np.bitwise_or.at(self._bits, byte, bit)
        return True
