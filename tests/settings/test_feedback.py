"""What watches the training data without noise is refused, unless opted in, and then named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import LIGHTNING_WARNINGS, Namespace, classifier, loader, quiet_trainer

pytestmark = [
    *LIGHTNING_WARNINGS,
    # Lightning: a ModelCheckpoint or scheduler that asks for a metric before it was logged
    pytest.mark.filterwarnings("ignore:.*could not find the monitored key.*"),
]


def both_steps(module: Any, batch: Any, batch_idx: int) -> Any:
    loss = module.loss(batch)
    module.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def silent_step(module: Any, batch: Any, batch_idx: int) -> Any:
    return module.loss(batch)


Watcher = Callable[[Namespace, str, Any], Any]


def early_stopping(namespace: Namespace, monitor: str, module: Any) -> Any:
    return namespace.pl.callbacks.EarlyStopping(monitor, check_on_train_epoch_end=True)


def model_checkpoint(namespace: Namespace, monitor: str, module: Any) -> Any:
    return namespace.pl.callbacks.ModelCheckpoint(monitor=monitor, save_on_train_epoch_end=True)


def reduce_on_plateau(namespace: Namespace, monitor: str, module: Any) -> None:
    def configure() -> dict[str, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}

    module.configure_optimizers = configure


WATCHERS: dict[str, Watcher] = {
    "EarlyStopping": early_stopping,
    "ModelCheckpoint": model_checkpoint,
    "ReduceLROnPlateau": reduce_on_plateau,
}


def fit(
    namespace: Namespace,
    tmp_path: Any,
    watcher: str,
    monitor: str,
    module: Any,
    *,
    epochs: int = 2,
    validation: bool = False,
    **arguments: Any,
) -> Any:
    callback = namespace.lap2(eps=2.0, **arguments)
    watching = WATCHERS[watcher](namespace, monitor, module)
    others = [] if watching is None else [watching]
    trainer = quiet_trainer(
        namespace.pl, callback, *others, max_epochs=epochs, default_root_dir=tmp_path, num_sanity_val_steps=0
    )
    trainer.fit(module, loader(32, 4), loader(8, 4) if validation else None)
    return callback


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("monitor", ["train_loss", "train_loss_step", "train_loss_epoch"])
def test_training_loss_is_refused_before_the_first_step(
    namespace: Namespace, tmp_path: Any, watcher: str, monitor: str
) -> None:
    module = classifier(namespace.pl, step=both_steps)
    with pytest.raises(ValueError, match=rf"{watcher} watches '{monitor}'.*'privacy/epsilon'.*allow_feedback=True"):
        fit(namespace, tmp_path, watcher, monitor, module)
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("watcher", WATCHERS)
def test_opt_in_is_named_in_the_report(namespace: Namespace, tmp_path: Any, watcher: str) -> None:
    module = classifier(namespace.pl, step=both_steps)
    callback = fit(namespace, tmp_path, watcher, "train_loss_epoch", module, allow_feedback=True)
    assert callback.steps == 16
    sentence = f"{watcher} watches 'train_loss_epoch'"
    assert any(sentence in caveat for caveat in callback.report().caveats)
    assert sentence in str(callback.report())


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("monitor", ["val_loss", "privacy/epsilon"])
def test_other_values_may_be_watched(namespace: Namespace, tmp_path: Any, watcher: str, monitor: str) -> None:
    callback = fit(namespace, tmp_path, watcher, monitor, classifier(namespace.pl), validation=True)
    assert callback.steps == 16
    assert not any("watches" in caveat for caveat in callback.report().caveats)


@pytest.mark.parametrize("watcher", WATCHERS)
def test_metric_logged_at_the_end_of_an_epoch_is_refused_before_the_next(
    namespace: Namespace, tmp_path: Any, watcher: str
) -> None:
    """training_step does not log it, so nothing is known before."""
    module = classifier(namespace.pl, step=silent_step)
    module.on_train_epoch_end = lambda: module.log("epoch_accuracy", 0.5)
    with pytest.raises(ValueError, match=f"{watcher} watches 'epoch_accuracy'"):
        fit(namespace, tmp_path, watcher, "epoch_accuracy", module)
    assert module.trainer.global_step == 8


@pytest.mark.parametrize("watcher", WATCHERS)
def test_metric_logged_at_the_very_end_is_in_the_report(namespace: Namespace, tmp_path: Any, watcher: str) -> None:
    """Training is over: a refusal would come too late, silence would be wrong."""
    module = classifier(namespace.pl, step=silent_step)
    module.on_train_epoch_end = lambda: module.log("epoch_accuracy", 0.5)
    callback = fit(namespace, tmp_path, watcher, "epoch_accuracy", module, epochs=1)
    assert callback.steps == 8
    assert any(f"{watcher} watches 'epoch_accuracy'" in caveat for caveat in callback.report().caveats)


def test_metric_logged_by_another_hook_of_training_is_seen(namespace: Namespace, tmp_path: Any) -> None:
    module = classifier(namespace.pl, step=silent_step)
    module.on_train_batch_end = lambda *_: module.log("hook_loss", 0.5)
    with pytest.raises(ValueError, match="EarlyStopping watches 'hook_loss'"):
        fit(namespace, tmp_path, "EarlyStopping", "hook_loss", module)
    assert module.trainer.global_step <= 2
