"""Code that an honest, creative user might write, each of which once (or nearly) carried one record past the clipping.

Every case must keep the released sum within C of its neighbour's, or be refused by name before the first release. The
first group are the instances that were met in the field (31 C and 254 C under the engine that ran whole batches).
"""

from __future__ import annotations

import functools
import random
import threading
import warnings
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Subset, default_collate
from torchmetrics import Metric

from lightning_lap2.batches import ExampleBatch, split_rows
from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.sampling import alone
from tests.isolation.sensitivity import FEATURES, LIMIT, Attack, N, Plain, Rows

REFUSED = (UnsupportedModelError, UnsupportedSettingError)

# -- fetching ---------------------------------------------------------------------------------------------------------


class Fetched(Rows):
    """``__getitems__`` that does something to the records it fetched together."""

    def together(self, xs: list[Tensor]) -> list[Tensor]:
        return xs

    def __getitems__(self, indices: list[int]) -> list[Any]:
        found = [Rows.__getitem__(self, i) for i in indices]
        return list(zip(self.together([x for x, _ in found]), [y for _, y in found], strict=True))


class Standardised(Fetched):
    def together(self, xs: list[Tensor]) -> list[Tensor]:
        whole = torch.stack(xs)
        return list((whole - whole.mean(0)) / (whole.std(0, correction=0) + 1e-2))


class FetchedMixup(Fetched):
    def together(self, xs: list[Tensor]) -> list[Tensor]:
        if random.random() < 0.7:
            return [(a + b) / 2 for a, b in zip(xs, xs[::-1], strict=True)]
        return xs


class LoudRescales(Fetched):
    def together(self, xs: list[Tensor]) -> list[Tensor]:
        top = max(float(x.abs().max()) for x in xs)
        return [x / top for x in xs] if top > 10 else xs


class LaterEpochs(Fetched):
    calls = 0

    def together(self, xs: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        return [x + xs[-1] for x in xs] if self.calls > 1 else xs


class OnlyFullBatches(Fetched):
    def together(self, xs: list[Tensor]) -> list[Tensor]:
        return [x - torch.stack(xs).mean(0) for x in xs] if len(xs) == N else xs


class SelfMixup(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        if index < N - 1 and random.random() < 0.5:
            other, _ = self[N - 1]
            x = x + other
        return x, y


class Wrapped(Rows):
    """Mixes through a data set that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Rows()

    def __getitem__(self, index: int) -> Any:
        (x, y), (other, _) = self.base[index], self.base[N - 1]
        return x + other, y


class Retries(Rows):
    """Gives another record for one that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index % 3 else self[index + 1]


class Counting(Rows):
    """A ramp over the records fetched so far would be a memory; a ramp over epochs is public."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * random.uniform(0.5, 1.5) + torch.randn(x.shape) * float(np.random.rand()), y  # noqa: NPY002 (what users draw from)


class OwnNumbers(Rows):
    """Augments by generators of its own with known seeds; a loud record takes more numbers than others, which would
    shift those of all records behind it, in this draw and in the next."""

    class_wide = torch.Generator().manual_seed(3)

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)
        self.transforms = [functools.partial(_jitter, rng=random.Random(1))]

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        for _ in range(5 if x.abs().max() > 10 else 1):
            x = x + float(self.numbers.normal()) + torch.randn(x.shape, generator=self.class_wide)
            x = self.transforms[0](x)
        return x * float(GLOBAL_NUMBERS.uniform(0.5, 1.5)), y


GLOBAL_NUMBERS = np.random.RandomState(5)


def _jitter(x: Tensor, rng: random.Random) -> Tensor:
    return x * rng.uniform(0.5, 2.0)


DATASETS = {
    "generators of its own": OwnNumbers,
    "standardised over the fetched": Standardised,
    "mixup by random.random": FetchedMixup,
    "rescaled where one is loud": LoudRescales,
    "from the second fetch on": LaterEpochs,
    "only full batches": OnlyFullBatches,
    "random transforms of its own": Counting,
    "a subset of such": lambda: Subset(Standardised(), range(N)),
}
MIXING_DATASETS = {"self[j]": SelfMixup, "a wrapped data set": Wrapped, "retries": Retries}


@pytest.mark.parametrize("name", DATASETS)
def test_fetch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(dataset=DATASETS[name]).moved(monkeypatch) <= LIMIT


@pytest.mark.parametrize("name", MIXING_DATASETS)
def test_a_fetch_inside_a_fetch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="asked for two records while one was fetched"):
        Attack(dataset=MIXING_DATASETS[name]).moved(monkeypatch)


# -- collating --------------------------------------------------------------------------------------------------------


def standardise(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-2), y


def numpy_mixup(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x + x.flip(0), y) if np.random.rand() < 0.4 else (x, y)  # noqa: NPY002


def python_mixup(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x + x[-1:], y) if random.random() < 0.4 else (x, y)


def torch_mixup(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x + x[torch.rand(len(x)).argsort()], y


def rare(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x / x.abs().max(), y) if bool((x.abs() > 20).any()) else (x, y)


class LaterCollate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, records: list[Any]) -> Any:
        self.calls += 1
        x, y = default_collate(records)
        return (x + x[-1:], y) if self.calls > 3 and len(records) > 1 else (x, y)


class OneBuffer:
    """Writes every batch into the same memory."""

    def __init__(self) -> None:
        self.x, self.y = torch.zeros(N, 4), torch.zeros(N)

    def __call__(self, records: list[Any]) -> Any:
        x, y = default_collate(records)
        self.x[: len(x)], self.y[: len(x)] = x, y
        return self.x[: len(x)], self.y[: len(x)]


def sort_by_size(records: list[Any]) -> Any:
    return default_collate(sorted(records, key=lambda record: float(record[0].norm())))


def last_label_for_all(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x, y[-1:].expand(len(y))


def drop_quiet(records: list[Any]) -> Any:
    kept = [record for record in records if float(record[0].norm()) > 20]
    return default_collate(kept or records)


def with_copies(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return torch.cat([x, x]), torch.cat([y, y])


COLLATE = {
    f.__name__: f
    for f in (standardise, numpy_mixup, python_mixup, torch_mixup, rare, sort_by_size, last_label_for_all, drop_quiet,
              with_copies)
}  # fmt: skip


@pytest.mark.parametrize("name", [*COLLATE, "later", "one buffer"])
@pytest.mark.parametrize("workers", [0, 1])
def test_collate(name: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if workers and name not in ("standardise", "later"):
        pytest.skip("two of them show it for workers")
    function: Any = {"later": LaterCollate, "one buffer": OneBuffer}.get(name, lambda: COLLATE[name])()
    assert Attack(loader={"collate_fn": function, "num_workers": workers}).moved(monkeypatch) <= LIMIT


@pytest.mark.parametrize("name", ["sort_by_size", "drop_quiet", "standardise"])
def test_collate_of_several_views(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = Attack(loader={"collate_fn": COLLATE[name]}, privacy={"augmentations": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all views are identical
        assert attack.moved(monkeypatch) <= LIMIT


def test_the_measure_sees_a_collate_function_that_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: collated together, as plain training does, the same function moves the sum further than C."""

    def together(collator: Any, fetched: list[Any]) -> Any:
        group = split_rows(collator.collate_fn([record for found in fetched for record in found]))
        return ExampleBatch([group], [range(group.count)])

    monkeypatch.setattr(alone.Collator, "__call__", together)
    assert Attack(loader={"collate_fn": standardise}).moved(monkeypatch) > 2 * LIMIT


# -- to the device ----------------------------------------------------------------------------------------------------


class AfterTransfer(Plain):
    """Mixes on the device, from the second epoch on."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + x.mean(0), y) if self.current_epoch > 0 else batch


class BeforeTransfer(Plain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + x.flip(0), y


class Transfer(Plain):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return x / x.abs().max(), y


class RandomTransfer(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x[torch.randperm(len(x))] + x, y


class Module(L.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x - x.mean(0) * 5, y


@pytest.mark.parametrize("module", [AfterTransfer, BeforeTransfer, Transfer, RandomTransfer])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_transfer(module: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(module).moved(monkeypatch, engine) <= LIMIT


def test_transfer_of_a_data_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(datamodule=Module).moved(monkeypatch) <= LIMIT


# -- hooks that are handed the batch ----------------------------------------------------------------------------------


class InPlace(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].sub_(batch[0].mean(0))


class Replaced(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0] / batch[0].abs().max()


class ByData(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].data[:] = batch[0].data.mean(0)


class Numpy(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].numpy()[:] += batch[0].numpy()[-1:]


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if float(batch[0].abs().max()) > 20 else None


class MixupCallback(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch > 0:
            batch[0].add_(batch[0].flip(0))


class AppendCallback(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].resize_(2 * len(batch[0]), batch[0].shape[1])


def as_lists(records: list[Any]) -> Any:
    return list(default_collate(records))


@pytest.mark.parametrize("module", [InPlace, Replaced])
def test_a_hook_that_changes_the_batch_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{module.__name__}.on_train_batch_start"):
        Attack(module, loader={"collate_fn": as_lists}).moved(monkeypatch)


@pytest.mark.parametrize("callback", [MixupCallback, AppendCallback])
def test_a_callback_that_changes_the_batch_is_refused(callback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{callback.__name__}.on_train_batch_start"):
        Attack(callbacks=lambda: [callback()]).moved(monkeypatch)


@pytest.mark.parametrize("module", [ByData, Numpy])
def test_a_hook_that_writes_past_the_versions_reaches_nobody(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(module).moved(monkeypatch) <= LIMIT


def test_a_hook_that_skips_by_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSettingError, match="-1"):
        Attack(Skips).moved(monkeypatch)


class Trains(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shown = batch[0]


class ScalesGradients(Trains):
    """By the loss: a trust ratio, say."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        factor = 1 + self.trainer.callback_metrics.get("loss", torch.ones(()))
        for parameter in self.parameters():
            parameter.grad.mul_(factor)


class AddsToGradients(Trains):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].bias.grad.add_(self.shown.mean())


class ReplacesGradients(Trains):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].bias.grad = self.net[0].bias.grad + self.shown.mean()


class GradientsByNumpy(Trains):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].bias.grad.numpy()[:] += self.shown.numpy().mean()


class GradientsAsTheyAreClipped(Trains):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(self.shown.abs().max())


class WritesMomentum(Trains):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["momentum_buffer"].add_(batch[0].mean())


@pytest.mark.parametrize(
    "module",
    [ScalesGradients, AddsToGradients, ReplacesGradients, GradientsByNumpy, GradientsAsTheyAreClipped, WritesMomentum],
)
def test_a_hook_that_writes_gradients_from_the_data_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSettingError, match="no noise protects that, and it reaches the weights"):
        Attack(module).moved(monkeypatch)


def test_a_hook_that_computes_from_gradients_and_weights_alone_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clips(Trains):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            for parameter in self.parameters():
                parameter.grad.div_(norm.clamp_min(1.0)).add_(parameter.detach(), alpha=1e-3)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    assert Attack(Clips).moved(monkeypatch) <= LIMIT


# -- the step ---------------------------------------------------------------------------------------------------------


class Labelled(Plain):
    """Few records are labelled: a masked mean."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        has = (x[:, 0] > 0).float()
        return (self.each(x, y) * has).sum() / has.sum()


class NanSwitchesOff(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = self.each(torch.where(x.abs() > 20, x * torch.nan, x), y).mean()
        return None if torch.isnan(loss) else loss


class SometimesMixup(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + x.flip(0) if torch.rand(1) < 0.5 else x, y)


class Permuted(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + x[torch.rand(len(x)).argsort()], y)


class Ramped(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        score = self.net(x)
        return super().loss(x, y) + self.current_epoch * 10 * (score - score.mean()).square().mean()


class RareWeight(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.where(x.abs().amax(1) > 20, 500.0, 1.0)
        return (self.each(x, y) * weight).sum() / weight.sum()


class SoftmaxOverBatch(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.each(x, y) * self.net(x)[:, 0].softmax(0)).sum()


class Centred(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x - x.mean(0), y)


class BatchSize(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + x[-1:], y) if len(x) == N else super().loss(x, y)


class Largest(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x / x.abs().max(), y)


class Unique(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * len(torch.unique(x.round()))


class Contrastive(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        score = self.net(x)
        return nn.functional.cross_entropy(score @ score.T, torch.arange(len(x)))


class Hardest(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y).topk(1).values.mean()


class Cumulative(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.cumsum(0), y)


class Distances(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + torch.cdist(self.net(x), self.net(x)).mean()


class HandMadeNorm(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[0](x)
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-3).sqrt()
        return nn.functional.binary_cross_entropy_with_logits(self.net[2](hidden.tanh())[:, 0], y)


class FunctionalNorm(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = nn.functional.batch_norm(self.net[0](x), None, None, training=True)
        return nn.functional.binary_cross_entropy_with_logits(self.net[2](hidden.tanh())[:, 0], y)


class ByEpoch(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + x.sum(0) if self.current_epoch == 2 else x, y)


class Mixing(torch.autograd.Function):
    """Batches by a rule of its own, which mixes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x + x.flip(in_dims[0]), in_dims[0]


class OwnRule(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(Mixing.apply(x), y)


KEPT: list[Tensor] = []


class Escaped(Plain):
    """Keeps a tensor outside the module, and uses it in the next step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        score = self.net(x)
        loss = super().loss(x, y)
        if KEPT:
            loss = loss + (score - KEPT[-1]).square().mean()
        KEPT.append(score.detach())
        return loss


class Remembers(Plain):
    """Keeps the last batch's mean on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x - self.seen, y)
        self.seen.data.copy_(x.detach().mean(0))
        return loss


class Centres(Plain):
    """Class centres from the batch, between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(4)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x - self.centre, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.centre = batch[0].mean(0)


class Scaling(Metric):
    """Keeps more than its states, and scales by that."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.largest = 1.0

    def update(self, x: Tensor) -> None:
        self.total += x.sum() * self.largest
        self.largest = float(x.max())

    def compute(self) -> Tensor:
        return self.total


class ByLossMetric(Plain):
    """The loss is a metric, which sees the whole batch once the step is done."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Scaling()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.metric(self.each(x, y))  # type: ignore[no-any-return]


class ByMetric(ByLossMetric):
    """Reads a state that the batch was added to in place."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.metric.total + 1
        self.metric.update(x)
        return self.each(x, y).mean() * weight


class ByLog(Plain):
    """Keeps what it logs."""

    last = 1.0

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.last = float(value)
        super().log(name, value, **options)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y).mean() * self.last
        self.log("largest", x.max())
        return loss


class ByBatchIndex(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(*batch) * (1 + 10 * batch_idx)  # type: ignore[operator]


class OnItsClass(Plain):
    """What was seen last, where no walk over the module finds it."""

    seen: ClassVar[dict[str, Tensor]] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y).mean()
        if "x" in self.seen:
            loss = loss + (x - self.seen["x"]).square().mean()
        self.seen["x"] = x.detach().clone()
        return loss


class OnThread(OnItsClass):
    local = threading.local()

    @property
    def seen(self) -> dict[str, Tensor]:  # type: ignore[override]
        return vars(self.local)


class OnTrainer(OnItsClass):
    @property
    def seen(self) -> dict[str, Tensor]:  # type: ignore[override]
        return vars(self.trainer)


class OnOptimizer(OnItsClass):
    @property
    def seen(self) -> dict[str, Tensor]:  # type: ignore[override]
        return self.optimizers().state  # type: ignore[union-attr, return-value]


class OnParameter(OnItsClass):
    @property
    def seen(self) -> dict[str, Tensor]:  # type: ignore[override]
        return vars(self.net[0].weight)


class OnDefault(Plain):
    def loss(self, x: Tensor, y: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006 (users write it)
        loss = self.each(x, y).mean() + sum((x - other).square().mean() for other in seen)
        seen[:] = [x.detach().clone()]
        return loss


class OwnGenerator(Plain):
    """Draws for each example from a generator that it keeps, with a seed that everybody knows."""

    numbers = torch.Generator().manual_seed(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * (1 + torch.rand(1, generator=self.numbers)[0])  # type: ignore[operator]


STEPS = [
    OnItsClass, OnThread, OnTrainer, OnOptimizer, OnParameter, OnDefault, OwnGenerator,
    Labelled, NanSwitchesOff, SometimesMixup, Permuted, Ramped, RareWeight, SoftmaxOverBatch, Centred, BatchSize,
    Largest, Unique, Contrastive, Hardest, Cumulative, Distances, HandMadeNorm, FunctionalNorm, ByEpoch, OwnRule,
    Escaped, Remembers, Centres, ByBatchIndex, ByLossMetric, ByMetric, ByLog,
]  # fmt: skip


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("module", STEPS)
def test_step(module: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT.clear()
    OnItsClass.seen.clear()
    try:
        moved = Attack(module).moved(monkeypatch, engine)
    except REFUSED:
        return
    assert moved <= LIMIT


@pytest.mark.parametrize("module", [ByBatchIndex, Labelled])
def test_accumulation(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = Attack(module, loader={"batch_size": 4}, trainer={"accumulate_grad_batches": 2})
    assert attack.moved(monkeypatch) <= LIMIT


# -- between steps, where no walk over the module goes -----------------------------------------------------------------


class HookOnClass(Plain):
    mean = torch.zeros(4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep(batch[0].mean(0) + 0 * outputs["loss"])

    def keep(self, mean: Tensor) -> None:
        type(self).mean = mean

    def loss(self, x: Tensor, y: Tensor) -> Tensor | None:
        return super().loss(x - self.mean, y)


class HookOnTrainer(HookOnClass):
    def keep(self, mean: Tensor) -> None:
        self.trainer.running = mean  # type: ignore[attr-defined]

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        return getattr(self.trainer, "running", torch.zeros(4))


class HookOnOtherCallback(HookOnTrainer):
    def keep(self, mean: Tensor) -> None:
        self.trainer.callbacks[-1].running = mean  # type: ignore[attr-defined]

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        return getattr(self.trainer.callbacks[-1], "running", torch.zeros(4))  # type: ignore[attr-defined]


class HookOnDataModule(HookOnTrainer):
    def keep(self, mean: Tensor) -> None:
        self.trainer.datamodule.mean.copy_(mean)  # type: ignore[attr-defined]

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        return self.trainer.datamodule.mean  # type: ignore[attr-defined]


class HookOnMetrics(HookOnClass):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", loss)  # type: ignore[arg-type]
        return loss

    def keep(self, mean: Tensor) -> None:
        super().keep(self.trainer.callback_metrics["seen"] * torch.ones(4))


class HookOnDataset(Plain):
    """The data set less the mean of the last batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.train_dataloader.dataset.x.sub_(batch[0].mean(0))  # type: ignore[union-attr]


class HookReplacesInDataset(HookOnDataset):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = self.trainer.train_dataloader.dataset.dataset  # type: ignore[union-attr]
        rows.x = rows.x - batch[0].mean(0)


BETWEEN = [
    HookOnClass, HookOnTrainer, HookOnOtherCallback, HookOnDataModule, HookOnMetrics, HookOnDataset,
    HookReplacesInDataset,
]  # fmt: skip


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("module", BETWEEN)
@pytest.mark.filterwarnings("ignore:.*from training records changes datamodule")
def test_between_steps(module: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    HookOnClass.mean = torch.zeros(4)

    def datamodule(loader: Any) -> Any:
        made = Module(loader)
        made.mean = torch.zeros(4)
        return made

    dataset: Any = (lambda: Subset(Rows(), range(N))) if module is HookReplacesInDataset else Rows
    attack = Attack(
        module,
        dataset=dataset,
        callbacks=lambda: [L.pytorch.callbacks.LambdaCallback()],
        datamodule=datamodule if module is HookOnDataModule else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(REFUSED, match="a hook computed from|writes dataset"):
            attack.moved(monkeypatch, engine)


# -- other records, looked up by the step ------------------------------------------------------------------------------

ROWS = Rows()


class Partner(Plain):
    """Mixup with a partner from the data set, as one would write it."""

    def partner(self) -> Tensor:
        return self.trainer.train_dataloader.dataset[N - 1][0]  # type: ignore[union-attr]

    def loss(self, x: Tensor, y: Tensor) -> Tensor | None:
        return super().loss(0.5 * x + 0.5 * self.partner(), y)


class PartnerKept(Partner):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ROWS

    def partner(self) -> Tensor:
        return self.rows[N - 1][0]


class PartnerTensor(PartnerKept):
    """A bank of all rows, without asking the data set."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = ROWS.x

    def partner(self) -> Tensor:
        return self.bank[N - 1]


class PartnerGlobal(Partner):
    def partner(self) -> Tensor:
        return ROWS.x[N - 1]


class PartnerOfDataModule(Partner):
    def partner(self) -> Tensor:
        return self.trainer.datamodule.rows.x.mean(0)  # type: ignore[attr-defined]


class PartnerByLoader(Partner):
    def partner(self) -> Tensor:
        return next(iter(DataLoader(ROWS, N)))[0].mean(0)  # type: ignore[no-any-return]


class PartnerByTrainLoader(Partner):
    def partner(self) -> Tensor:
        return next(iter(self.trainer.train_dataloader))[0].mean(0)  # type: ignore[arg-type, no-any-return]


class CentreOfTheData(Partner):
    """Of the data set, computed before each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(FEATURES)

    def on_train_epoch_start(self) -> None:
        self.centre = torch.stack([ROWS[i][0] for i in range(N)]).mean(0)

    def partner(self) -> Tensor:
        return self.centre


class CentreOfATensor(CentreOfTheData):
    def on_train_epoch_start(self) -> None:
        self.centre = ROWS.x.mean(0)


LOOKED_UP = [
    Partner, PartnerKept, PartnerTensor, PartnerGlobal, PartnerOfDataModule, PartnerByLoader, PartnerByTrainLoader,
    CentreOfTheData, CentreOfATensor,
]  # fmt: skip


@pytest.mark.parametrize("module", LOOKED_UP)
def test_a_step_that_looks_up_other_records_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def datamodule(loader: Any) -> Any:
        made = Module(loader)
        made.rows = loader.dataset
        return made

    of_module = datamodule if module is PartnerOfDataModule else None
    with pytest.raises(REFUSED, match="reads records from|memory of the train data set|computed from training records"):
        Attack(module, dataset=lambda: ROWS, datamodule=of_module).moved(monkeypatch)


class LooksAtTheData(Plain):
    """What is public of a data set, and a table that shares its memory but is the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ROWS
        self.register_buffer("table", ROWS.x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        loss = super().loss(x, y) + penalty / len(self.rows)  # type: ignore[operator]
        return loss + 0 * self.table.sum() / len(self.trainer.train_dataloader.dataset)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_step_may_ask_how_much_data_there_is(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(LooksAtTheData, dataset=lambda: ROWS).moved(monkeypatch, engine) <= LIMIT
    assert Rows.__getitem__.__qualname__ == "Rows.__getitem__"  # what was watched is put back


class Centring(Tensor):
    """A class of tensors that is called below ``vmap``, where it subtracts the mean over all rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: Tensor) -> Centring:
        made: Centring = Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)  # type: ignore[attr-defined]
        made.plain = plain  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map_only(Centring, lambda t: t.plain, args), **(kwargs or {}))
        mixes = func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and out.shape[-2] > 1
        return out - out.mean(-2, keepdim=True) if mixes else out


class OwnClassOfTensors(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Centring(torch.eye(FEATURES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor | None:
        return super().loss(x @ self.turn, y)


def test_a_class_of_tensors_that_is_called_below_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attack(OwnClassOfTensors).moved(monkeypatch) <= LIMIT


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_class_of_tensors_that_is_called_below_vmap_is_refused_there(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="a Centring, whose __torch_dispatch__ would be handed the whole"):
        Attack(OwnClassOfTensors).moved(monkeypatch, engine)
