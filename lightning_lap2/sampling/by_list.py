"""Loaders that ask their data set for a list of indices at once: ``DataLoader(ds, sampler=BatchSampler(...),
batch_size=None)``, as torch's documentation has it for data sets that read a whole batch at once.

Such a loader is taken for one of single records: the data set is asked for a list of one index (or of the K indices of
one example), and what it gives for that is the example's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset


class Rows(NamedTuple):
    """What a data set gave for a list of indices."""

    indices: list[int]
    found: Any


class ByList(Dataset[Any]):
    """A data set that takes lists of indices, as one that gives records. Other attributes are the data set's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Rows:
        return Rows([index], self.dataset[[index]])

    def __getitems__(self, indices: list[int]) -> list[Rows]:
        """Of one example."""
        return [Rows(indices, self.dataset[indices])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class CollateByList:
    """The ``collate_fn`` of such a loader: the user's, which gets what the data set gave.

    Args:
        dataset: the user's.
        convert: the user's ``collate_fn``; ``default_convert`` unless given.
    """

    def __init__(self, dataset: Any, convert: Callable[[Any], Any]) -> None:
        self._dataset, self._convert = dataset, convert

    def __call__(self, fetched: list[Rows]) -> Any:
        if len(fetched) == 1:
            return self._convert(fetched[0].found)
        # the batch of plain training, which the trial at fit start looks at
        return self._convert(self._dataset[[index for rows in fetched for index in rows.indices]])


def inner(dataset: Any) -> Any:
    """The user's data set."""
    return dataset.dataset if isinstance(dataset, ByList) else dataset
