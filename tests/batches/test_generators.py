"""Users' code draws from secret seeds, and the global generators do not notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_lap2.batches.generators import Entropy, private_generators, seeded_generators


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
