"""Out of a step goes the noised gradient, and nothing else that decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_lap2 import Lap2Privacy
from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError
from tests.helpers import LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.filterwarnings("ignore:.*num_workers.*")]


def fit(module: Any, *callbacks: Any, engine: str = "auto", epochs: int = 2, **options: Any) -> Any:
    """Four batches of 8 an epoch under a large noise; the callback that has trained ``module``."""
    privacy = Lap2Privacy(eps="inf", noise_multiplier=1.0, delta=1e-5, engine=engine)
    trainer = quiet_trainer(pl, privacy, *callbacks, max_epochs=epochs, **options)
    trainer.fit(module, loader(32, 8))
    return privacy


# -- the optimizer's closure ------------------------------------------------------------------------------------------


class Stepping(torch.optim.SGD):
    """SGD whose step first hands the closure's value to ``use``."""

    use: Callable[[Any], Any]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        type(self).use(loss)
        super().step()
        return loss


USES = {
    "polyak": lambda loss: loss / 3.0,
    "item": lambda loss: loss.item(),
    "float": float,
    "compare": lambda loss: loss > 1.0,
    "truth": lambda loss: 0 if loss else 1,
    "isnan": torch.isnan,
    "stack": lambda loss: torch.stack([loss]),
    "numpy": lambda loss: __import__("numpy").asarray(loss, dtype=float),
}


@pytest.mark.parametrize("use", USES)
def test_an_optimizer_that_uses_the_loss_is_refused_by_name(use: str) -> None:
    module = classifier(pl)
    kind = type("Polyak", (Stepping,), {"use": staticmethod(USES[use])})
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.1)
    with pytest.raises(UnsupportedSettingError, match="the optimizer Polyak .*uses the loss that its closure returns"):
        fit(module)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_that_returns_the_loss_trains(kind: Any) -> None:
    module = classifier(pl)
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.1)
    assert fit(module).steps == 8


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_override_that_looks_at_the_closures_value_is_refused(accumulate: int) -> None:
    module = classifier(pl)

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if not torch.isnan(optimizer_closure()):
            optimizer.step()

    module.optimizer_step = optimizer_step
    with pytest.raises(UnsupportedSettingError, match="uses the loss that its closure returns"):
        fit(module, accumulate_grad_batches=accumulate)


# -- hooks of parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_hooks_of_parameters_are_refused_by_name(kind: str, engine: str) -> None:
    module, seen = classifier(pl), []
    getattr(module.layer.weight, kind)(lambda gradient: seen.append(gradient))
    with pytest.raises(UnsupportedSettingError, match=rf"the parameter layer.weight has a hook \({kind}"):
        fit(module, engine=engine)
    assert not seen


def test_hooks_that_come_later_are_refused_and_hooks_that_were_removed_are_not() -> None:
    module = classifier(pl)
    module.layer.weight.register_hook(lambda gradient: None).remove()
    assert fit(module).steps == 8

    def on_train_batch_end(*_: Any) -> None:
        module.layer.bias.register_hook(lambda gradient: None)

    module.on_train_batch_end = on_train_batch_end
    with pytest.raises(UnsupportedSettingError, match="the parameter layer.bias has a hook"):
        fit(module)


def test_the_remedy_shows_the_private_gradient() -> None:
    module, seen = classifier(pl, unused=4), []
    module.on_before_optimizer_step = lambda optimizer: seen.append(module.unused.grad.clone())
    fit(module, epochs=1)
    # of no loss: noise alone, of which one value in a hundred or two is 0 on the grid
    assert len(seen) == 4 and all(int(gradient.count_nonzero()) >= 2 for gradient in seen)


# -- draws that were fetched ------------------------------------------------------------------------------------------


class Ends(pl.Callback):
    """Whether the epoch's end was reached: something there would depend on a draw that was left out."""

    def __init__(self) -> None:
        self.reached = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.reached = True


def test_a_batch_that_is_skipped_is_refused_before_anything_depends_on_it() -> None:
    module, ends = classifier(pl), Ends()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    privacy = Lap2Privacy(eps="inf", noise_multiplier=1.0)
    trainer = quiet_trainer(pl, ends, privacy, max_epochs=1)
    with pytest.raises(UnsupportedSettingError, match="on_train_batch_start returned -1"):
        trainer.fit(module, loader(32, 8))
    assert not ends.reached and privacy.steps == 2


def test_a_draw_that_the_optimizer_does_not_step_on_is_refused_at_the_fits_last_batch_too() -> None:
    module = classifier(pl)
    module.optimizer_step = lambda epoch, batch_idx, optimizer, optimizer_closure: optimizer_closure()
    with pytest.raises(UnsupportedSettingError, match="a draw was never released"):
        fit(module, limit_train_batches=1, epochs=1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_error_that_the_users_code_swallows_ends_the_fit(accumulate: int) -> None:
    steps = []

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        steps.append(1)
        if len(steps) > 7:
            raise ArithmeticError("one example's loss")
        return module.loss(batch)

    module = classifier(pl, step=step)
    plain = type(module).optimizer_step

    def optimizer_step(*args: Any) -> None:
        try:
            plain(module, *args)
        except ArithmeticError:
            args[2].step(closure=lambda: None)

    module.optimizer_step = optimizer_step
    with pytest.raises(ArithmeticError, match="one example's loss"):
        fit(module, engine="loop", accumulate_grad_batches=accumulate)


def test_a_stop_waits_for_the_end_of_the_draw() -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 2

    module = classifier(pl)
    privacy = Lap2Privacy(eps="inf", noise_multiplier=1.0)
    trainer = quiet_trainer(pl, privacy, Stop(), max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, loader(64, 8))
    assert privacy.steps == trainer.global_step == 2  # batches 0 to 3, not 0 to 2
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 4


# -- what the optimizer steps on --------------------------------------------------------------------------------------


def test_a_parameter_that_is_not_the_modules_is_refused() -> None:
    module = classifier(pl)
    module.extra = [nn.Parameter(torch.zeros(2))]
    module.configure_optimizers = lambda: torch.optim.SGD([*module.parameters(), *module.extra], lr=0.1)
    with pytest.raises(
        UnsupportedSettingError, match=r"a parameter of shape \[2\] .*param_groups\[0\]\['params'\]\[2\]"
    ):
        fit(module)
    module = classifier(pl)
    module.extra = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    assert fit(module).steps == 8


@pytest.mark.parametrize("name", ["backward", "manual_backward"])
def test_an_override_of_backward_is_refused_by_name(name: str) -> None:
    module = classifier(pl)
    kind = type("Own", (type(module),), {name: lambda self, loss, *args, **kwargs: (2 * loss).backward()})
    with pytest.raises(UnsupportedSettingError, match=f"Own overrides {name}"):
        fit(kind())


def test_pruning_while_training_is_refused_and_pruning_before_is_not() -> None:
    with pytest.raises(UnsupportedSettingError, match="ModelPruning is not supported.*prune.remove"):
        fit(classifier(pl), pl.callbacks.ModelPruning("l1_unstructured", amount=0.5))
    module = classifier(pl)
    prune.l1_unstructured(module.layer, "weight", amount=0.5)
    prune.remove(module.layer, "weight")
    assert fit(module).steps == 8


@pytest.mark.parametrize("name", ["privacy/loss", "privacy/epsilon"])
@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start"])
def test_a_metric_with_the_ledgers_prefix_is_refused(name: str, where: str) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = module.loss(batch)
        if where == "training_step":
            module.log(name, loss)
        return loss

    module = classifier(pl, step=step)
    if where != "training_step":
        module.on_train_batch_start = lambda batch, batch_idx: module.log(name, 1.0)
    with pytest.raises(UnsupportedSettingError, match=f"a metric is logged as '{name}'"):
        fit(module)


@pytest.mark.parametrize("name", ["callback_metrics", "logged_metrics", "progress_bar_metrics"])
def test_metrics_of_earlier_batches_cannot_be_read_in_a_step(name: str) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = module.loss(batch)
        module.log("train", loss)
        return loss / getattr(module.trainer, name).get("train", 1.0)

    with pytest.raises(UnsupportedModelError, match="training_step reads the trainer's metrics"):
        fit(classifier(pl, step=step))


@pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode")
def test_spectral_norm_is_refused_by_name_and_its_remedy_iterates_between_steps() -> None:
    module = classifier(pl)
    parametrizations.spectral_norm(module.layer)
    with pytest.raises(UnsupportedModelError, match="_SpectralNorm 'layer.parametrizations.weight.0' takes a step"):
        fit(module)
    norm = module.layer.parametrizations.weight.eval()

    def on_train_batch_end(*_: Any) -> None:
        norm.train()
        module.layer.weight  # noqa: B018 - a step of the power iteration
        norm.eval()

    module.on_train_batch_end = on_train_batch_end
    before = norm[0]._u.clone()
    assert fit(module).steps == 8
    assert not torch.equal(norm[0]._u, before)
    assert torch.linalg.matrix_norm(module.layer.weight.detach(), 2) < 1.2


def test_messages_do_not_tell_how_many_were_drawn() -> None:
    """An error that ends training says what is wrong, not how many records there were."""

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        if module.global_step > 1:
            raise UnsupportedModelError(f"rows: {batch[0].shape}")
        return module.loss(batch)

    with pytest.raises(UnsupportedModelError, match=r"rows: torch.Size\(\[1, 3\]\)$"):
        fit(classifier(pl, step=step))
