"""Runs in every rank: ``python -m tests.ddp.job OUTPUT RANKS SCENARIO...``.

Rank 0 is started by the harness, the others by the first Trainer (Lightning's own launcher runs this command again).
Each scenario writes ``OUTPUT/SCENARIO.RANK.pt``; a scenario that raises on every rank writes what it raised.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import BinaryAccuracy

from lightning_lap2.callback.release import ranks as ranks_module
from lightning_lap2.callback.release import releases as releases_module
from lightning_lap2.callback.release.window import release_
from lightning_lap2.noise import make_noise_source
from tests.helpers import (
    LIGHTNING,
    Viewed,
    budget_for,
    classifier,
    gradient_spy,
    loader,
    part_spy,
    quiet_trainer,
    records,
    watched_releases,
    weights,
)

pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
RANK = int(os.environ.get("LOCAL_RANK", "0"))
Result = dict[str, Any]
COUNTED: dict[str, Any] = {"clipping": "adaptive", "count_noise_scale": 3.0}


class Ranks:
    """What a scenario is given: where to write, how many ranks there are."""

    def __init__(self, output: Path, number: int) -> None:
        self.output, self.number = output, number

    def trainer(self, *callbacks: Any, **options: Any) -> Any:
        parallel = {"strategy": "ddp", "devices": self.number} if self.number > 1 else {}
        return quiet_trainer(pl, *callbacks, **{**parallel, **options})


def ledger_of(callback: Any) -> str:
    """The ledger as text, without what only rank 0 has (its journal, which the checksum covers)."""
    state = callback.state_dict()
    del state["journal"], state["checksum"]
    return json.dumps(state, sort_keys=True)


# -- scenarios --------------------------------------------------------------------------------------------------------


def same_as_one_process(ranks: Ranks, *, accumulate: int = 1) -> Result:
    """No noise, and every record in every step: nothing but the number of ranks differs from a run in one process."""
    callback = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, max_grad_norm=0.7)
    module = classifier(pl)
    trainer = ranks.trainer(callback, max_epochs=6, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(12, 12 // ranks.number // accumulate))
    return {"weights": weights(module), "steps": callback.steps, "q": callback.sample_rate}


def same_as_one_process_in_buckets(ranks: Ranks) -> Result:
    before, ranks_module.BUCKET = ranks_module.BUCKET, 3
    try:
        return same_as_one_process(ranks)
    finally:
        ranks_module.BUCKET = before


def same_as_one_process_accumulating(ranks: Ranks) -> Result:
    return same_as_one_process(ranks, accumulate=2)


def several_views_of_each_example(ranks: Ranks) -> Result:
    """As above, with three views of each record: were they not in one batch of one rank, clipping would differ."""
    callback = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, max_grad_norm=0.7, augmentations=3)
    module = classifier(pl)
    seen: list[int] = []

    class Rows(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            # a part of a draw may be empty, and then shows a template
            count = callback._session._part.count
            assert len(batch[0]) == 3 * max(count, 1)
            seen.append(3 * count)

    trainer = ranks.trainer(callback, Rows(), max_epochs=6, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(Viewed(12, 3), batch_size=12 // ranks.number // 2))
    return {"weights": weights(module), "steps": callback.steps, "q": callback.sample_rate, "rows": sum(seen)}


def laplace_noise_once(ranks: Ranks) -> Result:
    """Gradients are (almost) nothing but noise: 100,003 parameters that no loss touches."""
    torch.manual_seed(5)
    callback = Lap2Privacy(eps=math.inf, noise_multiplier=3.0, max_grad_norm=0.5)
    spy = gradient_spy(pl)
    module = classifier(pl, unused=100_003, learning_rate=0.01)
    ranks.trainer(callback, spy, max_steps=6, max_epochs=-1).fit(module, loader(24, 1))
    noise = torch.stack([g[8:] * callback.expected_batch_size for g in spy.gradients])
    return {
        "noise": noise if RANK == 0 else noise[:, :1000].clone(),
        "weights": weights(module),
        "scale": callback.scale,
        "ledger": ledger_of(callback),
    }


def exact_releases(ranks: Ranks) -> Result:
    """What ``release_`` makes of sums that are known to the last bit, shared out over the ranks; and what came of the
    noise that each rank adds to its slice before the all-reduce, in float32."""
    ranks.trainer(Lap2Privacy(eps=math.inf, noise_multiplier=0.0), max_steps=1).fit(classifier(pl), loader(12, 1))
    values = 0.1 * torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    share = 0.01 * torch.randn(100_003, generator=torch.Generator().manual_seed(1 + RANK))
    whole = torch.zeros_like(values)
    for rank in range(ranks.number):
        whole += 0.01 * torch.randn(100_003, generator=torch.Generator().manual_seed(1 + rank))
    own = share + (values - whole if RANK == 0 else 0.0)
    total, before = own.clone(), own.clone()
    source = make_noise_source("aes", torch.device("cpu"), rank=RANK)
    release_(total, noise=source, scale=1.0, distribution="laplace", normaliser=1, release=0,
             ranks=ranks_module.Ranks(RANK, ranks.number))  # fmt: skip
    first, last = (100_003 * rank // ranks.number for rank in (RANK, RANK + 1))
    source.add_(before[first:last], 1.0, release=0)
    for added in (own, before):
        torch.distributed.all_reduce(added)
    return {"sum": own, "released": total, "noised before the sum": before}


def adaptive_threshold(ranks: Ranks) -> Result:
    """The count of adaptive clipping: each rank's own, what was released of them all, and where C went."""
    free = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, clipping="adaptive", max_grad_norm=0.1)
    ranks.trainer(free, max_epochs=6).fit(classifier(pl), loader(12, 12 // ranks.number))
    noisy = Lap2Privacy(eps=1e4, noise_multiplier=2.0, bound="joint", noise_seed=4, **COUNTED)
    module = classifier(pl, learning_rate=0.01)
    with watched_releases() as seen:
        ranks.trainer(noisy, max_steps=300, max_epochs=-1).fit(module, loader(24, 4))
    factors = torch.tensor([release.scale / COUNTED["count_noise_scale"] for release in seen], dtype=torch.float64)
    return {
        "threshold_without_noise": free.clipping_threshold,
        "own_counts": torch.stack([release.before[-1] for release in seen]).double(),
        "released": torch.stack([release.after[-1] for release in seen]).double() / factors * noisy.expected_batch_size,
        "threshold": noisy.clipping_threshold,
        "weights": weights(module),
        "ledger": ledger_of(noisy),
    }


def budget_beats_minimums(ranks: Ranks, *, accumulate: int = 1) -> Result:
    """Money for exactly 7 steps."""
    sizes = {"noise_multiplier": 1.5, "dimension": 8}
    expected = 2 * ranks.number * accumulate
    eps = budget_for(7, sample_rate=expected / 40, **sizes)
    callback = Lap2Privacy(eps=eps, noise_multiplier=1.5)
    module = classifier(pl)
    start, after = tuple(weights(module).tolist()), []

    class Weights(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            after.append(weights(module))

    trainer = ranks.trainer(
        callback, Weights(), max_epochs=50, min_epochs=3, min_steps=40, accumulate_grad_batches=accumulate
    )
    trainer.fit(module, loader(40, 2))
    path = ranks.output / f"budget-{accumulate}.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    again = Lap2Privacy(eps=eps, noise_multiplier=1.5)
    spent = ranks.trainer(again, max_epochs=50, accumulate_grad_batches=accumulate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spent.fit(classifier(pl), loader(40, 2), ckpt_path=path)
    return {
        "eps": eps,
        "epsilon": callback.epsilon,
        "steps": callback.steps,
        "global_step": trainer.global_step,
        "status": str(trainer.state.status),
        "weights": weights(module),
        "distinct_weights": len({tuple(w.tolist()) for w in after} - {start}),
        "ledger": ledger_of(callback),
        "resumed_steps": again.steps,
        "resumed_global_step": spent.global_step,
        "warned": any("already spent" in str(w.message) for w in caught),
    }


def budget_beats_minimums_accumulating(ranks: Ranks) -> Result:
    return budget_beats_minimums(ranks, accumulate=3)


def empty_draw_on_one_rank_only(ranks: Ranks) -> Result:
    """Synchronised logging, a metric object and a layer that the loss never uses."""

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        assert len(batch[0]) > 0, "training_step saw an empty batch"
        loss = module.loss(batch)
        module.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        module.accuracy(module.layer(batch[0]).argmax(1), batch[1])
        module.log("accuracy", module.accuracy, on_step=True, on_epoch=True)
        return loss

    callback, spy = Lap2Privacy(eps=8.0), part_spy(pl)
    module = classifier(pl, step=step, unused=5)
    module.accuracy = BinaryAccuracy()
    trainer = ranks.trainer(callback, spy, max_steps=100, max_epochs=-1)
    trainer.fit(module, loader(12, 1))
    return {
        "counts": [part.count for part in spy.parts],
        "steps": callback.steps,
        "expected": callback.expected_batch_size,
        "weights": weights(module),
        "ledger": ledger_of(callback),
        "logged": [float(trainer.callback_metrics[f"{name}_epoch"]) for name in ("train_loss", "accuracy")],
    }


def strategies_and_engines(ranks: Ranks) -> Result:
    """DDP's own options touch ``.grad`` and the reducer, which are never used; weights that differ between the ranks
    before training are those of rank 0 from its first step."""
    found = {}
    options = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True, "find_unused_parameters": True},
    }
    for name, arguments in options.items():
        for engine in ("vmap", "ghost", "loop"):
            strategy = pl.strategies.DDPStrategy(**arguments)
            callback = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, max_grad_norm=0.7, engine=engine)
            module = classifier(pl)
            if RANK > 0:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(1 + RANK)
            ranks.trainer(callback, strategy=strategy, max_epochs=6).fit(module, loader(12, 12 // ranks.number))
            found[f"{name} {engine}"] = weights(module)
    return found


def all_gather_in_training_step(ranks: Ranks) -> Result:
    """Ranks that draw different numbers of examples would call it different numbers of times."""

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = module.loss(batch)
        module.all_gather(loss.detach())
        return loss

    messages = []
    for engine in ("vmap", "ghost", "loop"):
        trainer = ranks.trainer(Lap2Privacy(eps=5.0, engine=engine), max_epochs=2)
        try:
            trainer.fit(classifier(pl, step=step), loader(24, 2))
        except RuntimeError as error:
            messages.append(str(error))
    return {"messages": messages}


def training_step_returns_none(ranks: Ranks) -> Result:
    """One rank skips some batches, another skips others; released and charged all the same."""

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 1 + RANK % 2:
            return None
        return module.loss(batch)

    callback, spy = Lap2Privacy(eps=3.0), gradient_spy(pl)
    module = classifier(pl, step=step)
    ranks.trainer(callback, spy, max_epochs=3).fit(module, loader(24, 2))
    return {
        "steps": callback.steps,
        "gradients": torch.stack(spy.gradients),
        "weights": weights(module),
        "ledger": ledger_of(callback),
    }


def seeded_runs_match(ranks: Ranks) -> Result:
    """With noise_seed two runs are one; without, ``seed_everything`` does not make them so."""
    found = []
    for seed in (3, 3, None, None):
        pl.seed_everything(42, verbose=False)
        module = classifier(pl)
        ranks.trainer(Lap2Privacy(eps=2.0, noise_seed=seed), max_epochs=2).fit(module, loader(24, 2))
        found.append(weights(module))
    return {"weights": torch.stack(found)}


def loggers_and_reports(ranks: Ranks) -> Result:
    """A TensorBoard logger on several ranks: who asks for ``log_dir`` alone would hang."""
    from lightning.pytorch.loggers import TensorBoardLogger

    callback = Lap2Privacy(eps=2.0)
    checkpoint = pl.callbacks.ModelCheckpoint(monitor="privacy/epsilon", mode="min")
    logger = TensorBoardLogger(ranks.output / "logs", name="ddp")
    trainer = ranks.trainer(callback, checkpoint, logger=logger, max_epochs=2)
    trainer.fit(classifier(pl), loader(24, 2))
    trainer.strategy.barrier()
    report = callback.report()
    return {
        "directory": str(trainer.log_dir),
        "world_size": report.world_size,
        "epsilon": report.epsilon,
        "best": str(checkpoint.best_model_path),
    }


def distributed_sampler_without_sampling(ranks: Ranks) -> Result:
    """A DistributedSampler that pads repeats examples; one that does not is charged once per pass."""
    messages = []
    for number in (13, 12):
        data = records(number)
        callback = Lap2Privacy(eps=50.0, sampling="none")
        trainer = ranks.trainer(callback, max_epochs=2)
        try:
            trainer.fit(classifier(pl), DataLoader(data, batch_size=2))
        except ValueError as error:
            messages.append(str(error))
    own = Lap2Privacy(eps=50.0, sampling="none")
    sampler = DistributedSampler(records(12), ranks.number, RANK, shuffle=True)
    ranks.trainer(own, max_epochs=2).fit(classifier(pl), DataLoader(records(12), batch_size=2, sampler=sampler))
    return {
        "messages": messages,
        "steps": callback.steps,
        "charges": callback.accountant.steps,
        "own_steps": own.steps,
        "own_charges": own.accountant.steps,
        "q": callback.sample_rate,
    }


def iterable_without_sampling(ranks: Ranks) -> Result:
    """An IterableDataset may give one record to several ranks."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(records(12))

    try:
        ranks.trainer(Lap2Privacy(eps=50.0, sampling="none"), max_epochs=1).fit(
            classifier(pl), DataLoader(Stream(), batch_size=2)
        )
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def shards_of_their_own(ranks: Ranks) -> Result:
    """Ranks that each hold a part of the data: as many rows, but not the same ones."""
    messages = []
    for dataset in (
        torch.utils.data.Subset(records(24), range(RANK, 24, 2)),
        torch.utils.data.random_split(records(24), [12, 12], generator=torch.Generator().manual_seed(RANK))[0],
        torch.utils.data.random_split(records(24), [12, 12], generator=torch.Generator().manual_seed(7))[0],
    ):
        try:
            trainer = ranks.trainer(Lap2Privacy(**RESUMABLE), max_epochs=1, use_distributed_sampler=False)
            trainer.fit(classifier(pl), DataLoader(dataset, batch_size=2))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}


class Owned(torch.utils.data.TensorDataset):
    """Twelve users of two records each."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(*records(24).tensors)
        self.user_id = [f"{prefix}{number % 12}" for number in range(24)]


def users(ranks: Ranks) -> Result:
    """Every user with both records in every release; then ranks with other ids, and with another number of records."""
    callback = Lap2Privacy(
        eps=math.inf, noise_multiplier=0.0, max_grad_norm=0.7, unit="user_id", records_per_unit=2, engine="loop"
    )
    module, seen = classifier(pl), part_spy(pl)
    trainer = ranks.trainer(callback, seen, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(Owned(), batch_size=12 // ranks.number // 2))
    messages = []
    if ranks.number > 1:
        for others in (Owned(f"zaphod{RANK}"), torch.utils.data.Subset(Owned(), range(RANK, 24))):
            try:
                trainer = ranks.trainer(Lap2Privacy(**RESUMABLE, unit="user_id"), max_epochs=1)
                trainer.fit(classifier(pl), DataLoader(others, batch_size=2))
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return {
        "weights": weights(module),
        "steps": callback.steps,
        "q": callback.sample_rate,
        "drawn": [unit for part in seen.parts for unit in part.records],
        "messages": messages,
    }


RESUMABLE = {"eps": 6.0, "noise_multiplier": 1.5}


def resume_what_one_process_left(ranks: Ranks) -> Result:
    """``one.ckpt`` lies in OUTPUT, written by a run in one process, with its journal; and back: ``several.ckpt``."""
    callback = Lap2Privacy(**RESUMABLE)
    trainer = ranks.trainer(callback, max_epochs=4)
    seen: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(callback.steps)

    trainer.callbacks.append(First())
    trainer.fit(classifier(pl), loader(24, 2), ckpt_path=ranks.output / "one.ckpt")
    trainer.save_checkpoint(ranks.output / "several.ckpt")
    return {
        "at_start": seen[0],
        "steps": callback.steps,
        "q": callback.sample_rate,
        "epsilon": callback.accountant.epsilon(delta=callback.delta),
        "ledger": ledger_of(callback),
    }


def resume_what_a_killed_run_owes(ranks: Ranks) -> Result:
    """``killed/last.ckpt`` is of a run that released more after it: every rank is charged, one journal is written."""
    directory = ranks.output / "killed"
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="again-{step}", save_top_k=-1)
    callback = Lap2Privacy(**RESUMABLE)
    seen: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(callback.steps)

    ranks.trainer(callback, checkpoint, First(), max_epochs=3).fit(
        classifier(pl), loader(24, 2), ckpt_path=directory / "last.ckpt"
    )
    return {"at_start": seen[0], "steps": callback.steps, "ledger": ledger_of(callback)}


def _noted_releases(output: Path) -> None:
    """Leaves ``pid.RANK`` in ``output``; each release made from now on adds a character to ``released.RANK``."""
    (output / f"pid.{RANK}").write_text(str(os.getpid()))
    original = releases_module.release_
    descriptor = os.open(output / f"released.{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def release_(*args: Any, **options: Any) -> None:
        os.write(descriptor, b".")
        original(*args, **options)

    releases_module.release_ = release_


def exception_on_rank(ranks: Ranks, *, failing: int) -> Result:
    """A rank raises in the middle of its second epoch: an error of the user's code, not seen by the others."""

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4 and failing == RANK and module.trainer.current_epoch == 1:
            raise ArithmeticError("one rank fails")
        return module.loss(batch)

    _noted_releases(ranks.output)
    callback = Lap2Privacy(eps=5.0)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=ranks.output / "checkpoints", every_n_train_steps=2)
    trainer = ranks.trainer(callback, checkpoint, max_epochs=50)
    try:
        trainer.fit(classifier(pl, step=step), loader(24, 2))
    except BaseException:
        result = {
            "steps": callback.report().steps,
            "patched": [
                name
                for owner in (trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop)
                for name in (
                    "process_dataloader",
                    "setup_data",
                    "training_step",
                    "all_gather",
                    "on_run_start",
                    "max_steps",
                )
                if name in vars(owner) and (name != "max_steps" or owner.max_steps != -1)
            ],
        }
        torch.save(result, ranks.output / f"failed.{RANK}.pt")
        raise
    return {}


def exception_on_rank_0(ranks: Ranks) -> Result:
    return exception_on_rank(ranks, failing=0)


def exception_on_rank_1(ranks: Ranks) -> Result:
    return exception_on_rank(ranks, failing=1)


def killed_from_outside(ranks: Ranks) -> Result:
    """Trains until the harness kills one rank."""
    _noted_releases(ranks.output)
    callback = Lap2Privacy(eps=5.0)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=ranks.output / "checkpoints", every_n_train_steps=5)
    ranks.trainer(callback, checkpoint, max_epochs=100_000).fit(classifier(pl), loader(24, 2))
    return {}


SCENARIOS: dict[str, Callable[[Ranks], Result]] = {
    scenario.__name__: scenario
    for scenario in (
        same_as_one_process,
        same_as_one_process_in_buckets,
        same_as_one_process_accumulating,
        several_views_of_each_example,
        laplace_noise_once,
        exact_releases,
        adaptive_threshold,
        budget_beats_minimums,
        budget_beats_minimums_accumulating,
        empty_draw_on_one_rank_only,
        strategies_and_engines,
        all_gather_in_training_step,
        training_step_returns_none,
        seeded_runs_match,
        loggers_and_reports,
        distributed_sampler_without_sampling,
        iterable_without_sampling,
        shards_of_their_own,
        users,
        resume_what_one_process_left,
        resume_what_a_killed_run_owes,
        exception_on_rank_0,
        exception_on_rank_1,
        killed_from_outside,
    )
}
FATAL = ("exception_on_rank_0", "exception_on_rank_1", "killed_from_outside")


def main(scenarios: dict[str, Callable[[Ranks], Result]]) -> None:
    output, number, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ranks = Ranks(output, number)
    for name in names:
        try:
            result = scenarios[name](ranks)
        except Exception as error:
            if name in FATAL:
                raise
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        torch.save(result, output / f"{name}.{RANK}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(SCENARIOS)
