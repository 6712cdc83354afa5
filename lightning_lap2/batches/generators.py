"""The random generators that users' code draws from, with secret seeds of their own while it runs.

A record that joins a draw shifts the random numbers of those behind it. With secret, independent numbers that is
harmless: couple each record's stream, and the others' contributions do not move. Under ``seed_everything(42)`` it is
not: the numbers are known, and every later dropout mask of the step would move, up to 2 C for each example. So
training draws from seeds of the operating system; ``seed_everything`` fixes weights and splits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType, ModuleType
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
    entropy: Entropy,
    device: torch.device | None = None,
    *,
    own: OwnGenerators | None = None,
    again: bool | bytes = False,
) -> Iterator[None]:
    """Python's, numpy's and torch's global generators (and the device's) seeded anew inside, afterwards as they were.

    Args:
        own: seeded as well, and left so.
        again: as they were seeded the last time, or from these bytes.
    """
    python, numbers, cpu = random.getstate(), _NumPy.now(), torch.default_generator.get_state()
    accelerator = None
    if device is not None and device.type == "cuda":
        accelerator = torch.cuda.get_rng_state(device)
    try:
        secret = entropy.take(again=again)
        seed_generators(secret, device)
        seeded = _numpy_memory()
        if own is not None:
            own.seed(secret)
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


class OwnGenerators:
    """Generators of random numbers that users' objects keep for themselves: ``np.random.default_rng(0)`` on a data set
    or in a transform, a ``torch.Generator`` on a module or its class, a global ``random.Random`` that their code names.

    A seed that is known, or numbers that go on from one record to the next, would let one more record shift all the
    others' numbers, as with the global generators. So they are seeded with these.

    Args:
        roots: where to look: attributes, classes, what is in lists and dicts, and the globals, closures and defaults of
            functions. What is made anew inside a call (``default_rng(index)``) is left alone.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._slots: list[tuple[dict[Any, Any], Any]] = []
        self._found: list[Any] = []
        self._held: list[int] | None = None

    def seed(self, secret: bytes) -> None:
        """Seeds each as a function of ``secret`` and of its number."""
        if (held := self._holding()) != self._held:
            self._held = held
            self._slots, self._found = _generators(self._roots)
        places = [space[key] for space, key in self._slots if key in space]
        for number, generator in enumerate(itertools.chain(places, self._found)):
            if isinstance(generator, _KINDS):
                digest = hashlib.blake2b(secret + number.to_bytes(4, "little"), digest_size=16).digest()
                _seed(generator, digest)

    def _holding(self) -> list[int]:
        """Which objects the roots hold: whether to look again."""
        return [
            id(value)
            for root in self._roots
            for value in getattr(root, "__dict__", {}).values()
            if not isinstance(value, (*_LEAVES, FunctionType, MethodType))
        ]


_LOOKED_AT = 20_000
_ENTRIES = 1_000
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL = (torch.default_generator, np.random.mtrand._rand, random._inst)


def _seed(generator: Any, seed: bytes) -> None:
    number = int.from_bytes(seed, "little")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number >> 65)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(np.frombuffer(seed, np.uint32))
    else:
        generator.seed(number)


def _generators(roots: Iterable[Any]) -> tuple[list[tuple[dict[Any, Any], Any]], list[Any]]:
    """Where in dicts (and attributes) there is a generator, and generators that are held elsewhere.

    What a dict holds is asked of ``dict`` itself: a subclass may import or compute what is looked up in it.

    Breadth first, the first :data:`_LOOKED_AT` objects; of long lists and dicts the first :data:`_ENTRIES`.
    """
    slots: list[tuple[dict[Any, Any], Any]] = []
    found: list[Any] = []
    queue: deque[Any] = deque(roots)
    seen: set[int] = set()
    while queue and len(seen) < _LOOKED_AT:
        value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        space = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, _KINDS):
            if not any(value is known for known in _GLOBAL):
                found.append(value)
        elif isinstance(space, dict) and not _is_of_the_fit(value):
            for key, held in itertools.islice(dict.items(space), _ENTRIES):
                if isinstance(held, _KINDS) and id(held) not in seen:
                    seen.add(id(held))
                    slots.append((space, key))
        if not isinstance(value, _KINDS) and not _is_of_the_fit(value):
            queue.extend(_inside(value))
    return slots, found


_LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, ModuleType)
# whose functions and classes keep no generator of the user's: looking through all that they name would take long
_LIBRARIES = sys.stdlib_module_names | {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "lightning_lap2",
    "torchmetrics", "torchvision", "transformers", "tokenizers", "peft", "datasets", "timm", "numpy", "scipy", "pandas",
    "sklearn", "matplotlib", "sympy", "networkx", "PIL", "tqdm", "jsonargparse", "tensorboard",
}  # fmt: skip


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        # as it is: a class of its own may load modules when it is asked
        yield from (*itertools.islice(dict.values(value), _ENTRIES), *getattr(value, "__dict__", {}).values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from (*itertools.islice(value, _ENTRIES), *getattr(value, "__dict__", {}).values())
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from _named(value)
    elif isinstance(value, property | staticmethod | classmethod):
        yield from (getattr(value, "fget", None), getattr(value, "__func__", None))
    elif isinstance(value, type):
        for base in value.__mro__:
            if base.__module__.partition(".")[0] not in _LIBRARIES:
                yield from vars(base).values()
    else:
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        yield from _in_slots(value)
        yield type(value)


def _in_slots(value: Any) -> Iterator[Any]:
    for base in type(value).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


def _named(function: FunctionType) -> Iterator[Any]:
    """What a function's code reaches without being handed it."""
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    spaces = [function.__globals__, *(vars(m) for m in map(function.__globals__.get, names) if _is_users(m))]
    yield from (space[name] for space in spaces for name in names if name in space)
    yield from (function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _is_of_the_fit(value: Any) -> bool:
    """The Trainer and what belongs to it: reached from every module, and no generator of a record's."""
    return any(base.__name__ in ("Trainer", "Callback", "Fabric") for base in type(value).__mro__)


def _is_users(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES
