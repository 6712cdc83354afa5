"""The ledger belongs to the weights: whoever trains a module further goes on from what it has spent."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.ledger import module_mark
from lightning_lap2.callback.ledger.module_mark import fingerprint
from tests.helpers import (
    DELTA,
    LIGHTNING,
    LIGHTNING_WARNINGS,
    NAMESPACES,
    Namespace,
    classifier,
    loader,
    quiet_trainer,
)

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
GIVEN: dict[str, Any] = {"eps": 20.0, "noise_multiplier": 1.5, "bound": "joint"}


def fit(module: Any, *, callback: Any = None, epochs: int = 1, ckpt_path: Any = None, **arguments: Any) -> Any:
    """8 releases an epoch."""
    callback = callback or Lap2Privacy(**{**GIVEN, **arguments})
    quiet_trainer(pl, callback, max_epochs=epochs).fit(module, loader(32, 4), ckpt_path=ckpt_path)
    return callback


def plain_fit(module: Any) -> None:
    quiet_trainer(pl, max_epochs=1).fit(module, loader(32, 4))


def epsilon_of(releases: int, dimension: int = 8, bound: str = "joint") -> float:
    accountant = MajorizedAccountant(bound=bound, mechanism="laplace")
    accountant.step(noise_multiplier=1.5, sample_rate=1 / 8, dimension=dimension, steps=releases)
    return accountant.epsilon(delta=DELTA)


def caveats(callback: Any, text: str) -> list[str]:
    return [caveat for caveat in callback.report().caveats if text in caveat]


# -- new callbacks, other Trainers ------------------------------------------------------------------------------------


def test_rounds_with_new_callbacks_report_the_joint_epsilon() -> None:
    module = classifier(pl)
    found = [fit(module) for _ in range(3)]
    assert found[-1].steps == 24
    assert found[-1].report().epsilon == pytest.approx(epsilon_of(24), rel=1e-12)
    assert {callback.steps for callback in found} == {24}, "what the weights have spent, whoever is asked"


def test_rounds_in_both_namespaces_with_callbacks_of_configure_callbacks() -> None:
    made: list[Any] = []

    for name in NAMESPACES:
        home = Namespace.named(name)

        class Own(home.pl.LightningModule):  # type: ignore[name-defined, misc]
            def __init__(self, layer: nn.Module, lap2: type) -> None:
                super().__init__()
                self.layer, self.lap2 = layer, lap2

            def configure_callbacks(self) -> list[Any]:
                made.append(self.lap2(**GIVEN))
                return [made[-1]]

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        layer = made[-1].layer if made else nn.Linear(3, 2)
        module = Own(layer, home.lap2)
        for _ in range(2):
            quiet_trainer(home.pl, max_epochs=1).fit(module, loader(32, 4))
        made[-1].layer = layer
    assert [callback.steps for callback in made][-1] == 32, "the second module is made of the first one's layer"


def test_spent_budget_stays_spent_under_a_new_callback() -> None:
    module = classifier(pl)
    first = fit(module, eps=1.0, noise_multiplier=None)
    with pytest.warns(UserWarning, match="already spent"):
        second = fit(module, eps=1.0, noise_multiplier=None)
    assert second.steps == first.steps == 8
    assert second.report().epsilon <= 1.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mechanism": "gaussian", "bound": "tight"}, "mechanism='laplace'"),
        ({"bound": "tight"}, "bound='joint'"),
        ({"delta": 1e-6}, "delta=1e-05"),
        ({"sampling": "none"}, "sampling='poisson'"),
    ],
)
def test_what_cannot_be_composed_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    module = classifier(pl)
    fit(module)
    with pytest.raises(ValueError, match=f"module, which was trained privately before.*pass {name}"):
        fit(module, **arguments)
    assert fit(module).steps == 16, "the remedy"


def test_fit_that_was_refused_before_its_first_release_leaves_nothing_behind() -> None:
    def broken(module: Any, batch: Any, batch_idx: int) -> Any:
        raise ArithmeticError

    module = classifier(pl, step=broken)
    with pytest.raises(ArithmeticError):
        fit(module, mechanism="gaussian", bound="tight")
    with pytest.raises(ArithmeticError):
        fit(module)


def test_fit_that_ended_by_an_exception_is_not_forgotten() -> None:
    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise ArithmeticError

    module = classifier(pl)
    with pytest.raises(ArithmeticError):
        quiet_trainer(pl, Lap2Privacy(**GIVEN), Failing(), max_epochs=1).fit(module, loader(32, 4))
    second = fit(module)
    assert second.steps == 13
    assert not caveats(second, "changed outside")


# -- parts and copies -------------------------------------------------------------------------------------------------


class Composed(pl.LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parts_bring_what_they_have_spent() -> None:
    """A module of two parts that were trained apart, and a new one."""
    first, second = Composed(nn.Linear(3, 3)), Composed(nn.Linear(3, 3))
    fit(first), fit(second, epochs=2)
    callback = fit(Composed(*first.layers, *second.layers, nn.Linear(3, 2)))
    assert callback.steps == 8 + 16 + 8
    accountant = MajorizedAccountant(bound="joint", mechanism="laplace")
    accountant.step(noise_multiplier=1.5, sample_rate=1 / 8, dimension=12, steps=24)
    accountant.step(noise_multiplier=1.5, sample_rate=1 / 8, dimension=32, steps=8)
    assert callback.report().epsilon == pytest.approx(accountant.epsilon(delta=DELTA), rel=1e-12)
    assert not caveats(callback, "changed outside")


def test_frozen_parts_and_losses_that_modules_share_bring_nothing() -> None:
    """A pretrained encoder that many runs build on, in the same process."""
    encoder = nn.Linear(3, 3).requires_grad_(False)
    activation = nn.ReLU()
    for _ in range(2):
        callback = fit(Composed(encoder, activation, nn.Linear(3, 2)))
        assert callback.steps == 8
    assert module_mark.NAME not in vars(encoder) and module_mark.NAME not in vars(activation)


def test_part_that_was_trained_for_a_while_is_marked() -> None:
    class ForOneEpoch(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.layers[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.make_trainable(module.layers[0])
            if epoch == 2:
                self.freeze(module.layers[0])

    module = Composed(nn.Linear(3, 3), nn.Linear(3, 2))
    quiet_trainer(pl, Lap2Privacy(**GIVEN), ForOneEpoch(), max_epochs=3).fit(module, loader(32, 4))
    assert not any(p.requires_grad for p in module.layers[0].parameters())
    assert fit(Composed(module.layers[0], nn.Linear(3, 2))).steps == 24 + 8


def test_callback_of_one_module_adds_what_another_has_spent() -> None:
    one, other = classifier(pl), classifier(pl)
    callback = fit(one)
    fit(other, epochs=2)
    fit(other, callback=callback)
    assert callback.steps == 8 + 16 + 8
    fit(other, callback=callback)
    assert callback.steps == 40, "added once"


def test_copies_of_a_module_know_what_it_has_spent() -> None:
    module = classifier(pl)
    fit(module)
    copied = copy.deepcopy(module)
    assert fit(copied).steps == 16
    assert fit(module).steps == 24, "one ledger for what comes of the same weights"


def test_module_from_a_pickle_knows_what_it_has_spent(tmp_path: Path) -> None:
    part = Composed(nn.Linear(3, 2))
    fit(part)
    torch.save(part.layers, tmp_path / "layers.pt")
    again = Composed(*torch.load(tmp_path / "layers.pt", weights_only=False))
    callback = fit(again)
    assert callback.steps == 16
    assert not caveats(callback, "changed outside")
    assert fit(again).steps == 24


def test_pickle_of_a_marked_module_opens_without_this_package(tmp_path: Path) -> None:
    part = Composed(nn.Linear(3, 2))
    fit(part)
    torch.save(part.layers, tmp_path / "layers.pt")
    program = (
        "import sys; sys.modules['lightning_lap2'] = None; import torch\n"
        f"layers = torch.load({str(tmp_path / 'layers.pt')!r}, weights_only=False)\n"
        "print(layers(torch.zeros(1, 3)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_mark_is_in_no_state_dict_and_in_nobodys_way() -> None:
    module = classifier(pl)
    names = list(module.state_dict())
    fit(module)
    assert list(module.state_dict()) == names
    assert [name for name, _ in module.named_buffers()] == []
    compiled = torch.compile(module.layer, backend="eager")
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), module.layer(x))
    exported = torch.export.export(module.layer, (x,)).module()
    torch.testing.assert_close(exported(x), module.layer(x))


# -- weights that something else changed ------------------------------------------------------------------------------


def test_plain_training_of_a_marked_module_is_named() -> None:
    module = classifier(pl)
    fit(module)
    plain_fit(module)
    callback = fit(module)
    assert callback.steps == 16
    assert len(caveats(callback, "changed outside private training after 8 releases (layer.weight first)")) == 1


def test_plain_training_before_the_first_private_fit_is_named() -> None:
    module = classifier(pl)
    plain_fit(module)
    assert len(caveats(fit(module), "held gradients when its first private fit began")) == 1
    assert len(caveats(fit(module), "held gradients")) == 1
    fit(part := Composed(nn.Linear(3, 3)))
    assert not caveats(fit(Composed(*part.layers, nn.Linear(3, 2))), "held gradients"), "of private training"
    assert not caveats(fit(classifier(pl)), "held gradients")


def test_weights_of_somebody_else_in_a_marked_module_are_named() -> None:
    module = classifier(pl)
    fit(module)
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    callback = fit(module)
    assert callback.steps == 16
    assert len(caveats(callback, "load_state_dict")) == 1


@pytest.mark.skipif(not hasattr(pl.callbacks, "EMAWeightAveraging"), reason="Lightning averages weights since 2.6")
def test_nothing_is_said_where_only_the_optimizer_changed_them() -> None:
    """Also with averaged weights, which another callback puts into the module after the last step."""
    module = classifier(pl)
    for _ in range(2):
        callback = Lap2Privacy(**GIVEN)
        average = pl.callbacks.EMAWeightAveraging(decay=0.5)
        quiet_trainer(pl, callback, average, max_epochs=1).fit(module, loader(32, 4))
    quiet_trainer(pl, max_epochs=1).validate(module, loader(8, 4), verbose=False)
    callback = fit(module)
    assert callback.steps == 24
    assert not caveats(callback, "changed outside") and not caveats(callback, "held gradients")


def test_checkpoint_of_an_earlier_state_is_another_branch(tmp_path: Path) -> None:
    """Its weights replace the module's, so its ledger does; the modules of the other branch keep theirs."""
    module = classifier(pl)
    callback = Lap2Privacy(**GIVEN)
    trainer = quiet_trainer(pl, callback, max_epochs=1)
    trainer.fit(module, loader(32, 4))
    trainer.save_checkpoint(tmp_path / "eight.ckpt")
    fit(module, callback=callback)
    kept = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="16 releases had been counted before the checkpoint with 8") as warned:
        fit(module, callback=callback, epochs=2, ckpt_path=tmp_path / "eight.ckpt")
    assert sum("as another branch" in str(w.message) for w in warned) == 1
    assert callback.steps == 16
    assert len(caveats(callback, "as another branch")) == 1
    assert fit(kept).steps == 24
    assert fit(module).steps == 24
    with pytest.warns(UserWarning, match="24 releases had been counted before the checkpoint with 8"):
        new = fit(module, epochs=2, ckpt_path=tmp_path / "eight.ckpt")
    assert new.steps == 16, "also with a new callback"


def test_checkpoint_of_other_settings_replaces_what_a_module_was_marked_with(tmp_path: Path) -> None:
    module = classifier(pl)
    trainer = quiet_trainer(pl, Lap2Privacy(**GIVEN), max_epochs=1)
    trainer.fit(classifier(pl), loader(32, 4))
    trainer.save_checkpoint(tmp_path / "joint.ckpt")
    fit(module, bound="tight")
    assert fit(module, epochs=2, ckpt_path=tmp_path / "joint.ckpt").steps == 16
    assert fit(module).steps == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_fingerprint_tells_values_apart(dtype: torch.dtype) -> None:
    tensor = (10 * torch.randn(50, 7)).to(dtype)
    found = fingerprint(tensor)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor.clone()) == found
    for index in ((0, 0), (49, 6)):
        changed = tensor.clone()
        changed[index] += 1
        assert fingerprint(changed) != found
    opposite = tensor.clone()
    opposite[0, 0] += 1
    opposite[0, 1] -= 1
    assert fingerprint(opposite) != found, "as the two biases of a binary classifier move"
    assert fingerprint(torch.tensor(3.0).to(dtype))[0] in (1, 2)


def test_fingerprint_of_a_large_tensor_is_that_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = fingerprint(tensor)
    monkeypatch.setattr(module_mark, "_PIECE", 64)
    assert fingerprint(tensor) == whole
    bits = tensor.view(torch.int32).tolist()
    assert whole[1] == sum(bits)
    assert whole[2] % 2**64 == sum(b * b for b in bits) % 2**64


# -- copies of the callback -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_deep_copy_of_a_callback_shares_the_ledger(before: bool) -> None:
    """As packages copy the callbacks that they are given."""
    original = Lap2Privacy(**GIVEN)
    if not before:
        fit(classifier(pl), callback=original)
    copied = copy.deepcopy(original)
    fit(classifier(pl), callback=copied)
    releases = 8 if before else 16
    assert original.steps == copied.steps == releases
    assert original.epsilon == pytest.approx(epsilon_of(releases), rel=1e-12)
    assert original.report() == copied.report()
    assert original.noise_multiplier == 1.5 and original.sample_rate == 1 / 8


def test_copy_of_a_callback_whose_fit_goes_on_has_no_part_in_it() -> None:
    copies: list[Any] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                copies.append(copy.deepcopy(trainer.callbacks[0]))
                copies.append(pickle.loads(pickle.dumps(trainer.callbacks[0])))

    callback = Lap2Privacy(**GIVEN)
    quiet_trainer(pl, callback, Copying(), max_epochs=1).fit(classifier(pl), loader(32, 4))
    assert [copied.steps for copied in copies] == [8, 3], "a pickle holds what was spent when it was made"
    assert copies[1].report().steps == 3


def test_callback_that_did_not_train_does_not_report_zero() -> None:
    untrained = pickle.loads(pickle.dumps(Lap2Privacy(**GIVEN)))
    text = str(untrained.report())
    assert "This callback has not trained anything" in text
    assert "epsilon = 0" not in text
    trained = fit(classifier(pl), epochs=0)
    assert "Nothing was released: epsilon = 0" in str(trained.report())
