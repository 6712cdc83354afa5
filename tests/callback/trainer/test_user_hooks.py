"""What users' hooks make of the batch does not come back into a step; what they make of weights does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lap2 import Lap2Privacy
from lightning_lap2.errors import IsolationError, UnsupportedSettingError
from tests.helpers import LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.filterwarnings("ignore:.*num_workers.*")]
ENGINES = ["ghost", "vmap", "loop"]


def module_with(step: Callable[..., Tensor], **hooks: Callable[..., Any]) -> Any:
    """A classifier with state, whose step adds ``step(module, logits, y)`` to its loss."""

    def training_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = module.layer(x)
        return F.cross_entropy(logits, y) + step(module, logits, y)

    module = classifier(pl, step=training_step)
    module.register_buffer("centres", torch.zeros(2, 2))
    module.register_buffer("queue", torch.zeros(3, 2))
    module.teacher = copy.deepcopy(module.layer).requires_grad_(False)
    module.bank = []
    module.scale = 1.0
    module.history = []
    kind = type("Hooked", (type(module),), hooks)
    module.__class__ = kind
    return module


def fit(module: Any, *callbacks: Any, engine: str = "auto", data: Any = None, **options: Any) -> Lap2Privacy:
    privacy = Lap2Privacy(eps="inf", noise_multiplier=1.0, engine=engine, **options)
    quiet_trainer(pl, privacy, *callbacks, max_epochs=2).fit(module, data or loader(32, 8))
    return privacy


def centre_loss(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    return ((logits - module.centres[y]) ** 2).mean()


def teacher_loss(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    return ((module.teacher.weight - module.layer.weight) ** 2).sum()


def nothing(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    return 0 * logits.sum()


# -- from the batch ---------------------------------------------------------------------------------------------------


def _centres(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    with torch.no_grad():
        logits = module.layer(x)
        for c in range(2):
            if bool((y == c).any()):
                module.centres[c] = 0.9 * module.centres[c] + 0.1 * logits[y == c].mean(0)


FROM_THE_BATCH: dict[str, tuple[str, Callable[..., Any]]] = {
    "in place": ("self.centres", _centres),
    "assigned": ("self.centres", lambda m, out, batch, i: setattr(m, "centres", batch[0][:2, :2].clone())),
    ".data": ("self.centres", lambda m, out, batch, i: m.centres.data.copy_(batch[0][:2, :2])),
    "numpy": ("self.centres", lambda m, out, batch, i: m.centres.numpy().__setitem__(0, batch[0][0, :2].numpy())),
    "outputs": ("self.centres", lambda m, out, batch, i: m.centres.add_(out["loss"])),
    "metrics": ("self.centres", lambda m, out, batch, i: m.centres.add_(m.trainer.callback_metrics["train"])),
    "mixed with weights": (
        "self.centres",
        lambda m, out, batch, i: m.centres.copy_(m.layer.weight.detach()[:, :2] * batch[0].mean()),
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", FROM_THE_BATCH)
@pytest.mark.filterwarnings("ignore:Lap2Privacy. Hooked.on_train_batch_end")
def test_what_comes_from_the_batch_cannot_be_read_by_a_step(way: str, engine: str) -> None:
    name, hook = FROM_THE_BATCH[way]

    def step(module: Any, logits: Tensor, y: Tensor) -> Tensor:
        module.log("train", logits.mean())
        return centre_loss(module, logits, y)

    with pytest.raises(IsolationError, match=f"training_step reads {name}, which was computed from training records"):
        fit(module_with(step, on_train_batch_end=hook), engine=engine)


def test_a_list_of_the_modules_that_a_callback_fills_cannot_be_read() -> None:
    class Bank(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.bank.append(batch[0].mean(0)[:2].clone())

    module = module_with(lambda m, logits, y: (logits * m.bank[0]).sum() if m.bank else 0 * logits.sum())
    with pytest.raises(IsolationError, match=r"reads self\.bank\[0\]"):
        fit(module, Bank())


# -- from weights -----------------------------------------------------------------------------------------------------


def _momentum(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    with torch.no_grad():
        for mine, theirs in zip(module.teacher.parameters(), module.layer.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)


def _queue(module: Any, *_: Any) -> None:
    module.queue = torch.cat([module.queue[1:], module.layer.weight.detach()[:1, :2]])


FROM_WEIGHTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "teacher": (teacher_loss, _momentum),
    "swapped in": (
        teacher_loss,
        lambda m, *_: m.teacher.load_state_dict({k: v.clone() for k, v in m.layer.state_dict().items()}),
    ),
    "queue": (lambda m, logits, y: (logits.mean(0) - m.queue).pow(2).mean(), _queue),
    "list": (
        lambda m, logits, y: (m.bank[-1] - m.layer.weight).pow(2).sum() if m.bank else 0 * logits.sum(),
        lambda m, *_: m.bank.append(m.layer.weight.detach().clone()),
    ),
    "gradients": (centre_loss, lambda m, *_: m.centres.copy_(m.layer.weight.grad[:, :2])),
    "randomness": (centre_loss, lambda m, *_: m.centres.copy_(torch.randn(2, 2))),
    "counters": (lambda m, logits, y: logits.mean() * m.scale, lambda m, *_: setattr(m, "scale", m.scale * 0.9)),
    "momentum of Adam": (
        centre_loss,
        lambda m, *_: m.centres.copy_(next(iter(m.optimizers().state.values()))["exp_avg"][:, :2]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", FROM_WEIGHTS)
def test_what_comes_from_weights_alone_runs(way: str, engine: str) -> None:
    step, hook = FROM_WEIGHTS[way]
    module = module_with(step, on_train_batch_end=hook)
    module.configure_optimizers = lambda: torch.optim.Adam(module.layer.parameters())
    privacy = fit(module, engine=engine)
    assert privacy.steps == 8
    assert not any("no noise protects it" in caveat for caveat in privacy.report().caveats)


def test_a_teacher_of_an_overridden_optimizer_step_runs_and_follows_the_weights() -> None:
    def optimizer_step(module: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        module.teacher.load_state_dict(module.layer.state_dict())

    module = module_with(teacher_loss, optimizer_step=optimizer_step)
    assert fit(module).steps == 8
    assert torch.equal(module.teacher.weight, module.layer.weight)


# -- Python numbers ---------------------------------------------------------------------------------------------------


def test_a_number_of_the_outputs_that_a_step_reads_is_warned_of_and_named() -> None:
    def hook(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.scale = outputs["loss"].item()

    words = "Hooked.on_train_batch_end has read numbers of training records and changes self.scale"
    module = module_with(lambda m, logits, y: logits.mean() * m.scale, on_train_batch_end=hook)
    with pytest.warns(UserWarning, match=words):
        privacy = fit(module)
    assert any(words in caveat for caveat in privacy.report().caveats)
    privacy = fit(
        module_with(lambda m, logits, y: logits.mean() * m.scale, on_train_batch_end=hook), public_state=["scale"]
    )
    assert not any(words in caveat for caveat in privacy.report().caveats)
    assert any("public_state=['scale']" in caveat for caveat in privacy.report().caveats)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("param_groups", lambda t: t.optimizers[0].param_groups[0].update(lr=0.01)),
        ("should_stop", lambda t: setattr(t, "should_stop", True)),
        ("requires_grad", lambda t: t.lightning_module.layer.bias.requires_grad_(False)),
        ("dataset.level", lambda t: setattr(t.train_dataloader.dataset, "level", 1)),
        ("dataset.weights", lambda t: t.train_dataloader.dataset.weights.__setitem__(0, 2.0)),
        ("dataset.difficulty", lambda t: t.train_dataloader.dataset.difficulty.__setitem__(0, 2.0)),
    ],
)
def test_numbers_that_decide_how_training_goes_on_are_warned_of(name: str, change: Callable[[Any], Any]) -> None:
    class Steering(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if float(outputs["loss"]) > -1:
                change(trainer)

    data = loader(32, 8)
    vars(data.dataset).update(level=0, weights=[1.0] * 32, difficulty=np.ones(32))
    with pytest.warns(UserWarning, match=f"Steering.on_train_batch_end has read numbers .* changes {name}"):
        fit(module_with(nothing), Steering(), data=data)


def test_a_history_that_no_step_reads_is_ordinary() -> None:
    module = module_with(
        nothing, on_train_batch_end=lambda m, outputs, batch, batch_idx: m.history.append(outputs["loss"].item())
    )
    privacy = fit(module)
    assert len(module.history) == 8
    assert not any("no noise protects it" in caveat for caveat in privacy.report().caveats)


# -- only kept --------------------------------------------------------------------------------------------------------


def test_an_online_evaluator_is_warned_of_and_named() -> None:
    class Evaluator(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            x, y = batch
            loss = F.cross_entropy(pl_module.teacher(x), y)
            weight, _ = torch.autograd.grad(loss, list(pl_module.teacher.parameters()))
            with torch.no_grad():
                pl_module.teacher.weight.sub_(weight)

    module = module_with(nothing)
    module.teacher.requires_grad_(True)
    module.configure_optimizers = lambda: torch.optim.SGD(module.layer.parameters(), lr=0.1)
    words = "Evaluator.on_train_batch_end computes from training records self.teacher.weight"
    with pytest.warns(UserWarning, match=words):
        privacy = fit(module, Evaluator())
    assert any(words in caveat for caveat in privacy.report().caveats)
    assert "self.teacher.weight" in privacy.state_dict()["unprotected"]


def test_a_weight_of_the_optimizers_cannot_be_written_from_the_batch() -> None:
    hook = lambda m, out, batch, i: m.layer.weight.data.copy_(batch[0][:2])  # noqa: E731
    with pytest.raises(UnsupportedSettingError, match=r"writes the parameter self\.layer\.weight"):
        fit(module_with(nothing, on_train_batch_end=hook))


# -- another fit ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lap2Privacy. Hooked.on_train_batch_end")
def test_what_holds_records_is_withheld_in_the_next_fit_too(tmp_path: Any) -> None:
    module = module_with(nothing, on_train_batch_end=_centres)
    privacy = Lap2Privacy(eps="inf", noise_multiplier=1.0)
    trainer = quiet_trainer(pl, privacy, max_epochs=1)
    trainer.fit(module, loader(32, 8))
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    again = module_with(centre_loss)
    with pytest.raises(IsolationError, match=r"reads self\.centres"):
        quiet_trainer(pl, Lap2Privacy(eps="inf", noise_multiplier=1.0), max_epochs=2).fit(
            again, loader(32, 8), ckpt_path=path
        )
