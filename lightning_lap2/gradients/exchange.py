"""Collectives that the ranks of a job need at different times, or a different number of times.

A collective works when every rank calls it. What a private step needs of other ranks depends on its draw: how many
examples there are, in how many shapes, which engine takes them, whether one of them raises. So nothing is called
unannounced: in each round every rank says what it needs next, or that it needs nothing more, and then all of them serve
everything that was asked for, in one order. Ranks may thus ask for whatever they like, in any order and any number of
times; whoever is done early serves the others until all are. One that fails says so, and the others raise.

What is told is numbers of layers and parameters, between processes of one job; nothing of it is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch.utils._python_dispatch import _disable_current_modes

from lightning_lap2.gradients.physical import functorch_left

_DONE, _FAILED = -1, -2


class OtherRankError(RuntimeError):
    """Another rank failed, or is somewhere else."""


class Exchange:
    """One meeting of all ranks after the other, each as long as a step.

    Args:
        serve: ``serve(request, mine)`` does one collective; called on all ranks for the same request, in the same
            order; ``mine``: whether this rank asked for it.
        device: where the job's tensors live. What is announced is read by Python, so it goes through a group of its own
            where the default group's backend keeps tensors on accelerators.
    """

    def __init__(self, serve: Callable[[int, bool], None], device: torch.device) -> None:
        self._serve = serve
        self._ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        apart = self._ranks > 1 and device.type != "cpu"
        self._group = torch.distributed.new_group(backend="gloo") if apart else None
        # number of the meeting, what is asked for
        self._word = torch.zeros(2, dtype=torch.int64)
        self._words = torch.zeros(2 * self._ranks, dtype=torch.int64)
        self._open = self._lost = False
        self._meetings = 0

    def everywhere(self, fact: bool) -> bool:
        """Whether it holds on every rank; asked by all of them."""
        if self._ranks == 1:
            return fact
        self._meetings += 1
        return all(told == 1 for told in self._announce(int(fact)))

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """All ranks enter it together, and leave it together.

        Raises:
            OtherRankError: another rank failed in it.
        """
        self._open, self._lost = True, False
        self._meetings += 1
        try:
            yield
            while self._round(_DONE):
                pass
        except BaseException:
            if not self._lost:
                self._announce(_FAILED)
            raise
        finally:
            self._open = False

    def request(self, number: int) -> None:
        """Waits until the collective ``number`` (at least 0) was done by all ranks.

        Raises:
            RuntimeError: no meeting goes on, so that other ranks would not take part.
            OtherRankError: another rank failed.
        """
        if not self._open:
            raise RuntimeError("a collective was asked for outside a step of all ranks; please report this")
        self._round(number)

    def _round(self, own: int) -> bool:
        """Whether anybody needed something."""
        if self._ranks == 1:
            if own != _DONE:
                self._serve(own, True)
            return own != _DONE
        told = self._announce(own)
        if _FAILED in told:
            self._lost = True
            raise OtherRankError(
                f"rank {told.index(_FAILED)} failed in its step (its own message says why); no rank goes on without it"
            )
        asked = sorted(set(told) - {_DONE})
        for number in asked:
            self._serve(number, number == own)
        return bool(asked)

    def _announce(self, own: int) -> list[int]:
        """What every rank says.

        Raises:
            OtherRankError: the ranks are in different meetings: what one asked for must not enter another's sum.
        """
        if self._ranks == 1:
            return [own]
        with _disable_current_modes(), functorch_left():  # what follows the examples' values has no business here
            self._word.numpy()[:] = self._meetings, own
            torch.distributed.all_gather_into_tensor(self._words, self._word, group=self._group)
            told = self._words.numpy().reshape(-1, 2).tolist()
        if any(meeting != self._meetings for meeting, _ in told):
            self._lost = True
            raise OtherRankError("the ranks have come to different steps; please report this")
        return [said for _, said in told]
