r"""Poisson sampling: every example enters an optimizer step independently, with a probability that is
accounted.

One draw per window, over this rank's shard of n_r examples, at rate q:

.. math::  K \sim \mathrm{Binomial}(n_r, q), \qquad S \mid K \text{ uniform among the } K\text{-subsets of
the shard.}

Given K all K-subsets of an i.i.d. family of coins are equally likely, so S is exactly the set of heads, at
a cost of K rather than n_r. The shards are disjoint and the ranks draw independently, so S over all ranks
is the set of heads among all N.
"""

from __future__ import annotations

import numpy as np

from lightning_lap2.sampling.parts import Draw, WindowedBatchSampler, positive


class PoissonBatchSampler(WindowedBatchSampler):
    """Replaces the train loader's batch sampler by Poisson draws.

    Every optimizer step draws once, over all the loader batches that are accumulated into it: separate
    draws would let one example enter twice. The indices, each at most once and in random order, go to the
    parts that each of them chooses at random. The epoch keeps its length; batch sizes vary from step to step.

    A window shorter than ``accumulate`` (at the end of an epoch, or after a resume in its middle) draws at
    a rate smaller in proportion, so that the gradients keep their weight; charging it at ``sample_rate``
    errs on the safe side.

    The coins come from the operating system: 32 fresh bytes per draw, hence nothing that
    ``seed_everything``, a fork or a resumed run could repeat. They key numpy's Philox4x64-10, a
    counter-based generator that passes the known statistical batteries; its key is used for one draw and no
    output is ever published, so that it takes no cryptographic generator to keep the coins secret. Uniforms
    carry 53 bits, where fp32 coins would inflate q = 1e-5 by 1.4e-3. numpy's binomial inversion never
    returns a count beyond n q + 10 sqrt(n q (1 - q) + 1), an event of probability under 1e-13 per draw.

    Args:
        num_examples: N, examples in the data set over all ranks.
        batch_size: expected examples per loader batch on one rank.
        num_batches: loader batches per epoch.
        accumulate: loader batches per optimizer step.
        rank: this process; its shard is rank, rank + world_size, rank + 2 world_size, ...
        world_size: processes.
        seed: makes the draws a function of (seed, release, rank), for runs that must be repeatable; such runs
            are **not private** towards anyone who knows the seed.
        views: how often each drawn index is given, in a row; the draws do not depend on it.

    Attributes:
        sample_rate: q = batch_size * accumulate * world_size / num_examples, at least the rate of every draw.
        expected_batch_size: batch_size * accumulate * world_size, the normaliser.

    Raises:
        ValueError: if a number is out of range, or q would exceed 1.
        TypeError: if a number is not an int.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        num_batches: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        views: int = 1,
    ) -> None:
        super().__init__(positive("num_batches", num_batches), accumulate, views, seed)
        self.num_examples = positive("num_examples", num_examples)
        self.batch_size = positive("batch_size", batch_size)
        self.num_batches = num_batches
        self.world_size = positive("world_size", world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0 .. world_size - 1 = {world_size - 1}, got {rank}")
        self.rank = rank
        self.expected_batch_size = batch_size * accumulate * world_size
        if self.expected_batch_size > num_examples:
            raise ValueError(
                f"the expected batch is larger than the data: batch_size={batch_size} * accumulate_grad_batches="
                f"{accumulate} * world_size={world_size} = {self.expected_batch_size} > num_examples="
                f"{num_examples}, a sampling rate above 1. Use a smaller batch_size or fewer "
                "accumulated batches"
            )
        self.sample_rate = self.expected_batch_size / num_examples
        self._shard = len(range(rank, num_examples, world_size))
        # Any valid index serves for an empty draw; a fixed one depends on no coin.
        self._template = rank if rank < num_examples else 0

    def __len__(self) -> int:
        return self.num_batches

    def _open(self) -> Draw:
        return self._draw

    def _draw(self, release: int, parts: int) -> list[tuple[list[int], int]]:
        """One Poisson draw of the shard, dealt out to ``parts`` loader batches."""
        coins = self._coins(release)
        rate = parts * self.batch_size * self.world_size / self.num_examples
        count = int(coins.binomial(self._shard, rate))
        # Floyd's algorithm where count is small, a tail shuffle where the shard is at most 50 times as large.
        local = coins.choice(self._shard, count, replace=False, shuffle=True) if count else np.empty(0, np.int64)
        drawn = self.rank + self.world_size * local
        # each example chooses its part by itself: dealt by position, one that joins would move others to another
        # batch_idx, which their loss may depend on
        chosen = coins.integers(parts, size=count)
        dealt = [drawn] if parts == 1 else [drawn[chosen == part] for part in range(parts)]
        return [(part.tolist(), len(part)) if len(part) else ([self._template], 0) for part in dealt]

    def _coins(self, release: int, purpose: str = "poisson") -> np.random.Generator:
        """The generator of one draw: 128 secret bits as key, 128 as upper half of the counter."""
        secret = self.secret(purpose, release)
        words = np.frombuffer(secret, "<u8").astype(np.uint64)  # least significant first
        counter = np.zeros(4, np.uint64)
        counter[2:] = words[2:]
        return np.random.Generator(np.random.Philox(key=words[:2], counter=counter))
