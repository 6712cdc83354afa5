"""What the pre-flight lets through, notes and refuses, engine by engine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lightning_lap2.gradients import Clipper, Engine, ParameterLayout, StepCall, UnsupportedModelError
from lightning_lap2.gradients.ghost import GhostEngine
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.preflight import PreflightResult, preflight
from lightning_lap2.gradients.vmap import VmapEngine

ENGINES = [LoopEngine, VmapEngine]
ALL = ("rows", "engine", "collate", "mixing", "agreement")


class Wrong(LoopEngine):
    """Stands for ``"ghost"`` with an operation that it does not see."""

    name = "ghost"

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        output = super().accumulate(call, layout, clipper, total)
        total[0] += 1e-2 * total.norm()
        return output


class Ghost(LoopEngine):
    """Stands for a ``"ghost"`` that is right."""

    name = "ghost"


class Step(nn.Module):
    """A module with a ``training_step`` given as a function of (module, batch)."""

    def __init__(self, step: Callable[[Any, Any], Any], net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.step = step

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("log reached the module")

    def log_dict(self, dictionary: Any) -> None:
        raise AssertionError("log_dict reached the module")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


def mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *middle, nn.Linear(8, 3))


def labelled(count: int = 8, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, generator=generator), i % 3) for i in range(count)]


def fly(
    step: Callable[[Any, Any], Any],
    net: nn.Module | None = None,
    *,
    engine: type[Engine] = LoopEngine,
    records: list[Any] | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    context: Callable[[], Any] | None = None,
) -> PreflightResult:
    torch.manual_seed(0)
    module = Step(step, net if net is not None else mlp())
    extra = {} if context is None else {"context": context}

    def call(batch: Any, count: int) -> StepCall:
        return StepCall((batch, 0), count, **extra)

    records = labelled() if records is None else records
    layout = ParameterLayout(module)
    return preflight(engine(module), module, layout, records=records, collate=collate, call=call)


def mean_loss(module: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(module.net(x), y)


def sum_loss(module: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(module.net(x), y, reduction="sum")


def weighted_by_hand(module: Any, batch: Any) -> Tensor:
    """A weighted mean that divides by the batch's own sum of weights, out of sight of the loss node."""
    x, y = batch
    losses = F.cross_entropy(module.net(x), y, reduction="none")
    weights = 1.0 + y.float()
    return (weights * losses).sum() / weights.sum()


def class_weighted(module: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(module.net(x), y, weight=torch.tensor([1.0, 2.0, 5.0]))


def contrastive(module: Any, batch: Any) -> Tensor:
    x, _ = batch
    a, b = F.normalize(module.net(x)), F.normalize(module.net(x + 0.1))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


def nt_xent(module: Any, batch: Any) -> Tensor:
    """Alone there is no negative: the loss is not finite."""
    x, _ = batch
    z = F.normalize(module.net(x))
    return (z @ z.T).masked_fill(torch.eye(len(x), dtype=torch.bool), float("-inf")).logsumexp(1).mean()


def mixup(module: Any, batch: Any) -> Tensor:
    x, y = batch
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 (as in the published code)
    other = torch.randperm(len(x))
    out = module.net(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])


def train_mixup(module: Any, batch: Any) -> Tensor:
    return mixup(module, batch) if module.training else mean_loss(module, batch)


def roll(module: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(module.net(0.7 * x + 0.3 * x.roll(1, 0)), y)


def standardised(module: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(module.net((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()), y)


def standardised_loss(module: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = F.cross_entropy(module.net(x), y, reduction="none")
    return losses.pow(2).mean().sqrt()


def hardest(module: Any, batch: Any) -> Tensor:
    """The batch's gradient is one example's: a weighted mean, but which one depends on the others."""
    x, y = batch
    return F.cross_entropy(module.net(x), y, reduction="none").max()


def needs_mates(module: Any, batch: Any) -> Tensor:
    x, y = batch
    if len(x) < 2:
        raise ValueError(f"too few: {x}")
    return F.cross_entropy(module.net(x), y)


def variational(module: Any, batch: Any) -> Tensor:
    x, y = batch
    out = module.net(x)
    return F.cross_entropy(out + 0.5 * torch.randn_like(out), y)


def numpy_noise(module: Any, batch: Any) -> Tensor:
    x, y = batch
    noise = torch.as_tensor(np.random.standard_normal(tuple(x.shape)), dtype=x.dtype)  # noqa: NPY002 (global)
    return F.cross_entropy(module.net(x + 0.3 * noise), y)


@pytest.mark.parametrize("engine", [*ENGINES, GhostEngine])
@pytest.mark.parametrize("step", [mean_loss, variational])
def test_a_mean_passes_everywhere(engine: type[Engine], step: Any) -> None:
    assert fly(step, engine=engine) == PreflightResult((), frozenset(), ALL, random=step is variational)


@pytest.mark.parametrize("engine", [*ENGINES, GhostEngine])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout(0.9), nn.AlphaDropout(0.3)])
def test_dropout_is_checked_in_train_mode(engine: type[Engine], layer: nn.Module) -> None:
    assert fly(mean_loss, mlp(layer), engine=engine) == PreflightResult((), frozenset(), ALL, random=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("step", "word"), [(sum_loss, "the sum of"), (class_weighted, "unequally"), (weighted_by_hand, "unequally")]
)
def test_sums_and_weighted_means_get_a_note(engine: type[Engine], step: Any, word: str) -> None:
    result = fly(step, engine=engine)
    assert len(result.notes) == 1
    assert word in result.notes[0]
    assert result.checked == ALL


@pytest.mark.parametrize("step", [sum_loss, weighted_by_hand])
def test_sums_and_weighted_means_are_not_for_ghost(step: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mean over examples.*engine='vmap'"):
        fly(step, engine=GhostEngine)


def test_ghost_takes_a_cross_entropys_own_means() -> None:
    result = fly(class_weighted, engine=GhostEngine)
    assert "unequally" in result.notes[0]
    assert result.checked == ALL


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "step", [contrastive, mixup, train_mixup, roll, standardised, standardised_loss, hardest, nt_xent]
)
def test_mixing_losses_are_refused(engine: type[Engine], step: Any) -> None:
    if step is mixup or step is train_mixup:
        # numpy's draws differ between runs, so only the halves of a batch tell
        match = "what one half of a batch contributes depends on the other half"
    else:
        match = "mixes the examples of a batch"
    with pytest.raises(UnsupportedModelError, match=match):
        fly(step, engine=engine)


def test_a_step_that_needs_mates() -> None:
    class Whole(Engine):
        name = "ghost"

        def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
            return None

    with pytest.raises(UnsupportedModelError, match=r"ValueError in needs_mates, line \d+ of test_preflight.py"):
        fly(needs_mates, engine=Whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_that_cannot_be_held_still(engine: type[Engine]) -> None:
    result = fly(numpy_noise, engine=engine)
    assert len(result.notes) == 1
    assert "draws random numbers that are not torch's" in result.notes[0]
    with pytest.raises(UnsupportedModelError, match="engine='ghost' cannot be checked"):
        fly(numpy_noise, engine=Ghost)


def test_draws_in_train_mode_only_are_checked_in_eval_mode() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return numpy_noise(module, batch) if module.training else mean_loss(module, batch)

    result = fly(step)
    assert result.checked == ALL
    assert "checked it in eval mode" in result.notes[0]


# -- the loss of language models


def token_loss(module: Any, batch: Any) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(module.net(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


def tokens(count: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 11, (count, 7), generator=generator)
    return [(row, torch.where(torch.arange(7) < 3 + i % 4, row, -100)) for i, row in enumerate(ids)]


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


@pytest.mark.parametrize("engine", ENGINES)
def test_token_weighted_language_model(engine: type[Engine]) -> None:
    result = fly(token_loss, language_model(), engine=engine, records=tokens())
    assert "unequally" in result.notes[0]
    assert fly(token_loss, language_model(), engine=GhostEngine, records=tokens()) == result


def masked_batch(records: list[Any]) -> Any:
    ids = torch.stack([r[0] for r in records])
    hidden = torch.bernoulli(torch.full(ids.shape, 0.5)).bool()
    return torch.where(hidden, 0, ids), torch.where(hidden, ids, -100)


def test_a_collate_that_masks_tokens_at_random() -> None:
    result = fly(token_loss, language_model(), records=tokens(), collate=masked_batch)
    assert result == PreflightResult((), frozenset(), ALL)


# -- padding and collate


def ragged(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2 + 2 * (i % 3), 5, generator=generator) for i in range(count)]


def padded_mean(module: Any, batch: Any) -> Tensor:
    return module.net(batch["x"]).mean(1).square().sum(-1).mean()


def masked_mean(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"][..., None]
    pooled = (module.net(batch["x"]) * mask).sum(1) / mask.sum(1)
    return pooled.square().sum(-1).mean()


def pad(records: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(r) for r in records])
    x = pad_sequence(records, batch_first=True)
    return {"x": x, "mask": (torch.arange(x.shape[1]) < lengths[:, None]).float()}


@pytest.mark.parametrize("engine", ENGINES)
def test_padding(engine: type[Engine]) -> None:
    assert fly(masked_mean, engine=engine, records=ragged(), collate=pad).checked == ALL
    with pytest.raises(UnsupportedModelError, match=re.escape("shape [2, 5] for a record alone and [6, 5]")):
        fly(padded_mean, engine=engine, records=ragged(), collate=pad)


def test_records_of_unlike_shapes_are_sought() -> None:
    alike_first = sorted(ragged(), key=len)[:2] * 3 + [max(ragged(), key=len)]
    with pytest.raises(UnsupportedModelError, match="padding to the longest"):
        fly(padded_mean, records=alike_first, collate=pad)


def test_a_collate_that_sorts_is_fine() -> None:
    def longest_first(records: list[Tensor]) -> Any:
        return pad(sorted(records, key=len, reverse=True))

    assert fly(masked_mean, records=ragged(), collate=longest_first).checked == ALL


def centred(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x - x.mean(0), y


def mixed_rows(records: list[Any]) -> Any:
    x, y = default_collate(records)
    share = float(np.random.uniform(0.2, 0.4))  # noqa: NPY002 (global)
    return (1 - share) * x + share * x.roll(1, 0), y


@pytest.mark.parametrize("collate", [centred, mixed_rows])
def test_a_collate_that_mixes(collate: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="at equal shapes"):
        fly(mean_loss, collate=collate)


def test_a_collate_with_numpys_draws_gets_a_note() -> None:
    def jittered(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x + 0.1 * torch.as_tensor(np.random.random(5), dtype=x.dtype), y  # noqa: NPY002 (global)

    result = fly(mean_loss, collate=jittered)
    assert "collate_fn draws random numbers" in result.notes[0]
    assert result.checked == ("rows", "engine", "mixing", "agreement")


@pytest.mark.parametrize("rows", [lambda r: r + r, lambda r: r[:-1] if len(r) > 1 else r])
def test_a_collate_with_another_number_of_rows(rows: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"returned \d rows for \d records"):
        fly(mean_loss, collate=lambda records: default_collate(rows(records)))


def test_a_collate_that_fails_on_one_record() -> None:
    def pairs(records: list[Any]) -> Any:
        assert len(records) > 1, records
        return default_collate(records)

    with pytest.raises(UnsupportedModelError, match=r"single record \(AssertionError in pairs, line"):
        fly(mean_loss, collate=pairs)


# -- engines


def test_an_engine_that_is_wrong() -> None:
    with pytest.raises(UnsupportedModelError, match=r"engine='ghost' does not reproduce.*engine='vmap'"):
        fly(mean_loss, engine=Wrong)


def test_the_engines_own_refusals_pass_through() -> None:
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        fly(mean_loss, mlp(nn.BatchNorm1d(8)))
    with pytest.raises(UnsupportedModelError, match="engine='loop'"):
        fly(lambda m, b: mean_loss(m, b) * (1 if b[0].sum().item() else 2), engine=VmapEngine)


def test_errors_of_the_users_code_pass_through() -> None:
    with pytest.raises(KeyError):
        fly(lambda m, b: {}["missing"])


# -- odd inputs


def test_poisoned_records_are_passed_over() -> None:
    records = labelled(6)
    records[0] = (torch.full((5,), float("nan")), 0)
    records[3] = (torch.full((5,), 1e38), 0)
    assert fly(mean_loss, records=records) == PreflightResult((), frozenset(), ALL)
    with pytest.raises(UnsupportedModelError, match="mixes"):
        fly(contrastive, records=records)


@pytest.mark.parametrize("records", [[], labelled(1), [(torch.full((5,), float("nan")), 0)] * 3])
def test_too_few_records_get_a_note(records: list[Any]) -> None:
    result = fly(mean_loss, records=records)
    assert "was not checked" in result.notes[0]
    assert result.checked == (("rows", "engine") if records else ())


def test_a_step_without_a_loss() -> None:
    assert "was not checked" in fly(lambda m, b: None).notes[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_records_do(engine: type[Engine]) -> None:
    assert fly(mean_loss, engine=engine, records=labelled(2)).checked == ALL
    with pytest.raises(UnsupportedModelError, match="mixes"):
        fly(roll, engine=engine, records=labelled(2))


@pytest.mark.parametrize("engine", [*ENGINES, Ghost])
def test_bf16_autocast_is_given_room(engine: type[Engine]) -> None:
    def bf16() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert fly(mean_loss, engine=engine, context=bf16).checked == ALL
    with pytest.raises(UnsupportedModelError, match="mixes"):
        fly(contrastive, engine=engine, context=bf16)


def test_a_dict_with_a_loss_and_unused_and_frozen_parameters() -> None:
    def step(module: Any, batch: Any) -> Any:
        return {"loss": mean_loss(module, (batch["x"], batch["y"])), "x": batch["x"]}

    net = mlp()
    net[0].weight.requires_grad_(False)
    net[1].unused = nn.Linear(2, 2)
    records = [{"x": x, "y": y} for x, y in labelled()]
    assert fly(step, net, records=records).checked == ALL


def test_a_step_that_logs() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        loss = mean_loss(module, batch)
        module.log("loss", loss)
        module.log_dict({"a": loss, "b": 2.0})
        return loss

    for engine in ENGINES:
        assert fly(step, engine=engine).logged_names == {"loss", "a", "b"}


def test_few_parameters_leave_no_false_fit() -> None:
    """Two parameters and four examples: any batch gradient is some combination of the examples'."""

    def regression(module: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(module.net(x)[:, 0], y.float())

    assert fly(regression, nn.Linear(5, 1)).notes == ()
    narrow = [(x[:1], y) for x, y in labelled()]
    assert fly(regression, nn.Linear(1, 1), records=narrow).notes == ()
    with pytest.raises(UnsupportedModelError, match="mixes"):
        fly(standardised_loss, nn.Linear(1, 3), records=narrow)
    with pytest.raises(UnsupportedModelError, match="mixes"):
        fly(lambda m, b: regression(m, b).sqrt(), nn.Linear(1, 1), records=narrow)


def test_messages_hold_no_values() -> None:
    for step in (roll, standardised, contrastive, hardest, sum_loss):
        with pytest.raises(UnsupportedModelError) as caught:
            fly(step, engine=GhostEngine)
        assert re.search(r"\d\.\d|e-\d", str(caught.value)) is None
        assert caught.value.__context__ is None


def test_random_generators_and_the_module_are_untouched() -> None:
    class Stateful(Step):
        def __init__(self, step: Any, net: nn.Module) -> None:
            super().__init__(step, net)
            self.calls = 0
            self.history: list[int] = []
            self.best: dict[str, Any] = {"n": [1]}
            self.register_buffer("seen", torch.zeros(3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            self.history.append(self.calls)
            self.best["n"].append(self.calls)
            self.best["new"] = 1
            torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002 (global)
            return self.step(self, batch)

    torch.manual_seed(0)
    module = Stateful(mean_loss, mlp(nn.Dropout(0.5)))
    module.net[2].eval()
    module.net[0].weight.grad = torch.ones(8, 5)
    grad = module.net[0].weight.grad
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 (global)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    modes = [m.training for m in module.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002 (global)
    preflight(
        VmapEngine(module), module, ParameterLayout(module), records=labelled(), collate=default_collate,
        call=lambda batch, count: StepCall((batch, 0), count),
    )  # fmt: skip
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.state_dict().keys() == before.keys()
    assert [m.training for m in module.modules()] == modes
    assert (module.calls, module.history, module.best) == (0, [], {"n": [1]})
    assert module.net[0].weight.grad is grad
    assert torch.equal(grad, torch.ones(8, 5))
    assert module.net[4 - 1].weight.grad is None
    assert "log" not in vars(module)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002 (global)
    assert random.getstate() == states[2]
