"""The train loader of one fit: replaced by Poisson sampling, or the user's own order, watched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.callback.settings import Sampling
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.sampling import (
    ExampleLoader,
    Part,
    PoissonBatchSampler,
    RecordedBatchSampler,
    UnitBatchSampler,
    Units,
    by_record,
    check_loader,
    inner,
    peek,
    provably_once,
)
from lightning_lap2.sampling.reach import DataReach
from lightning_lap2.sampling.repeats import check_stream, index_digest
from lightning_lap2.sampling.units import UnitOf, unit_name


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Public facts of the training data: the same whatever one example says.

    Attributes:
        num_examples: N, ``None`` for an IterableDataset; with ``unit`` U, the number of units.
        expected_batch_size: loader ``batch_size`` x ``accumulate_grad_batches`` x world size.
        sample_rate: q = expected_batch_size / N under Poisson sampling, 1 otherwise.
        batches_per_epoch: loader batches per epoch and rank, ``inf`` if unknown.
        once_per_pass: each example is provably used at most once per pass (``sampling="none"``).
        num_records: N where examples are units, else ``None``.
        ids: digest of the units' ids, see :class:`~lightning_lap2.sampling.Units`; empty without units. In no message.
        rows: which rows the data set picks of those in it, in short. Equal on all ranks, else each has a shard of its
            own; from epoch to epoch it may change.
    """

    num_examples: int | None
    expected_batch_size: int
    sample_rate: float
    batches_per_epoch: float
    once_per_pass: bool
    num_records: int | None = None
    rows: str = field(default="", compare=False)
    ids: str = field(default="", compare=False, repr=False)

    def same_rows(self, other: DataFacts) -> bool:
        """Whether two ranks have the same rows, and the same units in them."""
        return (self, self.rows, self.ids) == (other, other.rows, other.ids)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where an epoch's iteration begins: release number, and loader batches already trained in this epoch."""

    release: int
    batch: int


class TrainingData:
    """One replaced loader and the order its batches come in.

    Args:
        loader: what Lightning would have trained on, after its own sampler injection.
        limit: ``Trainer(limit_train_batches)``.
        skip_errors: a record that cannot be read counts as one without a gradient.
        views: times that each record is given; no number of :class:`DataFacts` depends on it.
        unit, records_per_unit: of :class:`lightning_lap2.Lap2Privacy`: examples are units, and the loader's
            ``batch_size`` counts units.

    Attributes:
        views: rows of an example in a batch: with units ``records_per_unit`` times as many.

    Raises:
        UnsupportedSettingError: several views, or units, of records that cannot be asked for by index.
    """

    def __init__(
        self,
        loader: Any,
        *,
        sampling: Sampling,
        limit: float,
        accumulate: int,
        rank: int,
        world_size: int,
        seed: int | None,
        views: int = 1,
        skip_errors: bool = False,
        unit: UnitOf | None = None,
        records_per_unit: int = 1,
    ) -> None:
        self._accumulate, self.views, self._skip_errors = accumulate, views * records_per_unit, skip_errors
        loader = by_record(loader)
        self.sampler: PoissonBatchSampler | RecordedBatchSampler | None
        if sampling == "poisson":
            if unit is not None and isinstance(getattr(loader, "dataset", None), IterableDataset):
                raise UnsupportedSettingError(
                    f"unit={unit_name(unit)!r} draws the records of a user by their indices, which an IterableDataset "
                    "does not have; use a map-style data set (__getitem__ and __len__)"
                )
            check_loader(loader)
            units = None if unit is None else Units.of(inner(loader.dataset), unit)
            size, ranks = _batch_size(loader), {"accumulate": accumulate, "rank": rank, "world_size": world_size}
            if units is None:
                self.sampler = PoissonBatchSampler(
                    len(loader.dataset), size, len(loader), seed=seed, views=views, **ranks
                )
            else:
                self.sampler = UnitBatchSampler(
                    units,
                    size,
                    _batches_of_units(loader, units.count),
                    records_per_unit=records_per_unit,
                    seed=seed,
                    views=views,
                    **ranks,
                )
            self.source, self._batches = loader, _limited(len(self.sampler), limit)
            self.loader: Any = ExampleLoader(loader, self.sampler, views=self.views, skip_errors=skip_errors)
            self.facts = DataFacts(
                num_examples=self.sampler.num_examples,
                expected_batch_size=self.sampler.expected_batch_size,
                sample_rate=self.sampler.sample_rate,
                batches_per_epoch=self._batches,
                once_per_pass=True,
                num_records=None if units is None else units.num_records,
                rows=index_digest(inner(loader.dataset)),
                ids="" if units is None else units.digest,
            )
        else:
            self._keep_order(loader, limit=limit, rank=rank, world_size=world_size, seed=seed)
        self.position = Position(release=0, batch=0)
        self._iterated = 0

    def _keep_order(self, loader: Any, *, limit: float, rank: int, world_size: int, seed: int | None) -> None:
        self.source = loader
        iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        length: float
        if iterable:
            if world_size > 1:
                raise UnsupportedSettingError(
                    f"an IterableDataset on {world_size} ranks may give one record to several of them, which cannot "
                    "be checked; use a map-style data set, or one device"
                )
            if self.views > 1:
                raise UnsupportedSettingError(
                    f"augmentations={self.views} asks the data set several times for one record, which an "
                    "IterableDataset cannot answer; use a map-style data set, or augmentations=1"
                )
            check_stream(loader)
            self.sampler, self.loader, length = None, ExampleLoader(loader, None), _length(loader)
        else:
            provably_once(loader, world_size)
            self.sampler = RecordedBatchSampler(
                loader.batch_sampler, accumulate=self._accumulate, views=self.views, seed=seed, rank=rank
            )
            self.loader = ExampleLoader(loader, self.sampler, views=self.views, skip_errors=self._skip_errors)
            length = len(loader)
        expected = _batch_size(loader) * self._accumulate * world_size
        self._batches = _limited(length, limit)
        self.facts = DataFacts(
            num_examples=None if iterable else len(loader.dataset),
            expected_batch_size=expected,
            sample_rate=1.0,
            batches_per_epoch=self._batches,
            once_per_pass=not iterable,
            rows=index_digest(inner(loader.dataset)),
        )

    def peek(self, count: int) -> tuple[ExampleBatch, Any] | None:
        """A few examples, see :func:`lightning_lap2.sampling.peek`."""
        units = self.sampler if isinstance(self.sampler, UnitBatchSampler) else None
        return peek(self.source, count, self.views, skip_errors=self._skip_errors, units=units)

    def holders(self) -> list[tuple[str, Any]]:
        """The objects that records come from, by the names that users know them by."""
        return [(name, getattr(self.source, name, None)) for name in ("dataset", "collate_fn")]

    def reach(self) -> DataReach:
        """The ways to the records from outside the loader."""
        return DataReach(getattr(self.source, "dataset", None))

    def leave_out(self, absent: frozenset[int]) -> None:
        """From the next iteration on, no batch holds these indices, see ``WindowedBatchSampler.absent``.

        Raises:
            UnsupportedSettingError: an IterableDataset, whose records have no index.
        """
        if self.sampler is None:
            raise UnsupportedSettingError(
                "an IterableDataset has no indices by which an audit could leave a record out; use a map-style data set"
            )
        self.sampler.absent = absent

    def start(self, position: Position) -> None:
        """The next iteration of the loader begins at ``position``."""
        self.position = position
        self._iterated = 0
        if self.sampler is not None:
            self.sampler.start(release=position.release, batch_idx=position.batch, num_batches=int(self._batches))

    def next_part(self, found: int) -> Part:
        """What the loader batch that was just fetched is: its window and its number of drawn examples.

        Args:
            found: examples that the batch holds; for an IterableDataset the only count there is.
        """
        if self.sampler is not None:
            return self.sampler.next_part()
        number = self.position.batch + self._iterated
        self._iterated += 1
        return Part(
            release=number // self._accumulate,
            index=number % self._accumulate,
            of=self._accumulate,
            count=found,
        )


def _batch_size(loader: Any) -> int:
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise UnsupportedSettingError(
            "the train DataLoader has batch_size=None (no automatic batching), so the expected batch size is unknown; "
            "give DataLoader(batch_size=...)"
        )
    return int(size)


def _batches_of_units(loader: Any, units: int) -> int:
    """Loader batches of an epoch on one rank: as many as ``units`` records would have.

    Raises:
        UnsupportedSettingError: none, under ``drop_last``.
    """
    share = math.ceil(units / getattr(loader.sampler, "num_replicas", 1))
    batches = share // _batch_size(loader) if loader.drop_last else math.ceil(share / _batch_size(loader))
    if not batches:
        raise UnsupportedSettingError(
            f"batch_size={_batch_size(loader)} counts units, of which there are {share} (on this rank), and "
            "drop_last=True leaves no batch; use a smaller batch_size"
        )
    return batches


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return math.inf


def _limited(length: float, limit: float) -> float:
    """Loader batches per epoch under ``limit_train_batches`` (an int caps, a float is a fraction), as Lightning.

    Raises:
        UnsupportedSettingError: a fraction that leaves no batch.
    """
    if isinstance(limit, int):
        return min(length, limit)
    batches = math.inf if math.isinf(length) else int(length * limit)
    if limit and not batches:
        raise UnsupportedSettingError(
            f"Trainer(limit_train_batches={limit!r}) leaves none of the {length} batches of an epoch; give a larger "
            "fraction, or a number of batches"
        )
    return batches
