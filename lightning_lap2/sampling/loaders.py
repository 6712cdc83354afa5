"""What may be done with a user's ``DataLoader``: which are understood, and one with another batch sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_lap2.sampling.by_list import ByList, CollateByList, inner
from lightning_lap2.sampling.repeats import check_repeats

_PLAIN = "shuffle=True, shuffle=False or a DistributedSampler"
_NONE = "declare sampling='none' (no amplification by sampling)"
_LIGHTNING_HOMES = (
    "lightning.fabric.utilities.distributed",
    "lightning_fabric.utilities.distributed",
    "lightning.pytorch.overrides.distributed",
    "pytorch_lightning.overrides.distributed",
)


def check_loader(loader: object) -> None:
    """Refuses a train loader whose meaning Poisson sampling would not keep.

    Understood is a map-style data set read in batches by a sampler that treats all examples alike:
    sequential, random without replacement, or distributed, so that "the same, by Poisson sampling" is well
    defined.

    Raises:
        TypeError: not a ``DataLoader``; a subclass with an iterator of its own; an ``IterableDataset``; a
        data
            set without a length; a sampler or batch sampler that is not one of torch's plain ones.
        ValueError: ``batch_size=None``; an empty data set; a sampler that repeats, leaves out or does not
            belong to the data set; ``in_order=False``.
    """
    loader = _map_style(loader)
    size = _length(loader)
    check_repeats(inner(loader.dataset))
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise TypeError(
            f"the train loader's batch_sampler is a {_name(batches)}, which decides what meets in a batch; "
            f"Poisson sampling would discard it. Use batch_size with {_PLAIN}"
        )
    _check_sampler(batches.sampler, size)


def by_record(loader: Any) -> Any:
    """``loader``; one that asks its data set for lists of indices (``sampler=BatchSampler(...), batch_size=None``) as
    one that asks for the same indices record by record, see :mod:`~lightning_lap2.sampling.by_list`."""
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not BatchSampler or loader.batch_size is not None:
        return loader
    if loader.batch_sampler is not None or _iterates_by_itself(type(loader)):
        return loader
    return DataLoader(
        ByList(loader.dataset),
        batch_sampler=loader.sampler,
        collate_fn=CollateByList(loader.dataset, loader.collate_fn),
        worker_init_fn=loader.worker_init_fn,
        **worker_settings(loader),
    )


def rebuild_loader(
    loader: DataLoader[Any], batch_sampler: Sampler[list[int]] | Iterable[list[int]], dataset: Any = None
) -> DataLoader[Any]:
    """A ``DataLoader`` over the same data set that takes its batches from ``batch_sampler``.

    Collate function, workers and their settings, pinning, time-out and generator are those of ``loader``. A subclass
    of ``DataLoader`` comes back as a plain one.

    Args:
        dataset: takes the place of the data set, and has its length; ``None`` keeps it.

    Raises:
        TypeError, ValueError: for a loader that takes no batch sampler or delivers out of order, as in
            :func:`check_loader`.
    """
    _map_style(loader)
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        batch_sampler=batch_sampler,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        **worker_settings(loader),
    )


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """How ``loader`` reads: workers, pinning, time-out and generator, as arguments of another ``DataLoader``."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.pin_memory_device:  # deprecated by torch: not to be passed on when it is empty
        settings["pin_memory_device"] = loader.pin_memory_device
    if loader.num_workers > 0:
        settings["prefetch_factor"] = loader.prefetch_factor
        settings["multiprocessing_context"] = loader.multiprocessing_context
    return settings


def provably_once(loader: object, world_size: int) -> None:
    """Refuses a loader that may use an example more than once in a pass over all ranks.

    For ``sampling="none"``, where an epoch costs one release only if no example repeats. Indices are what is
    judged: a data set that holds one person's record under two indices is outside what can be seen here, and
    so are ranks whose ``DistributedSampler`` have different seeds or epochs.

    Raises:
        TypeError, ValueError: a loader whose batches cannot be counted, as in :func:`check_loader`.
        ValueError: a sampler that repeats, pads by repetition, is unknown, or gives all ranks the same data.
    """
    known = _map_style(loader)
    _length(known)
    check_repeats(inner(known.dataset))
    batches = known.batch_sampler
    if type(batches) is not BatchSampler:
        reason: str | None = f"the batch_sampler is a {_name(batches)}, which may repeat examples"
    elif isinstance(batches.sampler, DistributedSampler):
        reason = _distributed_repeats(batches.sampler, world_size)
    else:
        reason = _repeats(batches.sampler)
        if reason is None and world_size > 1:
            reason = (
                f"each of the {world_size} ranks reads the whole data with its {_name(batches.sampler)}; "
                "shard it with a DistributedSampler"
            )
    if reason is not None:
        raise ValueError(
            f"an example may be used more than once in a pass of the train loader: {reason}. "
            "sampling='none' is accounted for each example at most once per pass; sampling='poisson' has no "
            "such condition"
        )


def _map_style(loader: object) -> DataLoader[Any]:
    """``loader`` if it is a ``DataLoader`` that reads a map-style data set by a batch sampler, in order."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"the train loader must be one torch.utils.data.DataLoader, got {_name(loader)}: at which rate it draws "
            "a record is not known. Use a DataLoader over a data set with __getitem__ and __len__"
        )
    if _iterates_by_itself(type(loader)):
        raise TypeError(
            f"the train loader {_name(loader)} iterates in its own way (it overrides __iter__ or "
            "_get_iterator), so its batches cannot be replaced or counted. Use a plain DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"the train data set {_name(loader.dataset)} is an IterableDataset: its examples cannot be drawn "
            f"or counted by index. Use a map-style data set (__getitem__ and __len__), or {_NONE}"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "the train loader has batch_size=None, so it has no batches to draw. Use batch_size=k with a "
            "data set of single examples, or sampler=BatchSampler(...) with one that takes lists of indices"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "the train loader has in_order=False: batches would arrive apart from their counts. Use in_order=True"
        )
    return loader


def _iterates_by_itself(kind: type[DataLoader[Any]]) -> bool:
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


def _length(loader: DataLoader[Any]) -> int:
    """N; TypeError without a length, ValueError if it is 0."""
    if not isinstance(loader.dataset, Sized):
        raise TypeError(
            f"the train data set {_name(loader.dataset)} has no __len__, but N must be known and public. "
            "Give it a __len__"
        )
    size = len(loader.dataset)
    if size < 1:
        raise ValueError(f"the train data set {_name(loader.dataset)} is empty: len(dataset) = {size}")
    return size


def _check_sampler(sampler: object, size: int) -> None:
    """Refuses a sampler that is not uniform over the ``size`` examples."""
    if isinstance(sampler, DistributedSampler):
        if _is_lightning_wrapper(sampler):
            _check_sampler(sampler.dataset._sampler, size)  # type: ignore[attr-defined]
            return
        if not _plain_distributed(sampler):
            raise TypeError(_custom(sampler))
        covered = len(sampler.dataset)  # type: ignore[arg-type]
    elif type(sampler) is RandomSampler:
        covered = len(sampler.data_source)
        if sampler.replacement:
            raise ValueError(
                "the train loader's RandomSampler has replacement=True: an example can enter a batch twice. "
                f"Use {_PLAIN}"
            )
        if sampler.num_samples != covered:
            raise ValueError(
                f"the train loader's RandomSampler has num_samples={sampler.num_samples} of {covered} "
                f"examples. Use {_PLAIN}; limit_train_batches shortens an epoch"
            )
    elif type(sampler) is SequentialSampler:
        covered = len(sampler.data_source)
    else:
        raise TypeError(_custom(sampler))
    if covered != size:
        raise ValueError(
            f"the train loader's {_name(sampler)} is over {covered} examples, its data set has {size}. "
            "Use torch.utils.data.Subset for a part of the data"
        )


def _custom(sampler: object) -> str:
    # without sampling only those are accepted that are known to give no example twice
    other = f", or {_NONE}" if type(sampler) is SubsetRandomSampler else ""
    return (
        f"the train loader's sampler is a {_name(sampler)}; Poisson sampling draws all examples at one rate "
        f"and would discard it. Use {_PLAIN}{other}"
    )


def _plain_distributed(sampler: DistributedSampler[Any]) -> bool:
    """Whether the sampler walks the data set as torch's or Lightning's own class does."""
    own = type(sampler).__iter__ is DistributedSampler.__iter__
    return own or (type(sampler).__name__ == "UnrepeatedDistributedSampler" and _from_lightning(sampler))


def _from_lightning(sampler: object) -> bool:
    return type(sampler).__module__ in _LIGHTNING_HOMES


def _is_lightning_wrapper(sampler: DistributedSampler[Any]) -> bool:
    """Lightning's shard of another sampler, which then is ``sampler.dataset._sampler``."""
    wrappers = ("DistributedSamplerWrapper", "UnrepeatedDistributedSamplerWrapper")
    return type(sampler).__name__ in wrappers and _from_lightning(sampler)


def _distributed_repeats(sampler: DistributedSampler[Any], world_size: int) -> str | None:
    """Why the shards of ``world_size`` ranks may overlap or repeat; None if they cannot."""
    name = _name(sampler)
    if _is_lightning_wrapper(sampler):
        inner = sampler.dataset._sampler  # type: ignore[attr-defined]
        if type(inner) is not SequentialSampler:
            return f"{name} shards a {_name(inner)}, whose order need not agree between the ranks"
    elif not _plain_distributed(sampler):
        return f"the sampler is a {name}, which may repeat examples"
    if sampler.num_replicas != world_size:
        return f"{name} has num_replicas={sampler.num_replicas} on {world_size} ranks"
    covered = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size > covered:
        extra = sampler.total_size - covered
        return (
            f"{name} pads by repetition: {covered} examples on {world_size} ranks, {extra} of them twice. "
            "Use drop_last=True in the sampler, or a data set divisible by the ranks"
        )
    return None


def _repeats(sampler: object) -> str | None:
    """Why a sampler of one process may give an index twice in a pass; None if it cannot."""
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is SubsetRandomSampler:
        repeats = len(set(sampler.indices)) < len(sampler.indices)
        return "SubsetRandomSampler was given an index twice" if repeats else None
    if type(sampler) is RandomSampler:
        if sampler.replacement:
            return "RandomSampler has replacement=True"
        if sampler.num_samples > len(sampler.data_source):
            drawn = sampler.num_samples
            return f"RandomSampler has num_samples={drawn} of {len(sampler.data_source)} examples"
        return None
    return f"the sampler is a {_name(sampler)}, which may repeat examples"


def _name(thing: object) -> str:
    return type(thing).__name__
