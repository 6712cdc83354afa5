"""Users' code draws from secret seeds, and the global generators do not notice."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_lap2.batches.generators import Entropy, OwnGenerators, private_generators, seeded_generators


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 (what users draw from)


def test_inside_nothing_repeats_and_outside_nothing_moves() -> None:
    found = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        before = _draw()
        with private_generators(Entropy(None)):
            inside = _draw()
        found.append((before, inside, _draw()))
    (before, inside, after), (same, other, later) = found
    assert (before, after) == (same, later)
    assert not set(inside) & set(other)


def test_with_a_key_draws_repeat_and_differ_from_one_another() -> None:
    def runs() -> list[tuple[float, float, float]]:
        entropy, found = Entropy(b"key"), []
        for _ in range(3):
            with private_generators(entropy):
                found.append(_draw())
        return found

    first = runs()
    assert first == runs()
    assert len({value for draw in first for value in draw}) == 9


def test_seeded_generators_are_a_function_of_the_seed() -> None:
    draws = []
    for seed in (3, 3, 4):
        with seeded_generators(seed):
            draws.append(_draw())
    assert draws[0] == draws[1] != draws[2]


def test_generators_are_put_back_after_an_error() -> None:
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    try:
        with private_generators(Entropy(None)):
            raise ValueError
    except ValueError:
        pass
    assert torch.equal(torch.cat([first, torch.rand(1)]), want)


GLOBAL = np.random.default_rng(0)


def _by_name() -> float:
    return float(GLOBAL.random())


class _Keeper:
    wide = np.random.RandomState(0)

    def __init__(self) -> None:
        self.mine = torch.Generator().manual_seed(0)
        inner = random.Random(0)
        self.transforms = [SimpleNamespace(rng=random.Random(0)), functools.partial(lambda r: r.random(), inner)]
        hidden = np.random.default_rng(0)
        self.closed = lambda: hidden.random()

    def draw(self) -> list[float]:
        return [
            float(self.wide.rand()),
            float(torch.rand((), generator=self.mine)),
            self.transforms[0].rng.random(),
            self.transforms[1](),
            float(self.closed()),
            _by_name(),
        ]


def _seeded(own: OwnGenerators, keeper: Any, key: bytes | None) -> list[float]:
    with private_generators(Entropy(key), own=own):
        return keeper.draw()


def test_generators_that_objects_keep_are_seeded_too_wherever_they_are() -> None:
    keeper = _Keeper()
    own = OwnGenerators(keeper, _by_name)
    first, again = _seeded(own, keeper, b"key"), _seeded(own, keeper, b"key")
    assert first == again
    other, secret = _seeded(own, keeper, b"other"), _seeded(own, keeper, None)
    assert not set(first) & set(other)
    assert not set(first) & set(secret)


def test_a_generator_that_was_replaced_is_found() -> None:
    keeper = _Keeper()
    own = OwnGenerators(keeper, _by_name)
    _seeded(own, keeper, b"key")
    keeper.mine = torch.Generator().manual_seed(5)
    keeper.transforms = [SimpleNamespace(rng=random.Random(7)), keeper.transforms[1]]
    keeper.transforms[0].rng = random.Random(8)
    first = _seeded(own, keeper, b"key")
    keeper.mine, keeper.transforms[0].rng = torch.Generator().manual_seed(6), random.Random(9)
    assert _seeded(own, keeper, b"key") == first


def test_the_global_generators_are_not_among_them() -> None:
    keeper = SimpleNamespace(g=torch.default_generator)
    before = torch.default_generator.get_state()
    OwnGenerators([np.random.mtrand._rand, random._inst]).seed(b"x")  # type: ignore[attr-defined]
    with private_generators(Entropy(None), own=OwnGenerators(keeper)):
        pass
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_generator_made_in_the_call_keeps_its_seed() -> None:
    keeper = SimpleNamespace(draw=lambda: float(np.random.default_rng(3).random()))
    own = OwnGenerators(keeper)
    assert _seeded(own, keeper, None) == _seeded(own, keeper, None)


class _Lazy(dict[str, Any]):
    """As in transformers: to ask it for all that it holds imports every model."""

    def items(self) -> Any:
        raise ImportError("items")

    values = items


def test_containers_that_compute_what_they_hold_are_not_asked() -> None:
    keeper = SimpleNamespace(lazy=_Lazy(own=random.Random(0)))
    own, found = OwnGenerators(keeper), []
    for _ in range(2):
        own.seed(b"key")
        found.append(dict.__getitem__(keeper.lazy, "own").random())
    assert found[0] == found[1] != random.Random(0).random()
