"""One draw, one release and one charge per optimizer step, whatever the number of its parts."""

from __future__ import annotations

import pytest
import torch

from lightning_lap2.accounting import MajorizedAccountant
from tests.helpers import (
    DELTA,
    LIGHTNING,
    batch_spy,
    by_hand,
    classifier,
    loader,
    part_spy,
    quiet_trainer,
    watched_releases,
    weights,
)

pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
RATE, CLIP = 0.1, 0.4


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_scenario_6_ragged_end_without_noise_is_one_big_batch(engine: str) -> None:
    """16 loader batches in windows of 5, 5, 5 and 1."""
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=CLIP, engine=engine)
    spy, module = batch_spy(pl), classifier(pl, learning_rate=RATE)
    trainer = quiet_trainer(pl, callback, spy, max_epochs=2, accumulate_grad_batches=5)
    with watched_releases() as seen:
        trainer.fit(module, loader(64, 4))
    assert len(spy.batches) == 32
    assert [part.of for part, _, _ in spy.batches] == ([5] * 15 + [1]) * 2
    assert callback.expected_batch_size == 20
    assert callback.sample_rate == 20 / 64
    assert callback.steps == trainer.global_step == len(seen) == 8
    torch.testing.assert_close(weights(module), by_hand(spy.batches, 20, rate=RATE, clip=CLIP), rtol=0, atol=1e-6)


def test_scenario_6_one_charge_and_the_noise_of_one_step() -> None:
    callback, spy = Lap2Privacy(eps=4.0), part_spy(pl)
    module = classifier(pl, unused=20_000)
    trainer = quiet_trainer(pl, callback, spy, max_epochs=2, accumulate_grad_batches=5)
    with watched_releases() as seen:
        trainer.fit(module, loader(64, 4))
    assert callback.steps == callback.accountant.steps == callback.planned_steps == len(seen) == 8
    accountant = MajorizedAccountant(bound="tight", mechanism="laplace")
    accountant.step(noise_multiplier=callback.noise_multiplier, sample_rate=20 / 64, dimension=20_008, steps=8)
    spent = callback.accountant.epsilon(delta=DELTA)
    assert spent == pytest.approx(accountant.epsilon(delta=DELTA), rel=1e-9)
    assert spent <= 4.0
    for release in seen:
        noise = (20 * release.after - release.before)[8:].double()
        assert noise.abs().mean() == pytest.approx(callback.scale, rel=0.05)


def test_records_of_a_window_are_distinct_and_can_all_enter_it() -> None:
    """q covers every record that can enter a step: the draw is over the whole data set, its size Binomial(N, q)."""
    spy = batch_spy(pl)
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1.0)
    trainer = quiet_trainer(pl, callback, spy, max_epochs=20, accumulate_grad_batches=4)
    trainer.fit(classifier(pl), loader(64, 4))
    windows: dict[int, list[bytes]] = {}
    for part, x, _ in spy.batches:
        windows.setdefault(part.release, []).extend(row.numpy().tobytes() for row in x)
    assert len(windows) == 80
    for rows in windows.values():
        assert len(set(rows)) == len(rows), "a record entered one release twice"
    sizes = torch.tensor([len(rows) for rows in windows.values()], dtype=torch.float64)
    assert sizes.mean() == pytest.approx(16, abs=5 * (16 * 0.75 / 80) ** 0.5)
    assert sizes.var() == pytest.approx(12, rel=0.8)
    assert len({row for rows in windows.values() for row in rows}) == 64
