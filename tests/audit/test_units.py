"""Audit and replay of a training whose units are users."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from benchmarks.faults import FAULTS
from lightning_lap2.audit import Training, audit
from lightning_lap2.audit.neighbours import replay
from lightning_lap2.sampling import UnitBatchSampler
from tests.audit.nets import classes, training

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT: dict[str, Any] = {"mechanism": "laplace_l1", "noise_multiplier": 1.0}


class Owned(Dataset[Any]):
    """Two records of each user."""

    def __init__(self, users: int) -> None:
        self.rows, self.user_id = classes(2 * users), np.arange(2 * users) % users

    def __len__(self) -> int:
        return len(self.user_id)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def of_users(users: int, **options: Any) -> Training:
    given = training(**{"records": 2 * users, "unit": "user_id", "records_per_unit": 2, **options})
    loader = type(given.loader)(Owned(users), batch_size=given.loader.batch_size, shuffle=True)
    return replace(given, loader=loader)


def test_a_canary_is_a_user() -> None:
    honest = audit(of_users(250, batch=250, **EXACT), seed=1)
    assert honest.canaries == 250
    assert honest.claim.adjacency == "add/remove one user (user_id)"
    assert not honest.violated
    assert honest.epsilon > 0.02
    with FAULTS["half_noise"]():
        assert audit(of_users(250, batch=250, **EXACT), seed=1).epsilon > honest.epsilon


def test_a_mislabelled_record_is_no_user() -> None:
    with pytest.raises(ValueError, match="canary='mislabelled' replaces single records.*unit='user_id'"):
        audit(of_users(20, batch=5, noise_multiplier=1.0), canary="mislabelled")


GIVEN: dict[str, Any] = {"eps": 1e6, "noise_multiplier": 0.5, "max_grad_norm": 0.01, "bound": "joint", "steps": 6}


@pytest.mark.parametrize("unit", ["user_id", lambda dataset: dataset.user_id], ids=["name", "function"])
def test_replay_leaves_a_user_out(unit: Any) -> None:
    result = replay(of_users(12, batch=4, unit=unit, **GIVEN), records=3, steps=6)
    assert not result.violated, str(result)
    assert max(neighbour.moved for neighbour in result.neighbours) > 0.9
    assert result.claim.num_examples == 12
    assert "each unit left out" in str(result)


def test_replay_finds_users_that_show_each_others_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(sampler: UnitBatchSampler, batch: list[int], drawn: list[int], release: int, part: int) -> list[int]:
        return [row for unit in batch for row in (unit, min(batch))]

    monkeypatch.setattr(UnitBatchSampler, "_rows", mixed)
    assert replay(of_users(12, batch=4, **GIVEN), records=3, steps=6).violated
