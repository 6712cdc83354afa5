"""Canaries: examples made to be found again.

A *gradient canary* is the worst that one record can do to a release: a gradient of a fixed direction, much longer than
C before it is clipped. One coordinate gives the largest total variation under Laplace noise, an even spread the largest
moments (docs/guarantee.md, section 4); neither is always the worse one, so there are both.

A *record canary* is a real record with a wrong label, for whoever sees only the trained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lap2.choices import Norm, order
from lightning_lap2.gradients import ParameterLayout

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
CanaryKind = Literal["gradient", "one_coordinate", "even_spread", "mislabelled"]
CANARIES = ("gradient", "one_coordinate", "even_spread", "mislabelled")

# Length before clipping, in units of C: a clipping that does nothing is caught too.
RAW_LENGTH = 10.0
# Even spreads are kept as numbers: canaries x dimension.
LARGEST_SPREAD = 2 * 10**8

LABELS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class Directions:
    """Unit gradients, those of one coordinate first.

    Attributes:
        coordinates: ``[K1]``, the coordinate that each of the first K1 moves.
        spread: ``[K2, n]``, the others in full.
    """

    coordinates: Ints
    spread: Array

    @property
    def n(self) -> int:
        return self.spread.shape[1]

    def __len__(self) -> int:
        return len(self.coordinates) + len(self.spread)

    def flat(self, index: int, like: Tensor) -> Tensor:
        """Direction ``index`` as a flat vector ``[n]`` of the type and device of ``like``."""
        first = len(self.coordinates)
        if index >= first:
            return torch.from_numpy(self.spread[index - first]).to(like)
        flat = torch.zeros_like(like)
        flat[int(self.coordinates[index])] = 1.0
        return flat

    def tensors(self, layout: ParameterLayout) -> Ints:
        """``[K]``: the parameter tensor that each moves, -1 for a spread."""
        places = np.searchsorted(layout.offsets, self.coordinates, side="right") - 1
        return np.concatenate([places, np.full(len(self.spread), -1)]).astype(np.int64)

    def combine(self, weights: Array) -> Array:
        """``[n]``: the sum of all directions with these weights ``[K]``."""
        total = np.zeros(self.n)
        first = len(self.coordinates)
        np.add.at(total, self.coordinates, weights[:first])
        if len(self.spread):
            total += weights[first:] @ self.spread
        return total


def one_coordinate(count: int, layout: ParameterLayout, rng: np.random.Generator) -> Ints:
    """``count`` different coordinates, as evenly over the parameter tensors as their sizes allow, so that noise that
    misses a layer is found.

    Raises:
        ValueError: more canaries than coordinates.
    """
    if count > layout.numel:
        raise ValueError(
            f"canaries={count} of one coordinate each need as many trainable scalars, the model has {layout.numel}: "
            "use fewer canaries"
        )
    queues = [
        (start + rng.permutation(size)).tolist() for start, size in zip(layout.offsets[:-1], layout.sizes, strict=True)
    ]
    chosen: list[int] = []
    while len(chosen) < count:
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return np.asarray(chosen, dtype=np.int64)


def even_spread(count: int, n: int, norm: Norm, rng: np.random.Generator) -> Array:
    """``[count, n]``: all coordinates equally far, with random (public) signs; norm 1 in ``norm``.

    Raises:
        ValueError: more numbers than fit into memory.
    """
    if count * n > LARGEST_SPREAD:
        raise ValueError(
            f"canaries={count} spread over {n} trainable scalars are {count * n:.1e} numbers: use at most "
            f"{LARGEST_SPREAD // n} canaries, or canary='one_coordinate'"
        )
    return (rng.integers(0, 2, size=(count, n)) * 2.0 - 1.0) / n ** (1 / order(norm))


def make_directions(
    kind: CanaryKind, count: int | None, layout: ParameterLayout, norm: Norm, rng: np.random.Generator
) -> Directions:
    """``count`` gradient canaries.

    Args:
        kind: ``"gradient"`` is one even spread beside canaries of one coordinate.
        count: K. ``None``: one coordinate of every parameter tensor, or one even spread, or both.
    """
    tensors = sum(size > 0 for size in layout.sizes)
    spreads = {"one_coordinate": 0, "even_spread": 1 if count is None else count, "gradient": 1}[kind]
    singles = (tensors if count is None else count - spreads) if kind != "even_spread" else 0
    return Directions(
        one_coordinate(singles, layout, rng),
        even_spread(spreads, layout.numel, norm, rng),
    )


# -- records ------------------------------------------------------------------------------------------------------


class Relabelled(Dataset[Any]):
    """A data set with some records replaced; same length, same order."""

    def __init__(self, dataset: Any, replaced: Mapping[int, Any]) -> None:
        self.dataset, self.replaced = dataset, dict(replaced)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.replaced[index] if index in self.replaced else self.dataset[index]


def mislabelled(dataset: Any, indices: Sequence[int], rng: np.random.Generator) -> dict[int, Any]:
    """The records at ``indices``, each with another class of the data set as label.

    The label is the last entry of a tuple or list, or the first of the keys ``label``, ``labels``, ``target``,
    ``targets``, ``y`` of a dict; an int or an integer tensor of one element.

    Raises:
        ValueError: no such label, or only one class among these records.
    """
    records = {index: dataset[index] for index in indices}
    classes = sorted({_label(record) for record in records.values()})
    if len(classes) < 2:
        raise ValueError(
            f"the {len(records)} records chosen as canaries all have label {classes[0]}: a mislabelled canary needs a "
            "second class; use more canaries"
        )
    return {
        index: _with_label(record, int(rng.choice([c for c in classes if c != _label(record)])))
        for index, record in records.items()
    }


def _place(record: Any) -> Any:
    """Key or index of the label."""
    if isinstance(record, Mapping):
        for key in LABELS:
            if key in record:
                return key
    elif isinstance(record, (tuple, list)) and len(record) > 1:
        return len(record) - 1
    raise ValueError(
        f"no label is found in a record of type {type(record).__name__}: a mislabelled canary needs a tuple or list "
        f"that ends with a class, or a dict with one of the keys {', '.join(LABELS)}; use canary='gradient'"
    )


def _label(record: Any) -> int:
    value = record[_place(record)]
    if isinstance(value, Tensor):
        whole = value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
    elif isinstance(value, np.ndarray):
        whole = value.size == 1 and value.dtype.kind in "iu"
    else:
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole:
        raise ValueError(
            f"the label of a record is a {type(value).__name__}, no class number: a mislabelled canary needs an "
            "integer class; use canary='gradient'"
        )
    return int(value.item() if isinstance(value, (Tensor, np.ndarray)) else value)


def _with_label(record: Any, label: int) -> Any:
    place = _place(record)
    old = record[place]
    new: Any
    if isinstance(old, Tensor):
        new = torch.full_like(old, label)
    elif isinstance(old, np.ndarray):
        new = np.full_like(old, label)
    else:
        new = type(old)(label)
    if isinstance(record, Mapping):
        return {**record, place: new}
    entries = [*record[:-1], new]
    return record._make(entries) if hasattr(record, "_make") else type(record)(entries)
