"""Users' code draws from secret seeds, and the global generators do not notice."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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


@pytest.mark.parametrize("inside", [0, 1, 2, 3])
@pytest.mark.parametrize("between", [0, 1, 2, 3])
@pytest.mark.parametrize("reseeded", [False, True])
def test_numpys_generator_goes_on_outside_as_if_nothing_had_been_in_between(
    inside: int, between: int, reseeded: bool
) -> None:
    """Normal numbers come in pairs, of which the second is kept; what is known of the state is asked for again."""

    def numbers(private: bool) -> list[float]:
        np.random.seed(3)  # noqa: NPY002
        found: list[float] = []
        for step in range(4):
            if reseeded and step == 2:
                np.random.seed(3)  # noqa: NPY002
            if private:
                with private_generators(Entropy(None)):
                    secret = [np.random.randn() for _ in range(inside)]  # noqa: NPY002
                assert not set(secret) & set(found)
            found += [np.random.randn() for _ in range(between)]  # noqa: NPY002
        return [*found, np.random.randn()]  # noqa: NPY002

    assert numbers(private=True) == numbers(private=False)


def test_a_bit_generator_of_the_users_is_put_back_too() -> None:
    before = np.random.get_bit_generator()
    try:
        for own in (np.random.MT19937(1), np.random.MT19937(2)):
            np.random.set_bit_generator(own)
            state = str(own.state)
            with private_generators(Entropy(None)):
                np.random.rand()  # noqa: NPY002
            assert np.random.get_bit_generator() is own
            assert str(own.state) == state
    finally:
        np.random.set_bit_generator(before)


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
    def values(self) -> Any:
        raise ValueError("loads what is not installed")

    items = __iter__ = values


def test_what_objects_hold_is_looked_at_without_asking_them() -> None:
    """As the Auto classes of transformers keep their models; and functions made by ``exec`` have no module."""
    made: dict[str, Any] = {}
    exec("def function(): return rng.random()", {"rng": np.random.default_rng(0)}, made)
    made["function"].__module__ = None
    keeper = SimpleNamespace(lazy=_Lazy(mine=torch.Generator().manual_seed(0)), draw=made["function"])
    own = OwnGenerators(keeper)

    def draw() -> tuple[float, float]:
        with private_generators(Entropy(b"key"), own=own):
            return float(torch.rand((), generator=dict.__getitem__(keeper.lazy, "mine"))), float(keeper.draw())

    assert draw() == draw()


class _Rows(list[int]):
    """A data set that is a list, with a generator of its own."""

    def __init__(self) -> None:
        super().__init__(range(5))
        self.rng = random.Random(0)


class _Columns(dict[str, int]):
    def __init__(self) -> None:
        super().__init__(a=1)
        self.rng = np.random.default_rng(0)


@pytest.mark.parametrize("keeper", [_Rows(), _Columns()])
def test_attributes_of_lists_and_dicts_are_looked_at(keeper: Any) -> None:
    own, known = OwnGenerators(keeper), type(keeper)().rng.random()
    found = []
    for key in (b"one", b"one", b"two"):
        own.seed(key)
        found.append(keeper.rng.random())
    assert found[0] == found[1] != found[2] and known not in found
