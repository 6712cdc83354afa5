"""Layers that per-example gradients find hard, and neighbours in a batch, in real fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy
from lightning_lap2.gradients import UnsupportedModelError
from tests.scenarios.common import Classifier, flat, loader, no_privacy, trainer


class Net(Classifier):
    """The small classifier with another network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Branches(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if x.sum() > 0 else 2 * out


class Reads(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * float(x.max())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(2, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(1, (4, 2)))[0][:, -1])


def layers() -> tuple[nn.Module, ...]:
    return nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)


@pytest.mark.parametrize("engine", ["vmap", "loop", "ghost"])
@pytest.mark.parametrize("statistics", [True, False])
def test_scenario_9_batch_norm_is_refused_by_name(engine: str, statistics: bool) -> None:
    norm = nn.BatchNorm1d(16, track_running_stats=statistics)
    module = Net(nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 3)))
    with pytest.raises(UnsupportedModelError, match=r"BatchNorm1d 'net\.1'.*GroupNorm"):
        trainer(Lap2Privacy(eps=1.0, engine=engine), max_epochs=1).fit(module, loader())


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_scenario_9_recurrent_layers_train_alike_under_every_engine(kind: type[nn.RNNBase]) -> None:
    weights = []
    for engine in ("loop", "vmap", "ghost"):
        torch.manual_seed(0)
        module = Net(Recurrent(kind))
        callback = Lap2Privacy(eps=float("inf"), noise_multiplier=0.0, max_grad_norm=0.1, engine=engine, noise_seed=1)
        trainer(callback, max_epochs=2).fit(module, loader())
        weights.append(flat(module))
    assert torch.allclose(weights[0], weights[1], atol=1e-6)
    assert torch.allclose(weights[0], weights[2], atol=1e-6)


@pytest.mark.parametrize(("net", "words"), [(Checkpointed, "checkpoint"), (Branches, "data"), (Reads, r"\.item\(\)")])
def test_scenario_9_what_vmap_cannot_trace_names_line_and_engine_and_loop_runs_it(net: type, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"test_layers\.py:\d+ .*{words}.*engine='loop'"):
        trainer(Lap2Privacy(eps=1.0, engine="vmap"), max_epochs=1).fit(Net(net(*layers())), loader())
    for engine in ("loop", "auto"):
        callback = Lap2Privacy(eps=1.0, engine=engine)
        trainer(callback, max_epochs=1).fit(Net(net(*layers())), loader())
        assert callback.steps == 8


def test_a_branch_on_the_whole_batch_becomes_one_on_each_example_and_the_report_says_so() -> None:
    class OnSum(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if x.sum() > 0 else -out

    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(Net(OnSum(*layers())), loader())
    assert callback.report().engine == "loop"
    assert any("not the mean of its examples' gradients" in text for text in callback.report().caveats)


def ragged() -> DataLoader:
    """Sentences of 3 to 8 tokens, padded to the longest of each batch."""
    generator = torch.Generator().manual_seed(0)
    records = [torch.randint(1, 10, (3 + i % 6,), generator=generator) for i in range(48)]

    def collate(chosen: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        return tokens, torch.stack([t[0] % 3 for t in chosen])

    return DataLoader(records, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class Bag(Classifier):
    """The mean embedding of a sentence's tokens, with or without those of the padding."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.embedding = nn.Embedding(10, 8)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        kept = (x != 0).float()[..., None] if self.masked else torch.ones_like(x, dtype=torch.float)[..., None]
        mean = (self.embedding(x) * kept).sum(1) / kept.sum(1)
        return nn.functional.cross_entropy(self.net(mean), y)


@pytest.mark.parametrize("engine", ["vmap", "loop", "ghost"])
def test_no_record_is_padded_to_the_length_of_another(engine: str) -> None:
    """So that padding without a mask is harmless: with and without one the weights are the same."""
    weights = []
    for masked in (False, True):
        torch.manual_seed(0)
        callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1.0, engine=engine, noise_seed=1)
        module = Bag(masked)
        trainer(callback, max_epochs=1).fit(module, ragged())
        assert callback.steps == 6
        said = [text for text in callback.report().caveats if "not the mean of its examples' gradients" in text]
        assert bool(said) is not masked
        weights.append(flat(module))
    torch.testing.assert_close(*weights)


def test_in_batch_contrastive_loss_is_refused() -> None:
    class Contrastive(Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.net(x), self.net(x + 0.1)
            return nn.functional.cross_entropy(a @ b.T, torch.arange(len(x)))

    with pytest.raises(UnsupportedModelError, match="no gradient for any example alone, only for a batch"):
        trainer(no_privacy(), max_epochs=1).fit(Contrastive(), loader())


# Lightning's own remark on modules that are in eval mode when training starts
@pytest.mark.filterwarnings("ignore:Found 1 module:UserWarning")
def test_frozen_batch_norm_trains_and_keeps_its_statistics() -> None:
    norm = nn.BatchNorm1d(16).eval()

    class Frozen(Net):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            norm.eval()
            return self

    module = Frozen(nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 3)))
    before = {name: value.clone() for name, value in norm.named_buffers()}
    callback = Lap2Privacy(eps=1.0)
    trainer(callback, max_epochs=1).fit(module, loader())
    assert callback.steps == 8
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())


def test_batches_of_a_single_tensor() -> None:
    """A TensorDataset of one tensor gives batches that are lists of one."""

    class Autoencoder(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x,) = batch
            return (self.net(x) - x).square().mean()

    callback = Lap2Privacy(eps=1.0)
    module = Autoencoder(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)))
    trainer(callback, max_epochs=1).fit(module, DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
    assert callback.steps == 8
