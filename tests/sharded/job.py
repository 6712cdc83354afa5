"""Runs in every rank: ``python -m tests.sharded.job OUTPUT RANKS SCENARIO...``, see ``tests.ddp.job``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_lap2.gradients.step.replacing import replaced
from lightning_lap2.gradients.step.state import content
from lightning_lap2.noise.grid import spacing
from tests.ddp.job import RANK, Ranks, Result, ledger_of, main
from tests.helpers import LIGHTNING, budget_for, part_spy, quiet_trainer, watched_releases
from tests.sharded.models import Ragged, Sharded, hugging_face, of_the_benchmarks, padded, sentences, whole_weights

pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2


def strategy(ranks: Ranks, **options: Any) -> Any:
    return pl.strategies.ModelParallelStrategy(
        **{"data_parallel_size": ranks.number, "tensor_parallel_size": 1, **options}
    )


def trainer(ranks: Ranks, *callbacks: Any, **options: Any) -> Any:
    """A Trainer that shards over the ranks; a plain one for a single process."""
    parallel = {"strategy": strategy(ranks), "devices": ranks.number} if ranks.number > 1 else {}
    return quiet_trainer(pl, *callbacks, **{**parallel, **options})


def train(
    ranks: Ranks,
    module: Any,
    *callbacks: Any,
    accumulate: int = 1,
    data: Any = None,
    validated: bool = False,
    **settings: Any,
) -> Result:
    """No noise, and every record in every step: nothing but the number of ranks differs from a run in one process."""
    callback = Lap2Privacy(**{"eps": math.inf, "noise_multiplier": 0.0, "max_grad_norm": 0.7, **settings})
    fit = trainer(ranks, callback, *callbacks, max_epochs=2, accumulate_grad_batches=accumulate)
    loader = sentences(8, 8 // ranks.number // accumulate) if data is None else data
    validation = [sentences(4, 2)] if validated else []
    for held_out in validation:
        fit.validate(module, held_out, verbose=False)
    fit.fit(module, loader, *validation)
    return {
        "weights": whole_weights(module),
        "engine": callback.report().engine,
        "dimension": callback.dimension,
        "threshold": callback.clipping_threshold,
    }


# -- no noise: as one process -----------------------------------------------------------------------------------------


def frozen_base(ranks: Ranks) -> Result:
    """Adapters replicated beside a sharded base."""
    found = {engine: train(ranks, Sharded("lora", double=True), engine=engine) for engine in ("ghost", "vmap", "loop")}
    found["biases, accumulated"] = train(ranks, Sharded("biases", double=True), accumulate=2)
    found["fp32"] = train(ranks, Sharded("lora"))
    found["the benchmarks'"] = train(ranks, Sharded("head", double=True, net=of_the_benchmarks))
    found["each rank its own weights"] = train(ranks, Sharded("lora", double=True, adapters_seed=RANK))
    return found


class Unfreezing(pl.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
    """All of a block trains from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        pass

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            for parameter in module.model.blocks[1].parameters():
                parameter.requires_grad_(True)


def trained_shards(ranks: Ranks) -> Result:
    """Weights that are sharded and train."""
    found = {engine: train(ranks, Sharded("all", double=True), engine=engine) for engine in ("ghost", "vmap", "loop")}
    found["fp32"] = train(ranks, Sharded("all"))
    found["validated"] = train(ranks, Sharded("all", double=True), validated=True)
    found["unfrozen"] = train(ranks, Sharded("head", double=True), Unfreezing(), validated=True)
    # one record a rank and part, for which the ghost engine has another way where weights are whole
    found["by one"] = train(ranks, Sharded("all", double=True), accumulate=8 // ranks.number)
    found["accumulated"] = train(ranks, Sharded("head", double=True), accumulate=2)
    found["beside replicated"] = train(ranks, Sharded("lora, norms sharded", double=True))
    for clipping in ("per_layer", "adaptive", "automatic"):
        found[clipping] = train(ranks, Sharded("all", double=True), clipping=clipping, max_grad_norm=0.2)
    found["chunks"] = train(ranks, Sharded("all", double=True), chunk_size=2, engine="ghost")
    found["kept after forward"] = train(ranks, Sharded("all", double=True, reshard_after_forward=False))
    found["one group"] = train(ranks, Sharded("all", double=True, only_root=True))
    found["the benchmarks'"] = train(ranks, Sharded("all", double=True, net=of_the_benchmarks))
    found["columns"] = train(ranks, Sharded("all", double=True, net={"width": 8}, shard_placement_fn=by_columns))
    found["tied"] = train(ranks, Sharded("all", double=True, net={"tied": True}))
    found["weights derived"] = train(ranks, Sharded("all", double=True, net={"derived": True}))
    found["a penalty on shards"] = train(ranks, Sharded("all", double=True, beside=block_penalty), engine="vmap")
    found["a penalty"] = train(ranks, Sharded("all", double=True, beside=lambda m: m.model.head.weight.square().sum()))
    found["repeated"] = train(ranks, Sharded("all", double=True, net={"repeated": True}))
    for engine in ("ghost", "loop"):
        found[f"unused {engine}"] = train(ranks, Sharded("all", double=True, net={"unused": True}), engine=engine)
    for engine in ("ghost", "loop"):
        net = {"checkpointed": True, "repeated": True}
        found[f"checkpointed {engine}"] = train(ranks, Sharded("all", double=True, net=net), engine=engine)
    found["spread"] = train(ranks, Sharded("all", double=True, net={"spread": True}))
    return found


def block_penalty(module: Any) -> Any:
    return sum(p.square().sum() for p in module.model.blocks[0].parameters())


def by_columns(parameter: Tensor) -> Shard:
    """Even numbers of columns in two, the rest by rows."""
    return Shard(1 if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else 0)


def replicas_of_shards(ranks: Ranks) -> Result:
    """HSDP, two by two."""
    mesh = (2, 2) if ranks.number == 4 else None
    return {
        "ghost": train(ranks, Sharded("all", double=True, mesh=mesh), clipping="adaptive"),
        "frozen base": train(ranks, Sharded("lora", double=True, mesh=mesh)),
    }


def pretrained_decoders(ranks: Ranks) -> Result:
    """Of transformers and peft."""
    return {trained: train(ranks, Sharded(trained, double=True, net=hugging_face)) for trained in ("lora", "all")}


def different_lengths(ranks: Ranks) -> Result:
    """Records of different lengths run in groups of one length: ranks make different numbers of passes."""
    found = {}
    for engine in ("ghost", "vmap", "loop"):
        data = DataLoader(Ragged(8), batch_size=8 // ranks.number, collate_fn=padded)
        found[engine] = train(ranks, Sharded("all", double=True), data=data, engine=engine)
    return found


def low_precision(ranks: Ranks) -> Result:
    """bf16 by the Trainer and by FSDP's own policy; the report's word for it."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, options, precision in (
        ("true", {}, "bf16-true"),
        ("mixed", {}, "bf16-mixed"),
        ("policy", {"mp_policy": policy}, "32-true"),
    ):
        for trained in ("lora", "all") if name == "policy" else ("all",):
            callback = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, max_grad_norm=0.7)
            module = Sharded(trained, **(options if ranks.number > 1 else {}))
            trainer(ranks, callback, max_epochs=2, precision=precision).fit(module, sentences(8, 8 // ranks.number))
            found[f"{name} {trained}"] = whole_weights(module)
    return found


# -- noise ------------------------------------------------------------------------------------------------------------


def noise_once(ranks: Ranks) -> Result:
    """Releases that are almost nothing but noise: of each rank what it holds, and the gradients that came of it."""
    found = {}
    mesh = (2, 2) if ranks.number == 4 else None
    for trained in ("all", "lora, norms sharded"):
        callback = Lap2Privacy(eps=math.inf, noise_multiplier=20.0, max_grad_norm=1e-3, noise_seed=3)
        module, kept = Sharded(trained, mesh=mesh, rate=0.0), []

        class Gradients(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                kept.append(whole_weights(module, gradients=True))  # noqa: B023

        trainer(ranks, callback, Gradients(), max_steps=24, max_epochs=-1).fit(module, sentences(24, 2))
        found[trained] = torch.stack(kept) * callback.expected_batch_size
        found[f"{trained} scale"] = callback.scale
        found[f"{trained} grid"] = spacing(callback.scale)
    return found


def empty_draws(ranks: Ranks) -> Result:
    """About one record a rank, so that in many steps some ranks drew nothing; with logs that wait for each other."""
    found = {}
    for trained, engines in (("lora", ("ghost",)), ("all", ("ghost", "loop"))):
        for engine in engines:
            callback, spy = Lap2Privacy(eps=8.0, engine=engine, noise_seed=1), part_spy(pl)
            module = Sharded(trained, synchronised=True)
            fit = trainer(ranks, callback, spy, max_steps=8, max_epochs=-1)
            fit.fit(module, sentences(12, 1))
            found[f"{trained} {engine}"] = {
                "counts": [part.count for part in spy.parts],
                "weights": whole_weights(module),
                "ledger": ledger_of(callback),
                "logged": float(fit.callback_metrics["train_loss_epoch"]),
            }
    return found


# -- what is refused, and how a rank that fails ends ------------------------------------------------------------------


def message_of(ranks: Ranks, module: Any, fit: Any = None, **settings: Any) -> str:
    callback = Lap2Privacy(**{"eps": 8.0, **settings})
    fit = fit or trainer(ranks, callback, max_epochs=2)
    try:
        fit.fit(module, sentences(8, 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_rank_fails(ranks: Ranks) -> Result:
    """In its second epoch, in the middle of a layer."""

    def hook(module: Any) -> None:
        if RANK == 1 and module.current_epoch == 1:
            raise ArithmeticError("one rank fails")

    after = Sharded("all")
    found: Result = {
        trained: [message_of(ranks, Sharded(trained, inside=hook), engine=engine) for engine in ("ghost", "loop")]
        for trained in ("lora", "all")
    }
    # and the same processes go on
    return found | {"after": message_of(ranks, after), "weights": whole_weights(after)}


def steps_refused(ranks: Ranks) -> Result:
    """What an honest step might do with a sharded parameter, or with other ranks."""

    def full_tensor(module: Any) -> Any:
        return module.model.blocks[0].norm1.weight.full_tensor().square().sum()

    def local(module: Any) -> Any:
        return module.model.blocks[0].norm1.weight.to_local().square().sum()

    def gathered(module: Any) -> Any:
        torch.distributed.all_reduce(torch.ones(3))

    def unsharded(module: Any) -> Any:
        module.model.blocks[0].unshard()

    found = {}
    for engine, asked in (
        ("auto", (block_penalty, gathered)),
        ("loop", (full_tensor, local, block_penalty, unsharded)),
    ):
        for beside in asked:
            module = Sharded("all", beside=beside)
            found[f"{beside.__name__} {engine}"] = message_of(ranks, module, engine=engine)
    return found


def settings_refused(ranks: Ranks) -> Result:
    class Distributed(Sharded):
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            head = self.model.head
            head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))

    class Halves(Sharded):
        """Sharded on one rank each: nothing sums over them."""

        def configure_model(self) -> None:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])

    found = {
        "distributed": message_of(ranks, Distributed("all")),
        "halves": message_of(ranks, Halves("all")),
        "offload": message_of(ranks, Sharded("all", offload_policy=CPUOffloadPolicy(pin_memory=False))),
    }
    fit = quiet_trainer(
        pl,
        Lap2Privacy(eps=8.0),
        devices=ranks.number,
        strategy=strategy(ranks, data_parallel_size=1, tensor_parallel_size=ranks.number),
    )
    found["tensor parallel"] = message_of(ranks, Sharded("all", whole=True), fit)

    class Drifting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            with torch.no_grad():
                module.model.blocks[0].qkv.a.add_(RANK)

    fit = trainer(ranks, Lap2Privacy(eps=8.0), Drifting(), max_epochs=2)
    found["drifting"] = message_of(ranks, Sharded("lora"), fit)
    return found


# -- checkpoints ------------------------------------------------------------------------------------------------------

RESUMABLE = {"eps": 6.0, "noise_multiplier": 1.5}
ADAM = {"optimizer": torch.optim.Adam, "rate": 0.01}


def go_on(ranks: Ranks, fit: Any, module: Any, callback: Any, **options: Any) -> Result:
    fit.fit(module, sentences(16, 2), **options)
    return {
        "weights": whole_weights(module),
        "steps": callback.steps,
        "epsilon": callback.accountant.epsilon(delta=callback.delta),
        "ledger": ledger_of(callback),
    }


def checkpoints(ranks: Ranks) -> Result:
    """A run that stops and resumes is the run that does not; by folders of shards and by whole files, into DDP and
    back."""
    found: Result = {}
    for trained in ("lora", "all"):
        for whole in (False, True):
            name = f"{trained} {'whole' if whole else 'shards'}"
            path = ranks.output / f"{trained}-{whole}.ckpt"
            seeded = {**RESUMABLE, "noise_seed": 5}
            results = []
            for epochs, options in ((2, {}), (1, {}), (2, {"ckpt_path": path})):
                callback, module = Lap2Privacy(**seeded), Sharded(trained, **ADAM)
                fit = trainer(
                    ranks, callback, max_epochs=epochs, strategy=strategy(ranks, save_distributed_checkpoint=not whole)
                )
                results.append(go_on(ranks, fit, module, callback, **options))
                if epochs == 1:
                    fit.save_checkpoint(path)
            found[name] = {"straight": results[0], "resumed": results[2]}
        # as a whole file into DDP, and from there back into shards
        callback, module = Lap2Privacy(**RESUMABLE), Sharded(trained, **ADAM)
        fit = quiet_trainer(pl, callback, strategy="ddp", devices=ranks.number, max_epochs=2)
        found[f"{trained} into ddp"] = go_on(
            ranks, fit, module, callback, ckpt_path=ranks.output / f"{trained}-True.ckpt"
        )
        fit.save_checkpoint(ranks.output / f"{trained}-ddp.ckpt")
        fit.strategy.barrier()
        callback, module = Lap2Privacy(**RESUMABLE), Sharded(trained, **ADAM)
        found[f"{trained} from ddp"] = go_on(
            ranks,
            trainer(ranks, callback, max_epochs=3),
            module,
            callback,
            ckpt_path=ranks.output / f"{trained}-ddp.ckpt",
        )
    return found


def resumed_on_more(ranks: Ranks) -> Result:
    """Checkpoints of two ranks, in shards."""
    found = {}
    for trained in ("lora", "all"):
        callback, module = Lap2Privacy(**RESUMABLE), Sharded(trained, **ADAM)
        path = ranks.output / f"{trained}-False.ckpt"
        found[trained] = go_on(ranks, trainer(ranks, callback, max_epochs=2), module, callback, ckpt_path=path)
    return found


def budget(ranks: Ranks) -> Result:
    """Money for exactly 7 steps; n is the whole model's."""
    found = {}
    for trained in ("lora", "all"):
        module = Sharded(trained, rate=0.01)
        n = sum(p.numel() for p in module.parameters() if p.requires_grad)
        eps = budget_for(7, noise_multiplier=1.5, sample_rate=2 * ranks.number / 40, dimension=n)
        callback = Lap2Privacy(eps=eps, noise_multiplier=1.5)
        fit = trainer(ranks, callback, max_epochs=50)
        fit.fit(module, sentences(40, 2))
        report = callback.report()
        found[trained] = {
            "steps": callback.steps,
            "n": (n, callback.dimension),
            "epsilon": (report.epsilon, eps),
            "world_size": report.world_size,
            "weights": whole_weights(module),
            "ledger": ledger_of(callback),
        }
    return found


# -- memory -----------------------------------------------------------------------------------------------------------


class Allocated(pl.Callback):  # type: ignore[name-defined, misc]
    """The most bytes that lived at once while the second step made its sums, beyond what lived when it began; to be put
    before Lap2Privacy, which releases them."""

    most = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.profiler = torch.profiler.profile(activities=activities, profile_memory=True)
            self.profiler.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.profiler.__exit__(None, None, None)
            events = self.profiler.profiler.kineto_results.events()
            changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
            self.most = max(itertools.accumulate(size for _, size in changes))


def largest_sum(ranks: Ranks) -> Result:
    """What lies in the flat sums of this rank, and the most that all tensors held while they were made; in
    shards, and under DDP."""
    found = {}
    for name, parallel in (("shards", {}), ("whole", {"strategy": "ddp"})):
        callback, allocated = Lap2Privacy(eps=math.inf, noise_multiplier=1.0, engine="ghost"), Allocated()
        module = Sharded("all", net={"width": 96, "blocks": 12})
        # without the guard's copies of small tensors, which are few in a large model
        with watched_releases() as seen, replaced(content, "_SMALL", 0):
            fit = trainer(ranks, allocated, callback, max_steps=2, max_epochs=-1, **parallel)
            fit.fit(module, sentences(4, 2))  # both of a rank's in every step
        found[name] = {"held": seen[0].after.numel(), "n": callback.dimension, "most": allocated.most}
    return found


SCENARIOS: dict[str, Callable[[Ranks], Result]] = {
    scenario.__name__: scenario
    for scenario in (
        frozen_base,
        trained_shards,
        replicas_of_shards,
        different_lengths,
        pretrained_decoders,
        low_precision,
        noise_once,
        empty_draws,
        one_rank_fails,
        steps_refused,
        settings_refused,
        checkpoints,
        resumed_on_more,
        budget,
        largest_sum,
    )
}

if __name__ == "__main__":
    main(SCENARIOS)
