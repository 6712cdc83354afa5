"""Which loaders are understood, and what a rebuilt one keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_lap2.sampling import PoissonBatchSampler, check_loader, provably_once, rebuild_loader

lightning_distributed = pytest.importorskip("lightning.fabric.utilities.distributed")
lightning_overrides = pytest.importorskip("lightning.pytorch.overrides.distributed")
DistributedSamplerWrapper = lightning_distributed.DistributedSamplerWrapper

DATA = TensorDataset(torch.arange(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter([])


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return iter([])


class OwnSampler(Sampler):
    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


class OwnBatches(BatchSampler):
    pass


class WeightedDistributed(DistributedSampler):
    def __iter__(self):
        return iter([0] * 12)


def distributed(size=12, **keywords):
    return DistributedSampler(range(size), num_replicas=4, rank=1, **keywords)


def wrapped(sampler, kind=DistributedSamplerWrapper, replicas=4):
    return kind(sampler, num_replicas=replicas, rank=0)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=3),
        DataLoader(DATA, batch_size=3, shuffle=True, drop_last=True),
        DataLoader(DATA, batch_size=3, sampler=RandomSampler(DATA)),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
        DataLoader(DATA, sampler=distributed()),
        DataLoader(DATA, sampler=wrapped(RandomSampler(DATA))),
        DataLoader(
            DATA,
            sampler=wrapped(
                SequentialSampler(DATA), lightning_overrides.UnrepeatedDistributedSamplerWrapper, replicas=2
            ),
        ),
        DataLoader([{"a": 1}] * 12, batch_size=3),
    ],
)
def test_plain_loaders_are_understood(loader):
    check_loader(loader)


WEIGHTED = WeightedRandomSampler([1.0] * 12, 12)


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        ([1, 2, 3], TypeError, "must be one torch.utils.data.DataLoader, got list"),
        (DataLoader(Stream()), TypeError, "Stream is an IterableDataset"),
        (DataLoader(Unsized(), sampler=OwnSampler()), TypeError, "Unsized has no __len__"),
        (DataLoader([], sampler=OwnSampler()), ValueError, r"empty: len\(dataset\) = 0"),
        (DataLoader(DATA, batch_size=None), ValueError, "batch_size=None"),
        (OwnLoader(DATA), TypeError, "OwnLoader iterates in its own way"),
        (OwnIterator(DATA), TypeError, "OwnIterator iterates in its own way"),
        (DataLoader(DATA, in_order=False), ValueError, "in_order=False"),
        (DataLoader(DATA, sampler=WEIGHTED), TypeError, "WeightedRandomSampler.*Use shuffle=True"),
        (DataLoader(DATA, sampler=OwnSampler()), TypeError, "OwnSampler"),
        (DataLoader(DATA, sampler=list(range(12))), TypeError, "sampler is a list"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), TypeError, "SubsetRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), ValueError, "replacement=True"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), ValueError, "num_samples=5 of 12"),
        (DataLoader(DATA, sampler=RandomSampler(range(7))), ValueError, "over 7 examples, its data set has 12"),
        (DataLoader(DATA, sampler=SequentialSampler(range(7))), ValueError, "SequentialSampler is over 7"),
        (DataLoader(DATA, sampler=distributed(13)), ValueError, "DistributedSampler is over 13"),
        (DataLoader(DATA, batch_sampler=[[0], [1]]), TypeError, "batch_sampler is a list"),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), TypeError, "OwnBatches"),
        (DataLoader(DATA, batch_sampler=BatchSampler(WEIGHTED, 2, False)), TypeError, "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=wrapped(WEIGHTED)), TypeError, "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=wrapped(OwnSampler())), TypeError, "OwnSampler"),
        (
            DataLoader(DATA, sampler=WeightedDistributed(DATA, num_replicas=2, rank=0)),
            TypeError,
            "WeightedDistributed",
        ),
    ],
)
def test_refuses_by_name(loader, error, message):
    with pytest.raises(error, match=message):
        check_loader(loader)


@pytest.mark.parametrize(
    ("loader", "world"),
    [
        (DataLoader(DATA), 1),
        (DataLoader(DATA, shuffle=True), 1),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), 1),
        (DataLoader(DATA, sampler=SubsetRandomSampler([3, 1])), 1),
        (DataLoader(DATA, sampler=distributed()), 4),
        (DataLoader(TensorDataset(torch.arange(13)), sampler=distributed(13, drop_last=True)), 4),
        (DataLoader(DATA, sampler=wrapped(SequentialSampler(DATA))), 4),
    ],
)
def test_provably_once(loader, world):
    provably_once(loader, world)


THIRTEEN = TensorDataset(torch.arange(13))


@pytest.mark.parametrize(
    ("loader", "world", "message"),
    [
        (DataLoader(THIRTEEN, sampler=distributed(13)), 4, "pads by repetition: 13 examples on 4 ranks, 3 of them"),
        (
            DataLoader(THIRTEEN, sampler=wrapped(SequentialSampler(THIRTEEN))),
            4,
            "DistributedSamplerWrapper pads by repetition",
        ),
        (DataLoader(DATA, sampler=distributed()), 2, "num_replicas=4 on 2 ranks"),
        (DataLoader(DATA, shuffle=True), 2, "each of the 2 ranks reads the whole data with its RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), 1, "replacement=True"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=25)), 1, "num_samples=25 of 12"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([3, 3])), 1, "SubsetRandomSampler was given an index twice"),
        (DataLoader(DATA, sampler=WEIGHTED), 1, "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=wrapped(RandomSampler(DATA))), 4, "shards a RandomSampler"),
        (DataLoader(DATA, sampler=WeightedDistributed(DATA, num_replicas=4, rank=0)), 4, "WeightedDistributed"),
        (DataLoader(DATA, batch_sampler=[[0], [0]]), 1, "batch_sampler is a list"),
        (DataLoader(DATA, batch_size=None), 1, "batch_size=None"),
    ],
)
def test_not_provably_once(loader, world, message):
    with pytest.raises(ValueError, match=message):
        provably_once(loader, world)


def test_a_stream_is_not_provably_once():
    with pytest.raises(TypeError, match="IterableDataset"):
        provably_once(DataLoader(Stream()), 1)


def collate(rows):
    return len(rows)


def init(worker):
    del worker


def test_rebuilt_loader_keeps_everything():
    generator = torch.Generator()
    loader = DataLoader(
        DATA,
        batch_size=3,
        num_workers=2,
        collate_fn=collate,
        timeout=30,
        worker_init_fn=init,
        multiprocessing_context="spawn",
        prefetch_factor=5,
        persistent_workers=True,
        generator=generator,
    )
    sampler = PoissonBatchSampler(12, 3, 4)
    rebuilt = rebuild_loader(loader, sampler)
    assert rebuilt.batch_sampler is sampler
    kept = (
        "dataset num_workers collate_fn pin_memory pin_memory_device timeout worker_init_fn prefetch_factor "
        "persistent_workers generator"
    )
    for name in kept.split():
        assert getattr(rebuilt, name) is getattr(loader, name) or getattr(rebuilt, name) == getattr(loader, name)
    assert rebuilt.multiprocessing_context.get_start_method() == "spawn"
    assert len(rebuilt) == 4


def test_rebuilt_loader_without_workers():
    rebuilt = rebuild_loader(DataLoader(DATA, batch_size=3, collate_fn=collate), PoissonBatchSampler(12, 12, 4))
    assert list(rebuilt) == [12] * 4


def test_rebuild_refuses_what_it_cannot_keep():
    sampler = PoissonBatchSampler(12, 3, 4)
    for loader, message in (
        (DataLoader(DATA, in_order=False), "in_order"),
        (OwnLoader(DATA), "OwnLoader"),
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            rebuild_loader(loader, sampler)
