"""A ledger in a checkpoint is refused whatever of it is damaged: by its checks, and by its checksum."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_lap2 import Lap2Privacy
from lightning_lap2.accounting import Release
from lightning_lap2.callback.ledger.ledger import Ledger, checksum
from lightning_lap2.callback.plan import KeptPlan

RELEASES = (Release(1.5, 0.125, 8), Release(2.5, 0.25, 9))
OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)
Path_ = tuple[Any, ...]


def state(tmp: Path) -> dict[str, Any]:
    """Of a ledger with two kinds of charge, a caveat, a plan and a journal."""
    ledger = Ledger(Lap2Privacy(eps=2.0).settings)
    ledger.open_journal(tmp)
    for release in RELEASES:
        ledger.charge(release)
    ledger.add_caveat("a caveat")
    ledger.plan = KeptPlan(2.0, RELEASES[0], 16)
    found = ledger.state_dict()
    ledger.close_journal(completed=False)
    return found


def places(node: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place in a nested state, containers and leaves."""
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return state(tmp_path_factory.mktemp("journal"))


def refuse(damaged: dict[str, Any]) -> None:
    ledger = Ledger(Lap2Privacy(eps=2.0).settings)
    before = ledger.state_dict()
    with pytest.raises(ValueError, match="ledger in the checkpoint is damaged"):
        ledger.load_state_dict(damaged)
    assert ledger.state_dict() == before, "a refused state changed the ledger"


def test_whole_state_loads_after_json(whole: dict[str, Any]) -> None:
    ledger = Ledger(Lap2Privacy(eps=2.0).settings)
    ledger.load_state_dict(json.loads(json.dumps(whole)))
    assert ledger.releases == ledger.accountant.steps == 2
    assert ledger.plan == KeptPlan(2.0, RELEASES[0], 16) and ledger.caveats == ["a caveat"]


@given(data=st.data())
def test_another_value_anywhere_is_refused(whole: dict[str, Any], data: st.DataObject) -> None:
    damaged = deepcopy(whole)
    path = data.draw(st.sampled_from(list(places(whole))))
    owner = damaged
    for key in path[:-1]:
        owner = owner[key]
    before, after = owner[path[-1]], data.draw(OTHERS)
    if type(after) is type(before) and after == before:
        return
    owner[path[-1]] = after
    refuse(damaged)


def test_every_missing_entry_is_refused(whole: dict[str, Any]) -> None:
    for path in places(whole):
        damaged = deepcopy(whole)
        owner = damaged
        for key in path[:-1]:
            owner = owner[key]
        del owner[path[-1]]
        refuse(damaged)


@pytest.mark.parametrize(
    "change",
    [
        {"releases": 1},
        {"releases": -1},
        {"releases": 3},
        {"delta": 0.0},
        {"sampling": "shuffle"},
        {"reproducible": "no"},
        {"caveats": "text"},
        {"caveats": [3]},
        {"plan": {"eps": 2.0}},
        {"plan": {"eps": 2.0, "sample_rate": 0.1, "dimension": 8, "end": 16, "noise_multiplier": -1.0}},
        {"plan": {"eps": 2.0, "sample_rate": 0.1, "dimension": 8, "end": 16, "noise_multiplier": math.nan}},
        {"plan": {"eps": 2.0, "sample_rate": 0.1, "dimension": 8, "end": 16, "noise_multiplier": "1.5"}},
        {"journal": {"path": 3, "run": "x", "noted": True}},
        {"journal": {"path": "x", "run": "x"}},
        {"journal": "x"},
        {"more": 1},
    ],
    ids=str,
)
def test_damage_under_a_matching_checksum_is_refused_by_its_own_check(
    whole: dict[str, Any], change: dict[str, Any]
) -> None:
    """What a program wrote wrongly, rather than a disk: the checksum agrees."""
    damaged = {**deepcopy(whole), **change}
    del damaged["checksum"]
    refuse({**damaged, "checksum": checksum(damaged)})
