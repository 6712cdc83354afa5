"""Examples stacked by structure and shape give back the very batches they were made of."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lap2.batches import ExampleBatch, flatten, register_batch_type
from lightning_lap2.batches.containers import map_tensors
from lightning_lap2.errors import UnsupportedModelError


@dataclasses.dataclass
class Graph:
    nodes: Tensor
    name: str
    parts: list[Tensor] = dataclasses.field(default_factory=list)


class Boxes:
    """A class of the user's, without a form that is known."""

    def __init__(self, boxes: Tensor) -> None:
        self.boxes = boxes


def one(length: int, value: float) -> Any:
    return {"x": torch.full((1, length), value), "graph": Graph(torch.ones(length) * value, f"{value:g}"), "k": 3}


def test_groups_by_shape_keep_places_and_values() -> None:
    lengths = [2, 3, 2, 5, 3, 2]
    batch = ExampleBatch.of(one(length, k) for k, length in enumerate(lengths))
    assert batch.count == 6
    assert [group.count for group in batch] == [3, 2, 1]
    assert batch.order == ((0, 2, 5), (1, 4), (3,))
    for place, length in enumerate(lengths):
        found = batch.example(place)
        assert torch.equal(found["x"], torch.full((1, length), float(place)))
        assert type(found["graph"]) is Graph
        assert found["graph"].name == str(place)
        assert torch.equal(found["graph"].nodes, torch.ones(length) * place)
    with pytest.raises(IndexError):
        batch.example(6)


def test_examples_are_copies_made_one_by_one() -> None:
    """What makes the batches may use its memory again."""
    memory = torch.zeros(1, 2)

    def batches() -> Any:
        for value in range(3):
            yield memory.fill_(value)

    assert [float(t[0, 0]) for t in ExampleBatch.of(batches()).groups[0].tensors[0]] == [0, 1, 2]


def test_a_value_that_is_the_same_for_all_is_handed_on_and_one_that_differs_is_guarded() -> None:
    group = ExampleBatch.of([{"x": torch.zeros(1), "k": 3, "id": name} for name in "ab"]).groups[0]
    shared = group.rebuild(group.tensors, group.shared())
    assert shared["k"] == 3
    with pytest.raises(UnsupportedModelError, match=r"batch\['id'\], which is no tensor and differs between examples"):
        str(shared["id"])


def test_objects_of_unknown_classes_stay_with_their_example() -> None:
    batch = ExampleBatch.of([[Boxes(torch.ones(k))] for k in (1, 2)])
    assert [len(batch.example(k)[0].boxes) for k in range(2)] == [1, 2]
    (group,) = batch.groups
    with pytest.raises(UnsupportedModelError, match="register_batch_type"):
        group.shared()[0].boxes  # noqa: B018


def test_a_registered_class_is_taken_apart() -> None:
    class Own:
        def __init__(self, x: Tensor, tag: str) -> None:
            self.x, self.tag = x, tag

    register_batch_type(Own, split=vars, join=lambda parts: Own(**parts))
    batch = ExampleBatch.of([Own(torch.ones(1, 2) * k, "t") for k in range(3)])
    assert batch.groups[0].tensors[0].shape == (3, 1, 2)
    assert float(batch.example(2).x[0, 0]) == 2
    with pytest.raises(TypeError, match="kind must be a class"):
        register_batch_type("Own", split=vars, join=dict)  # type: ignore[arg-type]


def test_rows_moves_and_pickles() -> None:
    batch = ExampleBatch.of(one(2, k) for k in range(4))
    middle = batch.groups[0].rows(1, 9)
    assert middle.count == 3
    assert float(middle.example(0)["x"][0, 0]) == 1
    assert middle.key == batch.groups[0].key
    double = batch.to(torch.float64)
    assert double.example(3)["x"].dtype == torch.float64


@pytest.mark.parametrize("lengths", [[2, 2, 2], [2, 3, 2, 5]])
def test_batches_go_from_process_to_process_and_groups_keep_memory_of_their_own(lengths: list[int]) -> None:
    batch = ExampleBatch.of(one(length, k) for k, length in enumerate(lengths))
    again = pickle.loads(pickle.dumps(batch.placed([10, 11, 12, 13][: len(lengths)], [14])))
    assert again.lost == (14,)
    for k in range(len(lengths)):
        assert torch.equal(again.example(10 + k)["x"], batch.example(k)["x"])
        assert again.example(10 + k)["graph"].name == str(k)
    assert [group.key for group in again] == [group.key for group in batch]
    assert len({t.untyped_storage().data_ptr() for group in again for t in group.tensors}) == 2 * len(batch.groups)


def test_a_kept_skeleton_holds_no_example() -> None:
    """It would keep the first example's data alive, and hand it to the others where a leaf is missing."""
    group = ExampleBatch.of(one(2, k) for k in range(2)).groups[0]
    assert b"Graph" in pickle.dumps(group._skeleton)
    assert not [t for t in _tensors_in(group._skeleton)]


def _tensors_in(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple | list):
        return [t for part in node for t in _tensors_in(part)]
    if isinstance(node, dict):
        return [t for part in node.values() for t in _tensors_in(part)]
    return [t for part in vars(node).values() for t in _tensors_in(part)] if hasattr(node, "__dict__") else []


def test_the_joined_batch_is_what_collating_together_gives() -> None:
    records = [(torch.randn(3), torch.tensor(k), f"n{k}") for k in range(4)]
    together = torch.utils.data.default_collate(records)
    joined = ExampleBatch.of(torch.utils.data.default_collate([record]) for record in records).joined()
    assert torch.equal(joined[0], together[0])
    assert torch.equal(joined[1], together[1])
    assert list(joined[2]) == list(together[2])


def test_the_joined_batch_of_unlike_lengths_is_filled_up_and_in_order() -> None:
    batch = ExampleBatch.of([torch.full((1, length), float(length)) for length in (3, 1, 2, 1)])
    assert batch.joined().tolist() == [[3, 3, 3], [1, 0, 0], [2, 2, 0], [1, 0, 0]]


def test_mapping_over_tensors_keeps_containers() -> None:
    found = map_tensors(lambda t: t + 1, one(2, 0.0))
    assert float(found["x"][0, 0]) == 1
    assert type(found["graph"]) is Graph
    assert len(flatten(found).tensors) == 2
