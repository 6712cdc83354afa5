"""Runs in every rank: ``python -m tests.sharded.job OUTPUT RANKS SCENARIO...``, see ``tests.ddp.job``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.ddp.job import RANK, Ranks, Result, main
from tests.helpers import LIGHTNING, quiet_trainer
from tests.sharded.models import Sharded, sentences, whole_weights

pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
__all__ = ["RANK"]


def trainer(ranks: Ranks, *callbacks: Any, **options: Any) -> Any:
    """A Trainer that shards over the ranks; a plain one for a single process."""
    parallel = {}
    if ranks.number > 1:
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=ranks.number, tensor_parallel_size=1)
        parallel = {"strategy": strategy, "devices": ranks.number}
    return quiet_trainer(pl, *callbacks, **{**parallel, **options})


def train(ranks: Ranks, module: Any, *callbacks: Any, accumulate: int = 1, steps: int = 3, **settings: Any) -> Result:
    """No noise, and every record in every step: nothing but the number of ranks differs from a run in one process."""
    callback = Lap2Privacy(**{"eps": math.inf, "noise_multiplier": 0.0, "max_grad_norm": 0.7, **settings})
    fit = trainer(ranks, callback, *callbacks, max_epochs=steps, accumulate_grad_batches=accumulate)
    fit.fit(module, sentences(12, 12 // ranks.number // accumulate))
    return {"weights": whole_weights(module), "steps": callback.steps, "engine": callback.report().engine,
            "dimension": callback.dimension}  # fmt: skip


def frozen_base(ranks: Ranks) -> Result:
    found = {}
    for engine in ("ghost", "vmap", "loop"):
        found[engine] = train(ranks, Sharded("lora", double=True), engine=engine)
    found["accumulate"] = train(ranks, Sharded("biases", double=True), accumulate=2)
    return found


def sharded_weights(ranks: Ranks) -> Result:
    found = {}
    for engine in ("ghost", "vmap", "loop"):
        found[engine] = train(ranks, Sharded("all", double=True), engine=engine)
    return found


SCENARIOS: dict[str, Callable[[Ranks], Result]] = {s.__name__: s for s in (frozen_base, sharded_weights)}

if __name__ == "__main__":
    main(SCENARIOS)
