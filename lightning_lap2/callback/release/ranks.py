"""The processes of one job: which coordinates of a vector belong to which, and how they add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_lap2.gradients import ParameterLayout

# Elements in flight between ranks: 64 MiB of fp32, large enough to fill the links, small enough for a staging buffer.
BUCKET = 16 * 2**20


@dataclass(frozen=True)
class Ranks:
    """One process among those of its job, and the coordinates of a flat vector of sums that belong to it: its part of
    what is sharded, and a slice of what every process holds alike.

    Attributes:
        rank: of this process, from 0.
        size: of the job.
        sharded: so many of the first entries are this process' shards. They are summed over the job already.
        replicas: the process group of those that hold the same shards; ``None`` where no two do.
    """

    rank: int = 0
    size: int = 1
    sharded: int = 0
    replicas: torch.distributed.ProcessGroup | None = None

    def of(self, layout: ParameterLayout) -> Ranks:
        """The same for the sums of these parameters."""
        return replace(self, sharded=layout.own, replicas=layout.replicas)

    def own(self, total: Tensor) -> list[Tensor]:
        """The views of ``total`` that belong to this process; those of all processes hold each coordinate once. What
        lies last in ``total`` comes last, see :meth:`owns_last`."""
        alike = total[self.sharded :]
        start, stop = _bounds(alike.numel(), self.rank, self.size)
        first = self.replicas is None or torch.distributed.get_rank(self.replicas) == 0
        parts = (total[: self.sharded] if first else total[:0], alike[start:stop])
        return [part for part in parts if part.numel()]

    def owns_last(self, total: Tensor) -> bool:
        """Whether the last entry of all, which is no shard, belongs to this process."""
        return self.rank == self.size - 1 and total.numel() > self.sharded

    def sum_(self, total: Tensor) -> None:
        """Adds ``total`` up over all processes, in place: each coordinate where it belongs, where alone it is then
        whole."""
        if self.size > 1:
            _by_slice(total[self.sharded :], self.size, _reduce)

    def share_(self, total: Tensor) -> None:
        """Gives each coordinate of ``total``, as its owner has it, to all that hold it, in place."""
        if self.size > 1:
            _by_slice(total[self.sharded :], self.size, _broadcast)
        if self.replicas is not None:
            torch.distributed.broadcast(total[: self.sharded], group=self.replicas, group_src=0)


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
