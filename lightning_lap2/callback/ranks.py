"""The processes of one job: which slice of a vector belongs to which, and how they add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements in flight between ranks: 64 MiB of fp32, large enough to fill the links, small enough for a staging buffer.
BUCKET = 16 * 2**20


@dataclass(frozen=True)
class Ranks:
    """One process among those of its job, each of which owns a slice of every flat vector.

    Attributes:
        rank: of this process, from 0.
        size: of the job.
    """

    rank: int = 0
    size: int = 1

    def own_slice(self, n: int) -> tuple[int, int]:
        """Start and stop of this rank's slice of ``n`` coordinates."""
        return _bounds(n, self.rank, self.size)

    def sum_(self, total: Tensor) -> None:
        """Adds ``total`` ``[n]`` up over all ranks, in place: each slice on its owner, where alone it is then whole."""
        if self.size > 1:
            _by_slice(total, self.size, _reduce)

    def share_(self, total: Tensor) -> None:
        """Gives all ranks each slice of ``total`` ``[n]`` as its owner has it, in place."""
        if self.size > 1:
            _by_slice(total, self.size, _broadcast)


def _bounds(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """The slice of ``n`` coordinates that a rank owns; slices differ in length by at most one."""
    return n * rank // world_size, n * (rank + 1) // world_size


def _by_slice(total: Tensor, world_size: int, move: Callable[[Tensor, int], Any]) -> None:
    """Starts ``move(part, owner)`` for the slices of all ranks at once, a bucket of each, and waits; bucket by bucket.

    Reduce and broadcast rather than reduce-scatter and all-gather, which take equal slices only and which gloo runs at
    a quarter of the speed.
    """
    bounds = [_bounds(total.numel(), owner, world_size) for owner in range(world_size)]
    bucket = max(1, BUCKET // world_size)
    for first in range(0, max(stop - start for start, stop in bounds), bucket):
        parts = [total[start + first : min(start + first + bucket, stop)] for start, stop in bounds]
        works = [move(part, owner) for owner, part in enumerate(parts) if part.numel()]
        for work in works:
            work.wait()


def _reduce(part: Tensor, owner: int) -> Any:
    return torch.distributed.reduce(part, owner, op=torch.distributed.ReduceOp.SUM, async_op=True)


def _broadcast(part: Tensor, owner: int) -> Any:
    return torch.distributed.broadcast(part, owner, async_op=True)
