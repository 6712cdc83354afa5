"""Everyday training_steps; tied, frozen and unused parameters; skipped steps; refusals in a real fit."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy
from tests.scenarios.common import Classifier, data, flat, loader, no_privacy, trainer

ENGINES = ["vmap", "loop", "ghost"]


class Everyday(Classifier):
    """Every self.log form, metrics as objects and by value, a nested batch, a dict returned."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.both = torchmetrics.MetricCollection(
            {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()}, prefix="many_"
        )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y, extra = batch
        logits = self.net(x + 0 * extra["offset"])
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"double": 2 * loss, "number": 3.0})
        self.log("sized", loss, batch_size=len(x))
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.both.update(extra["offset"].squeeze(1))
        self.log_dict(self.both)
        return {"loss": loss, "logits": logits}


def nested(n: int = 64) -> DataLoader:
    x, y = data(n).tensors
    records = [(x[i], y[i], {"offset": torch.tensor([float(i)])}) for i in range(n)]
    return DataLoader(records, batch_size=n)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_scenario_10_weights_and_logged_values_are_plain_lightnings(engine: str) -> None:
    def train(callbacks: list[L.Callback]) -> tuple[Tensor, dict[str, float], list[Any]]:
        torch.manual_seed(0)
        module, outputs = Everyday(), []

        class Watch(L.Callback):
            def on_train_batch_end(self, t: Any, m: Any, output: Any, batch: Any, batch_idx: int) -> None:
                outputs.append(output)

        run = trainer([*callbacks, Watch()], max_epochs=3)
        run.fit(module, nested())
        return flat(module), {k: float(v) for k, v in run.callback_metrics.items()}, outputs

    plain, plain_logged, plain_outputs = train([])
    private, logged, outputs = train([no_privacy(engine=engine)])
    assert torch.allclose(plain, private, atol=1e-6, rtol=0)
    assert math.isinf(logged.pop("privacy/epsilon"))
    assert logged == pytest.approx(plain_logged, rel=1e-4, abs=1e-5)
    assert outputs[0].keys() == plain_outputs[0].keys()
    # q = 1 keeps every record but not their order
    sorted_logits = [o["logits"].sort(dim=0).values for o in (outputs[-1], plain_outputs[-1])]
    assert torch.allclose(*sorted_logits, atol=1e-5)


def test_scenario_10_nothing_stays_patched() -> None:
    module, callback = Everyday(), Lap2Privacy(eps=1.0)
    run = trainer(callback, max_epochs=1)
    before = {k: set(vars(o)) for k, o in (("module", module), ("strategy", run.strategy), ("loop", run.fit_loop))}
    parameters = dict(module.named_parameters())
    run.fit(module, nested())
    after = {k: set(vars(o)) for k, o in (("module", module), ("strategy", run.strategy), ("loop", run.fit_loop))}
    assert "log" not in vars(module)
    patched = {"process_dataloader", "setup_data", "training_step", "on_run_start", "log", "log_dict"}
    assert not patched & (after["module"] | after["strategy"] | after["loop"]) - set().union(*before.values())
    assert "on_run_start" not in vars(run.fit_loop.epoch_loop)
    assert all(p is parameters[name] for name, p in module.named_parameters())


def test_scenario_10_patches_are_undone_after_an_exception() -> None:
    class Fails(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("user bug")

    module, callback = Fails(), Lap2Privacy(eps=1.0)
    run = trainer(callback, max_epochs=1)
    with pytest.raises(KeyError, match="user bug"):
        run.fit(module, loader())
    for owner in (run.strategy, run.fit_loop, run.fit_loop.epoch_loop, module):
        assert not {"process_dataloader", "setup_data", "training_step", "on_run_start", "log"} & set(vars(owner))
    assert callback.steps == 1, "the release that was made stays charged"


class Tied(L.LightningModule):
    """An embedding tied to the output head, a frozen layer, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.zeros(500))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        hidden = self.frozen(self.embedding(tokens))
        logits = self.head(hidden[:, :-1])
        return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_scenario_11_tied_frozen_unused(engine: str) -> None:
    tokens = torch.randint(0, 10, (40, 5), generator=torch.Generator().manual_seed(0))
    module = Tied()
    keys = list(module.state_dict())
    frozen = module.frozen.weight.clone()
    callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1.0, engine=engine)
    trainer(callback, max_steps=20).fit(module, DataLoader(TensorDataset(tokens), batch_size=10))
    assert callback.dimension == 60 + 500, "each trainable scalar once"
    assert torch.equal(frozen, module.frozen.weight)
    assert module.head.weight is module.embedding.weight
    assert list(module.state_dict()) == keys
    # the unused parameter is noised at every step like all others: std = lr sqrt(2 * 20) b / B
    assert module.unused.std().item() == pytest.approx(0.1 * math.sqrt(40) / 10, rel=0.15)


def test_scenario_11_unfreezing_changes_n_and_each_step_is_charged_with_its_own() -> None:
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.1)

    class Partly(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    callback, module = Lap2Privacy(eps=3.0), Partly()
    head = sum(p.numel() for p in module.net[2].parameters())
    every = sum(p.numel() for p in module.parameters())
    trainer([callback, Unfreeze()], max_epochs=3).fit(module, loader())
    charged = {entry["dimension"]: entry["steps"] for entry in callback.accountant.state_dict()["releases"]}
    assert charged == {head: 8, every: 16}
    assert callback.dimension == every
    assert callback.epsilon <= 3.0


@pytest.mark.parametrize("engine", ENGINES)
def test_scenario_12_step_that_returns_none_is_released_and_charged(engine: str) -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx % 2 else self.loss(*batch)

    module = Skips()
    callback = Lap2Privacy(eps=2.0, engine=engine)
    moved: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.before = flat(module).clone()

        def on_train_batch_end(self, *_: Any) -> None:
            moved.append((flat(module) - self.before).norm().item())

    trainer([callback, Watch()], max_epochs=2).fit(module, loader())
    assert callback.steps == 16 and min(moved) > 0


def test_scenario_13_delta_not_below_one_over_n_is_refused() -> None:
    with pytest.raises(ValueError, match="delta=0.02 is not below 1/N for N=64"):
        trainer(Lap2Privacy(eps=1.0, delta=0.02), max_epochs=1).fit(Classifier(), loader())


def test_mixup_in_a_transfer_hook_meets_one_record_at_a_time_and_the_report_says_so() -> None:
    class Mixup(Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            share = torch.distributions.Beta(1.0, 1.0).sample()
            return share * x + (1 - share) * x[torch.randperm(len(x))], y

    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(Mixup(), loader())
    assert any("not the mean of its examples' gradients" in text for text in callback.report().caveats)


def test_augmentation_in_a_transfer_hook_is_fine() -> None:
    class Jitter(Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x + 0.1 * torch.randn_like(x), y

    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(Jitter(), loader())
    assert callback.steps == 8


def test_self_check_reaches_no_logger(tmp_path: Any) -> None:
    """Steps on records that were not drawn (the trial) must not write to a logger, not even directly."""
    seen: list[str] = []

    class Direct(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.experiment.log_metrics({"seen": 1.0})  # type: ignore[union-attr]
            return self.loss(*batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append("training began")

    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    log = logger.experiment.log_metrics

    def spy(metrics: dict[str, float], step: int | None = None) -> None:
        if "seen" in metrics:
            assert seen, "logged before the first batch"
        log(metrics, step)

    logger.experiment.log_metrics = spy  # type: ignore[method-assign]
    trainer(Lap2Privacy(eps=1.0, engine="loop"), max_epochs=1, logger=logger).fit(Direct(), loader())
    assert len(seen) == 8


class Language(Tied):
    """Next-token prediction in which padding (token 0) is not counted; ``by_hand`` divides by the count itself."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        logits = self.head(self.frozen(self.embedding(ids[:, :-1]))).transpose(1, 2)
        if not self.by_hand:
            return nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
        counted = (ids[:, 1:] != 0).float()
        return (losses * counted).sum() / counted.sum()


def sentences() -> DataLoader:
    """One in eight is short; all are padded to one length."""
    tokens = torch.randint(1, 10, (64, 12), generator=torch.Generator().manual_seed(0))
    tokens[5::8, 4:] = 0
    return DataLoader(TensorDataset(tokens), batch_size=8)


def test_token_weighted_loss_is_found_though_only_some_records_differ() -> None:
    """A mean over tokens weights records unequally: a record's share changes with its batch mates. Every engine takes
    each record's own mean, and the report says so."""
    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(Language(by_hand=True), sentences())
    assert any("not the mean of its examples' gradients" in text for text in callback.report().caveats)


def test_ghost_takes_each_records_own_mean_where_the_loss_is_a_cross_entropy() -> None:
    weights = []
    for engine in ("ghost", "vmap"):
        torch.manual_seed(0)
        module = Language(by_hand=False)
        callback = Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=0.1, noise_seed=1, engine=engine)
        trainer(callback, max_epochs=2).fit(module, sentences())
        weights.append(flat(module))
        assert any("not the mean of its examples' gradients" in text for text in callback.report().caveats)
    assert torch.allclose(*weights, atol=1e-6)
