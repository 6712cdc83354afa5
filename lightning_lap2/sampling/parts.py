"""Windows of loader batches: which optimizer step a batch belongs to, and how many examples are in it.

Lightning steps after every ``accumulate`` loader batches, counted from the start of the epoch, and after the
epoch's last batch. The batches of one step form a *window*, and every one of them is a *part* of it.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Sampler


@dataclass(frozen=True)
class Part:
    """One loader batch on this rank.

    Attributes:
        release: number of the optimizer step it belongs to, counted as given to ``start`` (from 0).
        index: which part of the window, 0 .. of - 1.
        of: loader batches in the window.
        count: examples drawn for this part on this rank; 0 for an empty draw, whose batch holds one template
            record that must get weight zero. A batch has ``views`` rows for each of them.
        records: index of each of them in the data set, in the batch's order; empty where that is not known.
        left_out: indices that were drawn too, and left out (see ``WindowedBatchSampler.absent``).
    """

    release: int
    index: int
    of: int
    count: int
    records: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()


@dataclass
class _Pass:
    """One walk over the epoch: where it began, and the parts drawn but not yet asked for."""

    release: int
    position: int
    drawn: deque[Part] = field(default_factory=deque)
    next_release: int = 0  # after the last window of which a part was taken or, at the end, drawn
    begun: bool = False  # a part was taken, or the pass ran to its end

    def take(self) -> Part:
        part = self.drawn.popleft()
        self.begun, self.next_release = True, part.release + 1
        return part

    def end(self, release: int) -> None:
        self.begun, self.next_release = True, release

    def follower(self) -> tuple[int, int]:
        """(release, position) of the pass after this one; the same again if nothing of this one was used."""
        return (self.next_release, 0) if self.begun else (self.release, self.position)


class Indices(list[int]):
    """One loader batch: what a batch sampler gives a worker.

    Attributes:
        key: what the worker's random numbers are made from, for repeatable runs; ``None``: the operating system.
    """

    key: bytes | None = None

    def __reduce__(self) -> Any:
        return _indices, (list(self), self.key)


def _indices(values: list[int], key: bytes | None) -> Indices:
    made = Indices(values)
    made.key = key
    return made


Draw = Callable[[int, int], list[tuple[list[int], int]]]
"""(release, parts) -> at most ``parts`` loader batches of one window, each with its number of examples."""


class WindowedBatchSampler(Sampler[list[int]], ABC):
    """A batch sampler that knows its windows and tells the main process about each batch, in order.

    The index lists are made in the main process, ahead of the workers; :meth:`next_part` hands out their
    description first in, first out, which is the order in which a ``DataLoader`` delivers
    (``in_order=True``).

    Windows are numbered on from one pass to the next. A pass that ran to its end counts all its windows; one
    abandoned earlier (a limit on batches, an iterator made twice) counts those of which a part was taken, and
    one of which nothing was taken does not count at all. :meth:`start` sets the numbers anew.

    With ``views`` = K every index is given K times in a row, so that the data set is asked K times for the example
    and its random transforms give K views. Numbers of examples, rates and parts are those of K = 1: an example's
    views lie in one batch, side by side.

    Attributes:
        absent: indices that no batch holds although they are drawn like any other: the data set without these
            records, at the same public N and the same rates. Empty in training; an audit compares neighbours so.
    """

    drop_last = False
    rank = 0
    absent: frozenset[int] = frozenset()

    def __init__(self, num_batches: int | None, accumulate: int, views: int = 1, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"sampling seed must be an int or None, got {seed!r}")
        self.seed = seed
        self.accumulate = positive("accumulate", accumulate)
        self.views = positive("views", views)
        self._epoch_batches = None if num_batches is None else positive("num_batches", num_batches)
        self._most_batches = self._epoch_batches
        self._pending: tuple[int, int] | None = None
        self._pass = _Pass(0, 0)

    def start(self, *, release: int, batch_idx: int, num_batches: int | None = None) -> None:
        """Places the next pass.

        Args:
            release: number of the optimizer step that its first batch belongs to. batch_idx: position of
            its first batch in the epoch. In the middle of a window (the parts before it
                are lost with the run they belonged to) the rest of that window is one release of its own,
                of as many parts as are left.
            num_batches: loader batches per epoch from now on, at most those at construction, e.g. under
                ``limit_train_batches``; None for all.

        Raises:
            ValueError: if a number is negative, or beyond the epoch.
        """
        most = self._most_batches
        if num_batches is not None:
            positive("num_batches", num_batches)
            if most is not None and num_batches > most:
                raise ValueError(f"num_batches={num_batches} is more than the epoch's {most} loader batches")
        length = most if num_batches is None else num_batches
        if release < 0:
            raise ValueError(f"release must not be negative, got {release}")
        if batch_idx < 0 or (length is not None and batch_idx > length):
            raise ValueError(f"batch_idx={batch_idx} lies outside an epoch of {length} loader batches")
        self._epoch_batches = length
        self._pending = (release, batch_idx)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: iter() must begin the new pass, not the first next().
        release, position = self._pending or self._pass.follower()
        self._pending = None
        self._pass = _Pass(release, position)
        return self._walk(self._pass, self._open())

    def next_part(self) -> Part:
        """The part of the next loader batch, in the order of delivery.

        Raises:
            RuntimeError: if no further batch has been drawn in this pass.
        """
        if not self._pass.drawn:
            raise RuntimeError(
                f"{type(self).__name__}.next_part() was called without a batch: call it once per loader "
                "batch, in the process that iterates the loader"
            )
        return self._pass.take()

    @abstractmethod
    def _open(self) -> Draw:
        """What draws the windows of one pass."""

    def _walk(self, current: _Pass, draw: Draw) -> Iterator[list[int]]:
        release, position = current.release, current.position
        while self._epoch_batches is None or position < self._epoch_batches:
            first = position % self.accumulate
            parts = self.accumulate - first
            if self._epoch_batches is not None:
                parts = min(parts, self._epoch_batches - position)
            batches = draw(release, parts)
            for index, (drawn, count) in enumerate(batches, start=first):
                batch, records, left_out = self._leave_out(drawn, count)
                current.drawn.append(Part(release, index, first + len(batches), len(records), tuple(records), left_out))
                drawn_indices = Indices(self._rows(batch, drawn, release, index))
                drawn_indices.key = None if self.seed is None else self.secret(f"worker|part={index:d}", release)
                yield drawn_indices
            position += len(batches)
            release += bool(batches)
            if len(batches) < parts:
                break
        current.end(release)

    def secret(self, purpose: str, release: int) -> bytes:
        """32 bytes for one purpose in one release: of the operating system, or with a seed a function of both."""
        if self.seed is None:
            return os.urandom(32)
        text = f"lightning-lap2/v1/{purpose}|seed={self.seed:d}|release={release:d}|rank={self.rank:d}"
        return hashlib.shake_256(text.encode()).digest(32)

    def _rows(self, batch: list[int], drawn: list[int], release: int, part: int) -> list[int]:
        """What the data set is asked for: of each of ``batch``, which is ``drawn`` but for those left out."""
        return [example for example in batch for _ in range(self.views)]

    def _leave_out(self, drawn: list[int], count: int) -> tuple[list[int], list[int], tuple[int, ...]]:
        """(batch, its records, those left out) of what was drawn; a batch of which nothing is left is an empty draw."""
        records = drawn if count else []
        if not self.absent:
            return drawn, records, ()
        kept = [index for index in records if index not in self.absent]
        left_out = tuple(index for index in records if index in self.absent)
        return kept or drawn[:1], kept, left_out


def positive(name: str, value: int) -> int:
    """``value`` if it is an int of at least 1; TypeError or ValueError naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
