"""``engine="auto"``: ghost where its trial accepts the model, else vmap, in words, and never another guarantee."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_lap2.callback.enginechoice import choose_engine
from lightning_lap2.callback.selfcheck import Checked
from lightning_lap2.gradients import UnsupportedModelError
from tests.helpers import LIGHTNING_WARNINGS, Namespace, classifier, loader, quiet_trainer, weights

pytestmark = LIGHTNING_WARNINGS


def fit(step: Any = None, *, model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    namespace = Namespace.named("lightning.pytorch")
    callback = namespace.lap2(eps=2.0, noise_seed=1, **options)
    module = model or classifier(namespace.pl, step=step)
    trainer = quiet_trainer(namespace.pl, callback, max_epochs=1)
    trainer.fit(module, loader(32, 4))
    return callback, trainer, module


def test_ghost_where_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        callback, _, _ = fit(engine="auto")
    assert callback.report().engine == "ghost"
    assert "engine 'auto'" in caplog.text
    assert "engine='auto' chose 'ghost'" in caplog.text


def test_the_same_run_as_with_the_chosen_engine() -> None:
    results = []
    for engine in ("auto", "ghost"):
        torch.manual_seed(0)
        callback, _, module = fit(engine=engine)
        results.append(weights(module))
        assert callback.report().engine == "ghost"
    assert torch.equal(*results)


def _penalised(module: Any, batch: Any, batch_idx: int) -> Any:
    """Ghost cannot share out a penalty; vmap can."""
    return module.loss(batch) + 0.01 * sum(p.square().sum() for p in module.parameters())


def test_vmap_where_ghost_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        callback, _, _ = fit(_penalised, engine="auto")
    assert callback.report().engine == "vmap"
    assert "engine='auto' chose 'vmap'; 'ghost' was passed over: The loss uses parameter" in caplog.text


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"mechanism": "laplace_l1"}], ids=str)
def test_vmap_at_once_where_a_setting_is_for_vmap(options: dict[str, Any]) -> None:
    callback, _, _ = fit(engine="auto", **options)
    assert callback.report().engine == "vmap"


def test_what_both_refuse_is_refused() -> None:
    def mixing(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = module.loss(batch)
        return loss * loss.detach().exp() + batch[0].mean() * loss

    with pytest.raises(UnsupportedModelError):
        fit(mixing, engine="auto")


def test_dropout_is_compared_too() -> None:
    namespace = Namespace.named("lightning.pytorch")

    class Dropping(namespace.pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    x, _ = next(iter(loader(32, 4)))
    module = Dropping()
    module.net[0] = nn.Linear(x.shape[1], 16)
    callback, _, _ = fit(model=module, engine="auto")
    assert callback.report().engine == "ghost"


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_all_ranks_take_the_same_engine() -> None:
    """The order of questions is the same on every rank, whatever this rank's own trial said."""
    asked: list[bool] = []

    def agree(mine: bool) -> bool:
        asked.append(mine)
        return False

    choice = choose_engine(
        ("ghost", "vmap"),
        _Named,
        lambda engine: Checked(compared=True),
        agree,  # type: ignore[arg-type]
    )
    assert choice.engine.name == "vmap"
    assert asked == [True]
    assert choice.passed_over == ("'ghost' was passed over: another rank refused",)


def test_an_engine_that_was_not_compared_is_passed_over() -> None:
    choice = choose_engine(("ghost", "vmap"), _Named, lambda engine: Checked(), lambda mine: mine)  # type: ignore[arg-type]
    assert choice.engine.name == "vmap"
    assert "could not be compared" in choice.passed_over[0]


def test_an_iterable_data_set_has_nothing_to_try_on(tmp_path: Path) -> None:
    namespace = Namespace.named("lightning.pytorch")
    records = [(x, y) for x, y in loader(8, 1).dataset]

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(records)

    callback = namespace.lap2(eps=50.0, sampling="none", engine="auto", noise_seed=1)
    trainer = quiet_trainer(namespace.pl, callback, max_steps=2)
    trainer.fit(classifier(namespace.pl), torch.utils.data.DataLoader(Stream(), batch_size=4))
    assert callback.report().engine == "vmap"
