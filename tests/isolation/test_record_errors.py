"""``on_record_error``: a record that cannot be read, or on which the step raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lap2.sampling import PoissonBatchSampler
from tests.isolation.sensitivity import LIMIT, Attack, N, Plain, Rows


class Unreadable(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == N - 1:
            raise OSError("truncated file")
        return super().__getitem__(index)


class Raises(Plain):
    """Raises on the loud record, which only one example at a time can tell."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.abs().max()) > 20:
            raise ValueError("out of range")
        return super().loss(x, y)  # type: ignore[return-value]


def uncollatable(records: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(records)
    if float(x.abs().max()) > 20:
        raise ValueError("out of range")
    return x, y


ATTACKS = {
    "fetch": Attack(dataset=Unreadable),
    "fetch in a worker": Attack(dataset=Unreadable, loader={"num_workers": 1}),
    "collate": Attack(loader={"collate_fn": uncollatable}),
    "step": Attack(Raises),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_by_default_it_ends_the_fit_as_in_plain_lightning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((OSError, ValueError), match="truncated file|out of range"):
        ATTACKS[name].moved(monkeypatch)


def test_a_draw_of_which_nothing_can_be_read_is_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(sampler: PoissonBatchSampler, release: int, parts: int) -> list[tuple[list[int], int]]:
        return [([N - 1], 1)] * parts

    monkeypatch.setattr(PoissonBatchSampler, "_draw", last)
    sums = Attack(dataset=Unreadable, privacy={"on_record_error": "zero"}).releases([], "auto")
    assert len(sums) == 3
    assert max(float(total.abs().max()) for total in sums) < 0.1


@pytest.mark.parametrize("name", ATTACKS)
def test_with_zero_it_counts_as_one_without_a_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = ATTACKS[name]
    attack = Attack(attack.module, attack.dataset, attack.loader, privacy={"on_record_error": "zero"})
    if name == "step":  # the trial meets it first, and a step that has never run is nobody's fault
        monkeypatch.setattr("lightning_lap2.callback.session._TRIAL_RECORDS", 3)
    moved = attack.moved(monkeypatch)
    assert moved <= 1e-3 * LIMIT


def test_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_lap2 import Lap2Privacy

    callback = Lap2Privacy(eps=1.0, on_record_error="zero")
    assert any("on_record_error='zero'" in text for text in callback.report().caveats)
    with pytest.raises(ValueError, match="on_record_error"):
        Lap2Privacy(eps=1.0, on_record_error="skip")  # type: ignore[arg-type]
