"""The random generators that users' code draws from, with secret seeds of their own while it runs.

A record that joins a draw shifts the random numbers of those behind it. With secret, independent numbers that is
harmless: couple each record's stream, and the others' contributions do not move. Under ``seed_everything(42)`` it is
not: the numbers are known, and every later dropout mask of the step would move, up to 2 C for each example. So
training draws from seeds of the operating system; ``seed_everything`` fixes weights and splits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class Entropy:
    """Seeds for one batch.

    Args:
        key: makes them a function of it, for runs that must be repeatable (and are not private towards who knows it);
            ``None``: fresh from the operating system each time.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key, self._taken = key, 0
        self._last = b""

    def take(self, *, again: bool | bytes = False) -> bytes:
        """32 bytes that were not given before, or the latest ``again``, or those given."""
        if isinstance(again, bytes):
            return again
        if again:
            return self._last
        self._taken += 1
        if self._key is None:
            self._last = os.urandom(32)
        else:
            self._last = hashlib.shake_256(self._key + self._taken.to_bytes(8, "little")).digest(32)
        return self._last


@contextmanager
def private_generators(
    entropy: Entropy, device: torch.device | None = None, *, again: bool | bytes = False
) -> Iterator[None]:
    """Python's, numpy's and torch's global generators (and the device's) seeded anew inside, afterwards as they were.

    Args:
        again: as they were seeded the last time, or from these bytes.
    """
    python, numbers, cpu = random.getstate(), _NumPy.now(), torch.default_generator.get_state()
    accelerator = None
    if device is not None and device.type == "cuda":
        accelerator = torch.cuda.get_rng_state(device)
    try:
        seed_generators(entropy.take(again=again), device)
        seeded = _numpy_memory()
        yield
    finally:
        random.setstate(python)
        numbers.put_back(seeded)
        torch.default_generator.set_state(cpu)
        if accelerator is not None:
            torch.cuda.set_rng_state(accelerator, device)  # type: ignore[arg-type]


class _NumPy(NamedTuple):
    """The state of numpy's global generator, of which only the memory is read and written where that is enough: asking
    for the state takes 40 microseconds, and setting it as long, at every step.

    Attributes:
        generator: numpy's bit generator.
        memory: its state as bytes, ``None`` where it is of another kind than numpy starts with.
        state: as numpy gives it, which is more: a normal number may be kept for the next call.
    """

    generator: Any
    memory: bytes | None
    state: Any

    @classmethod
    def now(cls) -> _NumPy:
        """The present state."""
        global _latest
        generator, memory = _bit_generator(), _numpy_memory()
        # equal memory is an equal state where no normal number was kept: keeping one takes a draw
        known = _latest is not None and _latest.generator is generator and _latest.memory == memory is not None
        if not known or _latest is None or _latest.state[3]:
            _latest = cls(generator, memory, np.random.get_state())  # noqa: NPY002 (users' code draws from it)
        return _latest

    def put_back(self, seeded: bytes | None) -> None:
        """Makes it the present state again.

        Args:
            seeded: the memory right after seeding; as it still is, nothing was drawn, and no normal number kept.
        """
        untouched = seeded is not None and _bit_generator() is self.generator
        if untouched and self.memory is not None and not self.state[3] and _numpy_memory() == seeded:
            ctypes.memmove(self.generator.ctypes.state_address, self.memory, len(self.memory))
        else:
            np.random.set_state(self.state)  # noqa: NPY002


_bit_generator: Any = np.random.mtrand.get_bit_generator
_latest: _NumPy | None = None
_MEMORY = 625 * 4  # of the Mersenne Twister: 624 words, and how many of them are used up


def _numpy_memory() -> bytes | None:
    """The state of numpy's global bit generator as it lies in memory; ``None``: not a Mersenne Twister."""
    generator = _bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MEMORY)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global generators as a function of ``seed``, and afterwards as they were."""
    with private_generators(Entropy(b"seed" + seed.to_bytes(16, "little"))):
        yield


def seed_generators(secret: bytes, device: torch.device | None = None) -> None:
    """Seeds Python's, numpy's and torch's global generators, and the device's, from 32 bytes."""
    random.seed(secret[:16])
    np.random.seed(np.frombuffer(secret[16:24], np.uint32))  # noqa: NPY002 (users' code draws from it)
    # not torch.manual_seed, which queues a call (and a stack trace) for every kind of device there is
    torch.default_generator.manual_seed(int.from_bytes(secret[24:32], "little") >> 1)
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(int.from_bytes(secret[:8], "little") >> 1)
