"""The budget beats minimums; numbers agree; the end points."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_lap2 import Lap2Privacy
from lightning_lap2.accounting import MajorizedAccountant
from tests.scenarios.common import Classifier, data, flat, loader, no_privacy, trainer


def budget_for(steps: int, noise_multiplier: float = 1.0, sample_rate: float = 8 / 64) -> float:
    """An eps that pays for exactly ``steps`` releases of the small classifier."""
    n = sum(p.numel() for p in Classifier().parameters())
    costs = []
    for count in (steps, steps + 1):
        accountant = MajorizedAccountant()
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, dimension=n, steps=count)
        costs.append(accountant.epsilon(delta=1e-5))
    return (costs[0] + costs[1]) / 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_scenario_1_budget_beats_minimums(tmp_path: Path, accumulate: int) -> None:
    eps = budget_for(7, sample_rate=accumulate * 8 / 64)
    callback = Lap2Privacy(eps=eps, noise_multiplier=1.0)
    module = Classifier()
    weights: list[torch.Tensor] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            weights.append(flat(module).clone())

    run = trainer(
        [callback, Watch()],
        max_epochs=50,
        min_epochs=3,
        min_steps=40,
        accumulate_grad_batches=accumulate,
        default_root_dir=tmp_path,
    )
    run.fit(module, loader())
    assert callback.steps == callback.planned_steps == run.global_step == 7
    assert callback.epsilon <= eps
    assert run.state.finished and torch.equal(weights[-1], flat(module))
    run.save_checkpoint(tmp_path / "end.ckpt")
    resumed = Lap2Privacy(eps=eps, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="already spent"):
        again = trainer(resumed, max_epochs=50, accumulate_grad_batches=accumulate)
        again.fit(Classifier(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert resumed.steps == 7


def test_scenario_1_budget_already_spent_takes_no_step() -> None:
    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=2).fit(Classifier(), loader())
    steps, module = callback.steps, Classifier()
    before = flat(module).clone()
    with pytest.warns(UserWarning, match="budget eps=1 .* already spent"):
        trainer(callback, max_epochs=2).fit(module, loader())
    assert callback.steps == steps == 16
    assert torch.equal(before, flat(module))


def test_calibrated_run_spends_its_budget_and_no_more() -> None:
    callback = Lap2Privacy(eps=2.0)
    trainer(callback, max_epochs=3).fit(Classifier(), loader())
    assert callback.steps == 24
    assert 1.99 < callback.epsilon <= 2.0


def test_stretching_a_spent_budget_warns(tmp_path: Path) -> None:
    first = trainer(Lap2Privacy(eps=1.0), max_steps=14, default_root_dir=tmp_path)
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "end.ckpt")
    again = Lap2Privacy(eps=1.03)
    with pytest.warns(UserWarning, match="takes a noise multiplier of .* instead of .*raise eps"):
        trainer(again, max_steps=100).fit(Classifier(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert again.steps == 100 and 1.0 < again.epsilon <= 1.03


def test_older_checkpoint_into_a_callback_that_counted_more_warns(tmp_path: Path) -> None:
    callback = Lap2Privacy(eps=5.0, noise_multiplier=2.0)
    first = trainer(callback, max_steps=4, default_root_dir=tmp_path)
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "four.ckpt")
    trainer(callback, max_steps=8).fit(Classifier(), loader())
    with pytest.warns(UserWarning, match="12 releases had been counted before the checkpoint with 4"):
        trainer(callback, max_steps=6).fit(Classifier(), loader(), ckpt_path=tmp_path / "four.ckpt")
    assert callback.steps == 6


def test_stated_epsilon_is_never_rounded_down() -> None:
    from lightning_lap2.report import rounded_up

    for value in (0.1299976721, 3.4196918564308167, 1e-9, 123456.7891, 2.0):
        assert value <= float(rounded_up(value)) <= value * (1 + 2e-5)
    assert rounded_up(math.inf) == "inf"


def test_given_noise_without_a_last_step_ends_at_the_budget() -> None:
    callback = Lap2Privacy(eps=budget_for(11), noise_multiplier=1.0)
    trainer(callback, max_epochs=-1).fit(Classifier(), loader())
    assert callback.steps == 11


def test_run_without_a_last_step_cannot_be_calibrated() -> None:
    with pytest.raises(ValueError, match="noise_multiplier=None calibrates .* no last step"):
        trainer(Lap2Privacy(eps=1.0), max_epochs=-1).fit(Classifier(), loader())


def test_scenario_14_zero_noise_reports_infinity() -> None:
    callback = no_privacy()
    trainer(callback, max_epochs=1).fit(Classifier(), loader())
    assert math.isinf(callback.epsilon)
    assert callback.report().to_dict()["epsilon"] == "inf"
    assert "No privacy guarantee" in str(callback.report())


def test_scenario_14_epsilon_never_decreases_and_reads_the_same_twice() -> None:
    callback = Lap2Privacy(eps=2.0)
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            assert callback.epsilon == callback.epsilon
            seen.append(callback.epsilon)

    trainer([callback, Watch()], max_epochs=2).fit(Classifier(), loader())
    assert seen == sorted(seen) and seen[-1] <= 2.0
    spent = MajorizedAccountant()
    for logged in seen:
        spent.step(
            noise_multiplier=callback.noise_multiplier, sample_rate=callback.sample_rate, dimension=callback.dimension
        )
        assert logged >= spent.epsilon(delta=1e-5)


def test_scenario_14_fast_dev_run_is_charged_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Lap2Privacy(eps=1.0)
    trainer(callback, fast_dev_run=True).fit(Classifier(), loader())
    assert callback.steps == 1 and callback.epsilon > 0
    assert any("fast_dev_run" in text for text in callback.report().caveats)


@pytest.mark.filterwarnings("ignore:predict returned None:UserWarning")
def test_scenario_14_evaluation_charges_nothing() -> None:
    class Evaluated(Classifier):
        def validation_step(self, batch: object, batch_idx: int) -> None:
            assert len(batch[0]) == 8  # type: ignore[index]

        test_step = predict_step = validation_step

    callback = Lap2Privacy(eps=1.0)
    run = trainer(callback)
    fixed = torch.utils.data.DataLoader(data(), batch_size=8)
    for verb in (run.validate, run.test, run.predict):
        verb(Evaluated(), fixed)
    assert callback.steps == 0 and callback.epsilon == 0
    run = trainer(callback, max_epochs=1)
    run.fit(Evaluated(), loader(), fixed)
    assert callback.steps == 8


def test_scenario_16_huge_noise_destroys_learning() -> None:
    module, start = Classifier(lr=1e-4), None
    start = flat(module).clone()
    # seeded: the accuracy of weights at random is itself random
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1e6, max_grad_norm=1.0, noise_seed=1)
    trainer(callback, max_epochs=3).fit(module, loader())
    moved = flat(module) - start
    # 24 steps of lr * Laplace(1e6) / 8: a random walk, and no learning left in it
    expected = 1e-4 * math.sqrt(2 * 24) * 1e6 / 8
    assert expected / 1.5 < moved.std() < expected * 1.5
    x, y = data(512, seed=1).tensors
    accuracy = (module.net(x).argmax(1) == y).float().mean()
    assert accuracy < 0.65


@pytest.mark.parametrize("engine", ["vmap", "loop", "ghost"])
def test_scenario_16_zero_noise_and_no_clipping_is_plain_training(engine: str) -> None:
    def train(callbacks: list[L.Callback]) -> torch.Tensor:
        torch.manual_seed(0)
        module = Classifier()
        # the whole data set in every step, so that Poisson draws (q = 1) and the plain loader agree
        run = trainer(callbacks, max_epochs=20)
        run.fit(module, loader(n=64, batch_size=64))
        assert run.global_step == 20
        return flat(module)

    plain = train([])
    private = train([no_privacy(engine=engine)])
    assert torch.allclose(plain, private, atol=1e-6, rtol=0)
    assert not torch.equal(plain, flat(Classifier()))
