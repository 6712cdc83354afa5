"""Settings that are refused, each by a message that names it and what to use instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lap2.callback import checks
from tests.helpers import LIGHTNING_WARNINGS, Namespace, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS


def refused(
    namespace: Namespace, words: str, *callbacks: Any, module: Any = None, data: Any = None, **options: Any
) -> None:
    """A fit with these settings ends with a ValueError or TypeError of ours before the first step."""
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, *callbacks, **{"max_epochs": 1, **options})
    if module is None:
        module = classifier(namespace.pl)
    if data is None and "train_dataloader" not in vars(module):
        data = loader(32, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=words):
        trainer.fit(module, data)
    assert trainer.global_step == lap2.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not {"training_step", "process_dataloader"} & vars(trainer.strategy).keys(), "patches were left"


# -- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_launchers_that_lose_the_ledger(namespace: Namespace, strategy: str) -> None:
    trainer = quiet_trainer(namespace.pl, namespace.lap2(eps=2.0), strategy=strategy, devices=2)
    method = "fork" if strategy == "ddp_notebook" else strategy.removeprefix("ddp_")
    with pytest.raises(ValueError, match=f"strategy 'ddp_{method}'.*ledger would be lost.*strategy='ddp'"):
        checks.check_trainer(trainer, namespace.pl)


def test_ddp_itself_is_accepted(namespace: Namespace) -> None:
    trainer = quiet_trainer(namespace.pl, namespace.lap2(eps=2.0), strategy="ddp", devices=2)
    checks.check_trainer(trainer, namespace.pl)


SHARDED = r"ModelParallelStrategy\(data_parallel_size=\.\.\., tensor_parallel_size=1\) with fully_shard"


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy"])
def test_sharded_strategies(namespace: Namespace, name: str) -> None:
    """Their packages and devices are not here: an object of a class of that name stands for them."""
    strategy = type(name, (), {})()
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", overfit_batches=0.0, callbacks=[])
    with pytest.raises(ValueError, match=f"{name}, which Lap2Privacy does not support; use strategy='ddp'.*{SHARDED}"):
        checks.check_trainer(trainer, namespace.pl)


def test_real_fsdp_strategy(namespace: Namespace) -> None:
    strategy = namespace.pl.strategies.FSDPStrategy()
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", overfit_batches=0.0, callbacks=[])
    with pytest.raises(ValueError, match=f"FSDPStrategy.*{SHARDED}"):
        checks.check_trainer(trainer, namespace.pl)


@pytest.mark.parametrize("size", [1, 2])
def test_model_parallel_strategy_without_tensor_parallelism(namespace: Namespace, size: int) -> None:
    """Sizes are known once processes have met; a mesh of the same sizes stands for it."""
    strategy = namespace.pl.strategies.ModelParallelStrategy()
    strategy._device_mesh = {"tensor_parallel": SimpleNamespace(size=lambda: size)}
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", overfit_batches=0.0, callbacks=[])
    if size == 1:
        checks.check_trainer(trainer, namespace.pl)
        return
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=2.*{SHARDED}"):
        checks.check_trainer(trainer, namespace.pl)


def test_subclass_of_ddp(namespace: Namespace) -> None:
    """Nothing is known of what it overrides."""

    class Own(namespace.pl.strategies.DDPStrategy):  # type: ignore[name-defined, misc]
        pass

    trainer = SimpleNamespace(strategy=Own(), precision="32-true", overfit_batches=0.0, callbacks=[])
    with pytest.raises(ValueError, match="gave Own"):
        checks.check_trainer(trainer, namespace.pl)


# -- neighbouring callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("GradientAccumulationScheduler", {"scheduling": {0: 1, 4: 2}}, "fixed accumulate_grad_batches"),
        ("LearningRateFinder", {}, "outside the ledger"),
        ("BatchSizeFinder", {}, "outside the ledger"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, "WeightAveraging"),
    ],
)
def test_callbacks_that_train_on_their_own(
    namespace: Namespace, name: str, arguments: dict[str, Any], reason: str
) -> None:
    callback = getattr(namespace.pl.callbacks, name)(**arguments)
    module = classifier(namespace.pl)
    module.train_dataloader, module.batch_size = lambda: loader(32, 4), 4  # where BatchSizeFinder wants them
    refused(namespace, f"callback {name} is not supported.*{reason}", callback, module=module)


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_tuner_searches(namespace: Namespace, search: str) -> None:
    lap2 = namespace.lap2(eps=2.0)
    trainer = quiet_trainer(namespace.pl, lap2, max_epochs=1)
    module = classifier(namespace.pl)
    module.train_dataloader, module.batch_size = lambda: loader(32, 4), 4
    with pytest.raises(ValueError, match="trains outside the ledger"):
        getattr(namespace.pl.tuner.Tuner(trainer), search)(module)
    assert lap2.steps == 0


def test_two_privacy_callbacks(namespace: Namespace) -> None:
    # with equal state keys Lightning refuses them itself
    other = type("Another", (namespace.lap2,), {"state_key": "another"})(eps=1.0)
    refused(namespace, "2 Lap2Privacy callbacks", other)


def test_harmless_callbacks_are_accepted(namespace: Namespace) -> None:
    callbacks = namespace.pl.callbacks
    lap2 = namespace.lap2(eps=2.0)
    others = [callbacks.Timer(), callbacks.ModelSummary(), callbacks.LambdaCallback()]
    if hasattr(callbacks, "WeightAveraging"):  # since Lightning 2.6
        others.append(callbacks.WeightAveraging())
    trainer = quiet_trainer(namespace.pl, lap2, *others, max_epochs=1)
    trainer.fit(classifier(namespace.pl), loader(32, 4))
    assert lap2.steps == 8


# -- module, optimizer, data ------------------------------------------------------------------------------------------


def test_manual_optimization(namespace: Namespace) -> None:
    module = classifier(namespace.pl)
    module.automatic_optimization = False
    refused(namespace, "automatic_optimization is False.*use automatic optimization", module=module)


def test_training_step_that_draws_its_own_batches(namespace: Namespace) -> None:
    module = classifier(namespace.pl)
    module.training_step = lambda dataloader_iter: None
    refused(namespace, r"dataloader_iter.*take \(batch, batch_idx\)", module=module)


def test_lbfgs(namespace: Namespace) -> None:
    module = classifier(namespace.pl)
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    refused(namespace, "LBFGS calls its closure several times.*SGD", module=module)


def test_sparse_adam(namespace: Namespace) -> None:
    module = classifier(namespace.pl)
    module.configure_optimizers = lambda: torch.optim.SparseAdam(module.parameters())
    refused(namespace, "SparseAdam takes sparse gradients only.*use Adam", module=module)


def test_overfit_batches(namespace: Namespace) -> None:
    refused(namespace, r"overfit_batches=2\).*Subset", overfit_batches=2)


def test_fraction_of_an_epoch_without_a_batch(namespace: Namespace) -> None:
    refused(namespace, r"limit_train_batches=0.01\) leaves none of the 8 batches", limit_train_batches=0.01)


def test_more_accumulated_batches_than_data(namespace: Namespace) -> None:
    refused(namespace, "accumulate_grad_batches=50.*sampling rate above 1", accumulate_grad_batches=50)


@pytest.mark.parametrize("sizes", [(32, 32), (32, 24)])
@pytest.mark.parametrize("kind", [list, dict])
def test_several_loaders(namespace: Namespace, kind: type, sizes: tuple[int, int]) -> None:
    loaders = [loader(size, 4) for size in sizes]
    data = loaders if kind is list else dict(zip("ab", loaders, strict=True))
    refused(namespace, "2 train loaders.*ConcatDataset", data=data)


def test_loader_without_batches(namespace: Namespace) -> None:
    refused(namespace, "batch_size=None", data=DataLoader(loader(32, 4).dataset, batch_size=None))


def test_module_without_trainable_parameters(namespace: Namespace) -> None:
    module = classifier(namespace.pl)
    module.requires_grad_(False)
    refused(namespace, "no trainable parameters", module=module)


def test_closure_called_twice(namespace: Namespace) -> None:
    """Found when it happens: the example would enter one release twice."""
    module = classifier(namespace.pl)

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)

    module.optimizer_step = optimizer_step
    trainer = quiet_trainer(namespace.pl, namespace.lap2(eps=2.0), max_epochs=1)
    with pytest.raises(RuntimeError, match="ran twice for the same batch.*calls the closure once"):
        trainer.fit(module, loader(32, 4))
