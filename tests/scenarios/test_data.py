"""Empty draws, loaders that lie, one poisoned record, seeds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_lap2 import Lap2Privacy
from lightning_lap2.callback.data import DataFacts
from tests.scenarios.common import Classifier, data, flat, loader, no_privacy, trainer

ENGINES = ["vmap", "loop", "ghost"]


class Records(torch.utils.data.Dataset[dict[str, Any]]):
    """Records with a tensor, a string and an int; the step only needs the tensor and the int."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((8,), float(index) / 20), "name": f"record {index}", "label": index % 3}


class OnRecords(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rows.append(len(batch["x"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch["x"], batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


# Lightning's own remark on a batch that holds strings; the plain run gets it too
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_scenario_2_empty_draws(engine: str) -> None:
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1e-3, engine=engine)
    module = OnRecords()
    moves: list[Tensor] = []
    empty: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            self.before = flat(module).clone()
            empty.append(callback._session._part.count == 0)  # type: ignore[union-attr]

        def on_train_batch_end(self, *_: object) -> None:
            moves.append(flat(module) - self.before)

    run = trainer([callback, Watch()], max_epochs=3)
    run.fit(module, DataLoader(Records(), batch_size=1, shuffle=True))
    assert callback.steps == len(moves) == 60
    assert 0 < sum(empty) < 60, "q N = 1: about every third draw is empty"
    assert min(module.rows) >= 1
    assert all(math.isfinite(v) for v in run.callback_metrics.values())
    # an empty step moves the weights by noise alone, of standard deviation lr sqrt(2) b / 1
    noise = torch.stack([m for m, e in zip(moves, empty, strict=True) if e])
    assert noise.std() == pytest.approx(0.1 * math.sqrt(2) * 1e-3, rel=0.1)


def test_scenario_4_weighted_sampler_is_refused() -> None:
    weighted = DataLoader(data(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 64, 64))
    with pytest.raises(TypeError, match="WeightedRandomSampler"):
        trainer(Lap2Privacy(eps=1.0), max_epochs=1).fit(Classifier(), weighted)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [1200, 1201])
def test_scenario_4_rate_and_normaliser_are_the_declared_ones(n: int, drop_last: bool) -> None:
    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(Classifier(), loader(n=n, batch_size=100, drop_last=drop_last))
    assert callback.sample_rate == 100 / n
    assert callback.expected_batch_size == 100
    assert callback.steps == (n // 100 if drop_last else math.ceil(n / 100))


def test_scenario_4_whole_data_set_in_every_step() -> None:
    callback = Lap2Privacy(eps=5.0)
    trainer(callback, max_epochs=3).fit(Classifier(), loader(n=64, batch_size=64))
    assert callback.sample_rate == 1.0 and callback.epsilon <= 5.0


def test_scenario_4_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than the data"):
        trainer(Lap2Privacy(eps=1.0), max_epochs=1).fit(Classifier(), loader(n=20, batch_size=64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("poison", [float("nan"), 1e38])
def test_scenario_7_one_poisoned_record(engine: str, poison: float) -> None:
    def train(value: float | None) -> tuple[Tensor, Lap2Privacy]:
        torch.manual_seed(0)
        x, y = data(64).tensors
        if value is not None:
            x = x.clone()
            x[5] = value
        module, callback = Classifier(), Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, engine=engine)
        run = trainer(callback, max_epochs=2)
        run.fit(module, DataLoader(TensorDataset(x, y), batch_size=64))
        return flat(module), callback

    def without_record_5() -> Tensor:
        """The clipped steps written out, with record 5 left out of the sum and the normaliser kept."""
        torch.manual_seed(0)
        module, (x, y) = Classifier(), data(64).tensors
        for _ in range(2):
            total = torch.zeros_like(flat(module))
            for i in range(64):
                if i == 5:
                    continue
                grads = torch.autograd.grad(module.loss(x[i : i + 1], y[i : i + 1]), list(module.parameters()))
                g = torch.cat([v.reshape(-1) for v in grads])
                total += g * min(1.0, 1.0 / g.norm())
            with torch.no_grad():
                nn.utils.vector_to_parameters(flat(module) - 0.1 * total / 64, module.parameters())
        return flat(module)

    weights, callback = train(poison)
    _, clean = train(None)
    assert torch.isfinite(weights).all()
    assert torch.allclose(weights, without_record_5(), atol=1e-6)
    assert callback.accountant.state_dict() == clean.accountant.state_dict()


def test_scenario_8_default_noise_ignores_seed_everything() -> None:
    def train(**kwargs: Any) -> Tensor:
        L.seed_everything(42, verbose=False)
        module = Classifier()
        trainer(Lap2Privacy(eps=1.0, **kwargs), max_epochs=1).fit(module, loader())
        return flat(module)

    assert not torch.equal(train(), train())
    assert torch.equal(train(noise_seed=1), train(noise_seed=1))
    assert not torch.equal(train(noise_seed=1), train(noise_seed=2))


def test_scenario_8_report_says_that_seeded_noise_is_not_private() -> None:
    callback = Lap2Privacy(eps=1.0, noise_seed=1)
    trainer(callback, max_epochs=1).fit(Classifier(), loader())
    assert "Not private: the noise is reproducible" in str(callback.report())
    assert any("noise_seed makes" in text for text in callback.report().caveats)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "laplace_l1"])
def test_noise_of_the_step_has_the_charged_scale(mechanism: str) -> None:
    """With zero gradients what reaches the weights is noise / B: its scale is m C, and so is the charge's m."""

    class Silent(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=1.0)
            self.big = nn.Parameter(torch.zeros(20_000))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return 0.0 * self.loss(*batch) + 0.0 * self.big.sum()

    module = Silent()
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=2.0, max_grad_norm=0.5, mechanism=mechanism)
    trainer(callback, max_steps=3).fit(module, loader(batch_size=8))
    noise = module.big.detach() * 8 / math.sqrt(3)
    expected = 2.0 * 0.5 * (1.0 if mechanism == "gaussian" else math.sqrt(2))
    assert noise.std() == pytest.approx(expected, rel=0.03)
    assert callback.scale == 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_is_in_the_path(engine: str) -> None:
    """lr 1, no noise, full batch: one step moves the weights by at most C, and by less than without clipping."""
    moves = []
    for callback in (
        Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=1e-3, engine=engine),
        no_privacy(engine=engine),
    ):
        torch.manual_seed(0)
        module = Classifier(lr=1.0)
        before = flat(module).clone()
        trainer(callback, max_steps=1).fit(module, loader(batch_size=64))
        moves.append((flat(module) - before).norm().item())
    assert 0 < moves[0] <= 1e-3 * (1 + 1e-4) < moves[1]


def test_ranks_with_unlike_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says that it has another data set: the sampling rate would be another on each rank."""
    run = trainer(Lap2Privacy(eps=1.0), max_epochs=1)

    def from_rank_0(value: Any, src: int = 0) -> Any:
        return dataclasses.replace(value, num_examples=128) if isinstance(value, DataFacts) else value

    monkeypatch.setattr(run.strategy, "broadcast", from_rank_0)
    with pytest.raises(
        ValueError, match="train on different data .*num_examples=64.*num_examples=128.*same whole data set"
    ):
        run.fit(Classifier(), loader())
