"""Users' code draws from secret seeds, and the global generators do not notice."""

from __future__ import annotations

import random

import numpy as np
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
