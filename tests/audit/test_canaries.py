"""Canaries: their directions, and wrong labels in every form of record."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lap2.audit.canaries import Relabelled, make_directions, mislabelled, one_coordinate
from lightning_lap2.gradients import ParameterLayout

Record = namedtuple("Record", "x y")


def layout() -> ParameterLayout:
    return ParameterLayout(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))  # 12 + 4 + 8 + 2


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_coordinates_differ_and_cover_every_tensor() -> None:
    chosen = one_coordinate(10, layout(), rng())
    assert len(set(chosen.tolist())) == 10
    tensors = np.searchsorted(layout().offsets, chosen, side="right") - 1
    assert sorted(np.bincount(tensors).tolist()) == [2, 2, 3, 3]
    assert sorted(one_coordinate(26, layout(), rng()).tolist()) == list(range(26))
    with pytest.raises(ValueError, match=r"canaries=27 .* the model has 26"):
        one_coordinate(27, layout(), rng())


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_directions_have_norm_one(norm: Any) -> None:
    directions = make_directions("gradient", None, layout(), norm, rng())
    assert (len(directions), len(directions.spread), directions.n) == (5, 1, 26)
    like = torch.zeros(26)
    flat = torch.stack([directions.flat(k, like) for k in range(5)])
    torch.testing.assert_close(torch.linalg.vector_norm(flat, ord=int(norm[1]), dim=1), torch.ones(5))
    assert len(set(flat[4].abs().tolist())) == 1
    assert directions.tensors(layout()).tolist() == [0, 1, 2, 3, -1]
    weights = np.arange(5.0)
    np.testing.assert_allclose(directions.combine(weights), weights @ flat.double().numpy(), rtol=1e-6)


def test_numbers_of_canaries() -> None:
    counts = [len(make_directions(kind, n, layout(), "l2", rng())) for kind in KINDS for n in (None, 4)]
    assert counts == [4, 4, 1, 4, 5, 4]
    with pytest.raises(ValueError, match="use at most"):
        make_directions("even_spread", 10**8, layout(), "l2", rng())


KINDS: tuple[Any, ...] = ("one_coordinate", "even_spread", "gradient")


def label(value: Any) -> int:
    return int(np.asarray(value).item())


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, torch.tensor(y)],
        lambda x, y: (x, np.int64(y)),
        lambda x, y: (x, np.array([y])),
        lambda x, y: Record(x, torch.tensor([y])),
        lambda x, y: {"x": x, "labels": torch.tensor(y), "text": "abc"},
    ],
    ids=["int", "list", "numpy", "array", "namedtuple", "dict"],
)
def test_a_mislabelled_record_differs_in_its_label_alone(make: Any) -> None:
    data = [make(torch.full((2,), float(i)), i % 3) for i in range(9)]
    replaced = mislabelled(data, [1, 4, 5, 8], rng())
    place = "labels" if isinstance(data[0], dict) else -1
    changed = Relabelled(data, replaced)
    assert len(changed) == 9
    for i in range(9):
        old, new = data[i], changed[i]
        assert type(new) is type(old)
        assert type(new[place]) is type(old[place])
        key: Any = "x" if isinstance(old, dict) else 0
        assert torch.equal(new[key], old[key])
        assert (label(new[place]) != label(old[place])) == (i in replaced)
        assert i not in replaced or label(new[place]) in (1, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([torch.zeros(2)] * 3, "no label is found in a record of type Tensor"),
        ([{"text": "a"}] * 3, "label, labels, target"),
        ([(torch.zeros(2), 0.5)] * 3, "is a float, no class number"),
        ([(torch.zeros(2), torch.zeros(3, dtype=torch.long))] * 3, "is a Tensor, no class number"),
        ([(torch.zeros(2), True)] * 3, "is a bool, no class number"),
        ([(torch.zeros(2), 1)] * 3, "all have label 1"),
    ],
)
def test_records_without_a_class_are_refused(data: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mislabelled(data, [0, 1], rng())
