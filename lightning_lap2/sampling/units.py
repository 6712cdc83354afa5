"""Units of privacy: which records belong to one user, and a draw that takes users instead of records.

A unit's number is all that the rest of the package sees of it. Its id stays in the training data set: no message, log,
checkpoint or report names one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.sampling.parts import positive
from lightning_lap2.sampling.poisson import PoissonBatchSampler

UnitOf = str | Callable[[Any], Any]
"""The name of an attribute, method or column of the data set, or what makes the ids of the data set."""

Rows = npt.NDArray[np.int64]


class Units:
    """The records of each unit.

    Args:
        ids: one for each record, integers or strings.

    Attributes:
        count: U. Units are numbered 0 .. U - 1 in the order in which they first appear.
        num_records: N.
        digest: equal on two ranks that were given the same ids in the same order.

    Raises:
        UnsupportedSettingError: an id that is missing, or is no integer or string; no ids.
    """

    def __init__(self, ids: list[Any]) -> None:
        kinds = {_kind(value) for value in ids}
        if len(kinds) != 1:
            raise UnsupportedSettingError(
                f"the unit ids are of {len(kinds)} kinds ({', '.join(sorted(k.__name__ for k in kinds)) or 'none'}), "
                "so that one user may have two (7 and '7'): give integers, or strings, for all records"
            )
        digest, numbers = hashlib.sha256(), dict[Any, int]()
        for value in ids:
            text = repr(value)
            digest.update(f"{len(text)}:{text}".encode())
        of_record = np.fromiter((numbers.setdefault(value, len(numbers)) for value in ids), np.int64, len(ids))
        self.count, self.num_records, self.digest = len(numbers), len(ids), digest.hexdigest()
        self._records: Rows = np.argsort(of_record, kind="stable")
        self._starts: Rows = np.concatenate([[0], np.cumsum(np.bincount(of_record))])

    @classmethod
    def of(cls, dataset: Any, unit: UnitOf) -> Units:
        """
        Raises:
            UnsupportedSettingError: the data set has no such ids, or they are not one for each record.
        """
        return cls(_ids(dataset, unit))

    def records(self, unit: int) -> Rows:
        """Indices of the unit's records."""
        return self._records[self._starts[unit] : self._starts[unit + 1]]

    def some_of(self, unit: int, number: int, coins: np.random.Generator) -> Rows:
        """``number`` of the unit's records, drawn without replacement; of a unit with fewer each of them, equally often
        but for what is left over, which is drawn."""
        own = self.records(unit)
        every, rest = divmod(number, len(own))
        return np.concatenate([np.repeat(own, every), coins.choice(own, rest, replace=False)])


class UnitBatchSampler(PoissonBatchSampler):
    """Poisson draws of units: each by its own coin, and K = ``records_per_unit`` of its records in its place.

    Everything that is counted counts units (``num_examples`` is U, and so are ``Part.records`` and ``absent``). A batch
    has ``records_per_unit * views`` indices for each of them, side by side. Which of its records a unit shows is drawn
    afresh each time, by coins of the same kind as those that draw the units.

    Args:
        units: of the data set.
        records_per_unit: K.
        batch_size, num_batches, options: see :class:`PoissonBatchSampler`; ``batch_size`` is in units.
    """

    def __init__(
        self, units: Units, batch_size: int, num_batches: int, *, records_per_unit: int, **options: Any
    ) -> None:
        super().__init__(units.count, batch_size, num_batches, **options)
        self.units, self.records_per_unit = units, positive("records_per_unit", records_per_unit)

    def shown(self, units: list[int]) -> list[int]:
        """The indices that a draw of these units gives."""
        return self._rows(units, units, 0, 0)

    def _rows(self, batch: list[int], drawn: list[int], release: int, part: int) -> list[int]:
        coins = self._coins(release, f"records|part={part:d}")
        # for units left out as well: an audit compares draws that differ in nothing else
        chosen = {unit: self.units.some_of(unit, self.records_per_unit, coins) for unit in drawn}
        return [int(row) for unit in batch for row in chosen[unit] for _ in range(self.views)]


def unit_name(unit: UnitOf) -> str:
    """What a message and the report call it."""
    return unit if isinstance(unit, str) else getattr(unit, "__qualname__", type(unit).__name__)


def bound_to(dataset: Any, unit: UnitOf) -> UnitOf:
    """The ids of ``dataset``, for a wrapper that has the same records in the same order."""

    def ids(_wrapper: Any) -> Any:
        return _ids(dataset, unit)

    ids.__qualname__ = unit_name(unit)
    return ids


def _ids(dataset: Any, unit: UnitOf) -> list[Any]:
    """One for each record, of torch's containers as of what is in them."""
    ids = _plain(_found(dataset, unit), unit)
    if len(ids) != len(dataset):
        raise UnsupportedSettingError(
            f"unit={unit_name(unit)!r} gives {len(ids)} ids for {len(dataset)} records of the "
            f"{type(dataset).__name__}: give one id per record, in the data set's order"
        )
    return ids


def _found(dataset: Any, unit: UnitOf) -> Any:
    """The ids as the data set has them."""
    if not isinstance(unit, str):
        return unit(dataset)
    if unit in getattr(dataset, "column_names", ()):  # a table: Hugging Face's
        return dataset[unit]
    if hasattr(dataset, unit):
        value = getattr(dataset, unit)
        return value() if callable(value) else value
    if isinstance(dataset, Subset):
        ids = _ids(dataset.dataset, unit)
        return [ids[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [value for part in dataset.datasets for value in _ids(part, unit)]
    raise UnsupportedSettingError(
        f"unit={unit!r}: the train data set {type(dataset).__name__} has no attribute, method or column of this name; "
        "give it one with an id per record, or a function from the data set to the ids"
    )


def _plain(ids: Any, unit: UnitOf) -> list[Any]:
    """A list of Python values."""
    if isinstance(ids, Tensor) and ids.device.type != "cpu":
        raise UnsupportedSettingError(
            f"unit={unit_name(unit)!r} is a tensor on {ids.device}: keep the ids with the data, .cpu()"
        )
    if getattr(ids, "ndim", 1) != 1 or hasattr(ids, "columns"):
        raise UnsupportedSettingError(
            f"unit={unit_name(unit)!r} has several values per record: a record has one owner. Give it one, or drop it"
        )
    if isinstance(ids, str | bytes | Mapping | set | frozenset) or not isinstance(ids, Iterable):
        raise UnsupportedSettingError(
            f"unit={unit_name(unit)!r} is a {type(ids).__name__}, and no sequence of one id per record"
        )
    for convert in ("tolist", "to_pylist"):
        if callable(found := getattr(ids, convert, None)):
            ids = found()
            break
    return [value.item() if isinstance(value, Tensor | np.generic) and not value.ndim else value for value in ids]


def _kind(value: Any) -> type:
    """``int``, ``str`` or ``bytes``. No message here says the value."""
    kind = type(value)
    if kind is int or (kind in (str, bytes) and value):
        return kind
    if (
        value is None
        or kind in (str, bytes)
        or kind.__name__ in ("NAType", "NaTType")
        or (kind is float and isnan(value))
    ):
        raise UnsupportedSettingError(
            "a record has no unit id (None, NaN or an empty string): whose it is is not known. Drop such records, or "
            "give each an id of its own"
        )
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        raise UnsupportedSettingError(
            f"a record has several unit ids (a {kind.__name__}): removing one of its owners would leave it with the "
            "other. Give each record one owner, or drop it"
        )
    raise UnsupportedSettingError(
        f"a unit id is a {kind.__name__}: give integers or strings (for whole numbers kept as floats: astype(int))"
    )
