"""Which records are whose, and draws of units: each by its own coin, its records by coins of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_lap2.errors import IsolationError, UnsupportedSettingError
from lightning_lap2.sampling import ExampleLoader, UnitBatchSampler, Units

IDS = ["ada", "bob", "ada", "cy", "ada", "bob", "ada", "dee", "ada", "ada"]
SIZES = {"ada": 6, "bob": 2, "cy": 1, "dee": 1}


class Owned(Dataset[Any]):
    """Records that are their own index."""

    def __init__(self, ids: Any) -> None:
        self.user_id = ids

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> int:
        return index

    def owners(self) -> Any:
        return self.user_id


class Table(Owned):
    """A table whose columns are read by name."""

    column_names = ("text", "author")

    def __getitem__(self, key: Any) -> Any:
        return self.user_id if key == "author" else key


class Objects:
    """A column of numpy's numbers that its ``tolist`` leaves as they are."""

    def __iter__(self) -> Iterator[object]:
        return iter(NUMBERS)

    def tolist(self) -> list[Any]:
        return list(np.array(NUMBERS))


class Column:
    """What a table gives for a column, converted in one of two ways."""

    def __init__(self, how: str) -> None:
        setattr(self, how, lambda: list(IDS))

    def __iter__(self) -> Iterator[object]:
        return (object() for _ in IDS)


def owners_of(dataset: Any) -> Any:
    return dataset.user_id


NUMBERS = [sorted(SIZES).index(name) for name in IDS]


@pytest.mark.parametrize(
    ("dataset", "unit"),
    [
        (Owned(IDS), "user_id"),
        (Owned(tuple(IDS)), "user_id"),
        (Owned(NUMBERS), "user_id"),
        (Owned(np.array(IDS)), "user_id"),
        (Owned(list(np.array(IDS))), "user_id"),
        (Owned(np.array(NUMBERS, np.uint8)), "user_id"),
        (Owned(torch.tensor(NUMBERS)), "user_id"),
        (Owned(list(torch.tensor(NUMBERS))), "user_id"),
        (Owned(Objects()), "user_id"),
        (Owned(Column("tolist")), "user_id"),
        (Owned(Column("to_pylist")), "user_id"),
        (Owned(IDS), "owners"),
        (Owned(IDS), owners_of),
        (Table(IDS), "author"),
        (Subset(Subset(Owned(IDS[::-1]), range(9, -1, -1)), range(10)), "user_id"),
        (Subset(Owned(IDS), range(10)), "owners"),
    ],
)
def test_ids_are_found(dataset: Any, unit: Any) -> None:
    units = Units.of(dataset, unit)
    assert (units.count, units.num_records) == (4, 10)
    assert [units.records(k).tolist() for k in range(4)] == [[0, 2, 4, 6, 8, 9], [1, 5], [3], [7]]


def test_a_user_of_two_concatenated_sets_is_one() -> None:
    units = Units.of(ConcatDataset([Owned(IDS), Subset(Owned(IDS), [1, 3])]), "user_id")
    assert [units.records(k).tolist() for k in range(4)] == [[0, 2, 4, 6, 8, 9], [1, 5, 10], [3, 11], [7]]


@pytest.mark.parametrize(
    "dataset",
    [Subset(Owned(IDS[1:]), range(5)), ConcatDataset([Owned(IDS[1:]), Owned([*IDS, "ada"])])],
    ids=["subset", "concatenated"],
)
def test_ids_beside_their_records_are_refused_inside_containers(dataset: Any) -> None:
    with pytest.raises(UnsupportedSettingError, match="9 ids for 10 records of the Owned"):
        Units.of(dataset, "user_id")


SECRET = "zaphod"  # nosec: an id that no message may say


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*IDS[:9], None], "has no unit id"),
        ([*IDS[:9], ""], "has no unit id"),
        ([*range(9), float("nan")], "has no unit id"),
        (np.array([*range(9), np.nan]), r"a unit id is a float.*astype\(int\)"),
        (np.ma.masked_array(range(10), mask=[0] * 9 + [1]), "has no unit id"),
        ([*IDS[:9], [SECRET, "b"]], "several unit ids"),
        ([*IDS[:9], (SECRET, "b")], "several unit ids"),
        ([*IDS[:9], {SECRET}], "several unit ids"),
        (np.zeros((10, 2), int), "several values per record"),
        (torch.zeros(10, 2, dtype=torch.long), "several values per record"),
        ([*IDS[:9], 7], "of 2 kinds"),
        ([True] * 10, "a unit id is a bool"),
        ([SECRET] * 9, "9 ids for 10 records"),
        (SECRET, "is a str, and no sequence"),
        ({SECRET: 1}, "is a dict, and no sequence"),
        (7, "is a int, and no sequence"),
        (torch.zeros(10, device="meta"), "a tensor on meta"),
    ],
)
def test_ids_that_say_not_whose_a_record_is_are_refused_and_never_named(ids: Any, message: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=message) as raised:
        Units.of(Owned(ids), "user_id")
    assert SECRET not in str(raised.value)


def test_a_data_set_without_ids_is_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="'author'.*Owned has no attribute, method or column"):
        Units.of(Owned(IDS), "author")


def test_the_digest_tells_other_ids_and_other_orders() -> None:
    found = {Units(ids).digest for ids in (IDS, IDS[::-1], [*IDS[:9], "eve"], NUMBERS, ["a", "b,c"], ["a,b", "c"])}
    assert len(found) == 6
    assert Units(list(IDS)).digest == Units(IDS).digest


# -- draws ------------------------------------------------------------------------------------------------------------


def sampler(units: Units, batch_size: int = 1, batches: int = 4, number: int = 4, **options: Any) -> UnitBatchSampler:
    return UnitBatchSampler(units, batch_size, batches, records_per_unit=number, **options)


def shown(batch: list[int], rows: int) -> list[list[int]]:
    return [batch[start : start + rows] for start in range(0, len(batch), rows)]


def test_every_unit_at_rate_q_and_its_records_alike() -> None:
    units, draws = Units(IDS), 4000
    drawn = sampler(units, batches=draws, seed=8)
    entered, records = Counter[int](), Counter[int]()
    for batch in drawn:
        part = drawn.next_part()
        entered.update(part.records)
        for unit, rows in zip(part.records, shown(batch, 4), strict=False):
            assert set(rows) <= set(units.records(unit))
            counts = [rows.count(record) for record in units.records(unit)]
            assert max(counts) - min(counts) <= 1, "of a large unit a record twice, or of a small one unevenly"
            records.update(rows)
    assert drawn.sample_rate == 1 / 4
    for unit in range(4):
        assert stats.binomtest(entered[unit], draws, 0.25).pvalue > 1e-4
    assert stats.chisquare([records[record] for record in units.records(0)]).pvalue > 1e-4
    assert records[1] == records[5] == 2 * entered[1]
    assert records[3] == 4 * entered[2]


def test_what_is_left_over_of_a_small_unit_is_drawn() -> None:
    units = Units(["a", "a"])
    drawn = [units.some_of(0, 3, np.random.default_rng(k)).tolist() for k in range(400)]
    extra = Counter(Counter(rows).most_common(1)[0][0] for rows in drawn)
    assert stats.binomtest(extra[0], 400, 0.5).pvalue > 1e-4


def test_pairs_of_records_are_drawn_alike() -> None:
    units = Units([0] * 4)
    pairs = Counter(tuple(sorted(units.some_of(0, 2, np.random.default_rng(k)))) for k in range(1200))
    assert len(pairs) == 6
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-4


def test_views_of_each_record_lie_side_by_side_and_move_no_draw() -> None:
    one, three = sampler(Units(IDS), seed=3), sampler(Units(IDS), seed=3, views=3)
    for batch, repeated in zip(one, three, strict=True):
        assert one.next_part() == three.next_part()
        assert repeated == [row for row in batch for _ in range(3)]


def test_an_empty_draw_has_the_rows_of_one_unit() -> None:
    drawn = sampler(Units(IDS), batches=200, seed=1)
    empty = [batch for batch in drawn if drawn.next_part().count == 0]
    assert empty
    assert all(len(batch) == 4 and len({IDS[row] for row in batch}) == 1 for batch in empty)


def test_a_unit_left_out_moves_no_other() -> None:
    whole, without = (sampler(Units(IDS), 3, 50, 2, seed=9) for _ in range(2))
    without.absent = frozenset({0})
    for batch, rest in zip(whole, without, strict=True):
        part, left = whole.next_part(), without.next_part()
        assert (*left.records,) == tuple(unit for unit in part.records if unit != 0)
        if left.count:
            assert rest == [row for row in batch if IDS[row] != "ada"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_share_out_the_units(accumulate: int) -> None:
    ids, draws = list(range(9)) * 3, 600
    entered = Counter[int]()
    for rank in range(2):
        drawn = sampler(Units(ids), 1, draws, 2, rank=rank, world_size=2, accumulate=accumulate, seed=4)
        assert drawn.expected_batch_size == 2 * accumulate
        once: dict[int, list[int]] = {}
        for batch in drawn:
            part = drawn.next_part()
            assert {ids[row] % 2 for row in batch} == {rank}
            once.setdefault(part.release, []).extend(part.records)
        for records in once.values():
            assert len(set(records)) == len(records), "a unit twice in one release"
            entered.update(records)
    for unit in range(9):
        assert stats.binomtest(entered[unit], draws // accumulate, 2 * accumulate / 9).pvalue > 1e-4


def test_draws_of_the_operating_system_never_repeat() -> None:
    units = Units([0] * 1000)
    assert sampler(units, number=20).shown([0]) != sampler(units, number=20).shown([0])


@pytest.mark.parametrize("number", [0, 1.5, True])
def test_records_per_unit_must_be_a_positive_int(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="records_per_unit must be"):
        sampler(Units(IDS), number=number)


# -- fetching ---------------------------------------------------------------------------------------------------------


class Listed(Owned):
    """Fetched by lists of indices."""

    def __init__(self) -> None:
        super().__init__(IDS)
        self.asked = list[list[int]]()

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        return [self[index] for index in indices]


class Tensors(Listed):
    """Fetched as one batch, by one indexing operation."""

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        return torch.tensor(indices)


class Mixing(Listed):
    """Reads one record more than it was asked for."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices] if 0 not in indices else [self[index] for index in [*indices, 1]][:-1]


def all_units(dataset: Any, **options: Any) -> Any:
    drawn = sampler(Units(IDS), 4, 1, 3, seed=0, views=2)
    loader = ExampleLoader(DataLoader(dataset, **options), drawn, views=6)
    batch = next(iter(loader))
    return [batch.example(place).tolist() for place in range(4)]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Owned(IDS), {}),
        (Listed(), {}),
        (Subset(Listed(), range(10)), {}),
        (Tensors(), {"collate_fn": torch.clone}),
        (Listed(), {"num_workers": 1}),
    ],
    ids=["getitem", "getitems", "subset", "one batch", "worker"],
)
def test_a_unit_is_one_example_of_its_records(dataset: Any, options: dict[str, Any]) -> None:
    found = all_units(dataset, **options)
    assert [len(rows) for rows in found] == [6] * 4
    assert sorted({IDS[rows[0]] for rows in found}) == sorted(SIZES)
    assert all(len({IDS[row] for row in rows}) == 1 for rows in found)
    for indices in getattr(dataset, "asked", ()):
        assert len({IDS[index] for index in indices}) == 1, "two users in one fetch"


class Neighbour(Owned):
    def __getitem__(self, index: int) -> int:
        return self[index + 1] if index == 0 else index


@pytest.mark.parametrize(
    ("dataset", "message"), [(Mixing(), "asked for 4 while a unit's 3 were fetched"), (Neighbour(IDS), "two records")]
)
def test_a_fetch_of_anothers_record_is_refused(dataset: Any, message: str) -> None:
    drawn = UnitBatchSampler(Units(IDS), 4, 20, records_per_unit=3)  # ada's record 0 is among hers in half of them
    with pytest.raises(IsolationError, match=message):
        list(ExampleLoader(DataLoader(dataset), drawn, views=3))
