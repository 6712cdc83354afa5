"""Batches come apart into rows and go together again; what is not understood is refused by path."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_lap2.batches import split_rows
from lightning_lap2.batches.rows import count_rows
from lightning_lap2.errors import UnsupportedModelError

Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like Hugging Face's BatchEncoding."""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict | UserDict):
        return list(a) == list(b) and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _leaves(count: int) -> Any:
    return st.sampled_from(
        [
            torch.arange(count), torch.arange(3 * count).view(count, 3).double(), torch.tensor(2.0), 7, None, "name",
            [f"s{i}" for i in range(count)], tuple(range(count)), [{"id": i, "tags": ["t"]} for i in range(count)],
        ]
    )  # fmt: skip


def _batches(count: int) -> Any:
    containers = lambda inner: st.one_of(  # noqa: E731
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Encoding),
        st.tuples(inner, inner).map(lambda items: Pair(*items)),
    )
    tree = st.recursive(_leaves(count), containers, max_leaves=6)
    return tree.map(lambda inner: {"first": torch.arange(count), "rest": inner})


@given(st.integers(1, 4).flatmap(lambda count: st.tuples(st.just(count), _batches(count))))
def test_rows_are_found_and_put_back(case: tuple[int, Any]) -> None:
    count, batch = case
    examples = split_rows(batch)
    assert examples.count == count_rows(batch) == count
    for index in range(count):
        assert count_rows(examples.example(index)) == 1
        assert int(examples.example(index)["first"]) == index
    whole = split_rows(batch, views=count)
    assert whole.count == 1
    assert _equal(whole.example(0), batch)


def test_containers_keep_their_type_and_strings_are_sliced() -> None:
    batch = OrderedDict(
        pair=Pair(torch.arange(3), [torch.zeros(3, 2)]), names=("a", "b", "c"), k=5, scale=torch.tensor(2.0),
        more=defaultdict(list, z=torch.ones(3)),
    )  # fmt: skip
    one = split_rows(batch).example(1)
    assert type(one) is OrderedDict
    assert type(one["pair"]) is Pair
    assert one["pair"].x.tolist() == [1]
    assert one["names"] == ("b",)
    assert (one["k"], float(one["scale"])) == (5, 2.0)
    assert one["more"].default_factory is list


def test_a_batch_encoding_is_rebuilt() -> None:
    transformers = pytest.importorskip("transformers")
    one = split_rows(transformers.BatchEncoding({"input_ids": torch.arange(6).view(2, 3)})).example(1)
    assert type(one) is transformers.BatchEncoding
    assert one.input_ids.tolist() == [[3, 4, 5]]


@dataclasses.dataclass
class Record:
    x: Tensor


class Opaque:
    pass


def test_dataclasses_are_understood() -> None:
    one = split_rows(Record(torch.arange(3))).example(2)
    assert type(one) is Record
    assert one.x.tolist() == [2]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"x": torch.zeros(4, 2), "n": {"y": torch.zeros(3)}},
            r"batch\['n'\]\['y'\] is a tensor of leading size 3",
        ),
        ((torch.zeros(4), ["a", "b"]), r"batch\[1\] is a list of plain values of leading size 2"),
        ((torch.zeros(4), Opaque()), r"batch\[1\] is a .*Opaque, whose rows are not known"),
        (Opaque(), "batch is a .*Opaque"),
        ((torch.zeros(4), np.zeros(4)), r"batch\[1\] is a numpy.ndarray"),
        ((torch.zeros(4), {1, 2}), r"batch\[1\] is a builtins.set"),
        ((torch.zeros(4), torch.Size([4])), r"batch\[1\] is a torch.Size"),
        ((torch.eye(4).to_sparse(),), "sparse or nested"),
        ((torch.nn.utils.rnn.pack_sequence([torch.zeros(2)]),), "is a PackedSequence"),
        ({"a": 1, "b": torch.tensor(1.0)}, "holds no tensor with one row per example"),
        ((), "holds no tensor"),
    ],
)
def test_what_is_not_understood_is_refused_by_path(batch: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        count_rows(batch)


@pytest.mark.parametrize(
    "use",
    [len, list, str, repr, bool, lambda v: v[0], lambda v: v.index("a"), lambda v: "a" in v, lambda v: v == ["a"],
     lambda v: [*v, "b"], lambda v: f"{v}"],
)  # fmt: skip
def test_strings_cannot_be_touched_where_all_examples_run_at_once(use: Any) -> None:
    examples = split_rows((torch.zeros(2), {"names": ["a", "b"]}, 3))
    batch = examples.rebuild(examples.tensors, examples.shared())
    assert batch[2] == 3
    with pytest.raises(UnsupportedModelError, match=r"training_step uses batch\[1\]\['names'\]"):
        use(batch[1]["names"])
