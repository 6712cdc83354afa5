"""python -m benchmarks.overhead: the callback's share of a private CNN step, outside the engine.

A fit through Lightning with the tutorial CNN, batch 256, one thread. CPU time of the main thread inside each of the
callback's parts, and inside the engine; the first steps are left out. Then the accountant's timings.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import accountants
from benchmarks.document import replace_block
from benchmarks.measure import machine
from benchmarks.workloads import MeanLoss, tutorial_cnn
from lightning_lap2 import Lap2Privacy
from lightning_lap2.accounting import EpsilonForecast
from lightning_lap2.callback.release import releases
from lightning_lap2.callback.release.spending import Spending
from lightning_lap2.callback.session import FitSession
from lightning_lap2.sampling import PoissonBatchSampler

BATCH, WARM_UP = 256, 20
ENGINE, INSIDE = "engine (the step itself)", "- of it "
NOISE = f"{INSIDE}noise and division"


class Clock:
    """CPU milliseconds of wrapped calls, a list per part; a part inside another is counted in both."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        self._undo.append((owner, name, function))
        seen = self.parts.setdefault(part, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seen.append(1e3 * (time.thread_time() - start))

        setattr(owner, name, timed)

    def restore(self) -> None:
        for owner, name, function in reversed(self._undo):
            setattr(owner, name, function)


class Model(L.LightningModule):
    """The tutorial CNN, logging its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = tutorial_cnn(), MeanLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.criterion(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(engine: str, steps: int, folder: str) -> dict[str, list[float]]:
    """One fit; milliseconds per part and step."""
    from lightning_lap2.gradients.ghost import GhostEngine
    from lightning_lap2.gradients.vmap import VmapEngine

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60_000, 1, 28, 28), torch.randint(0, 10, (60_000,)))
    privacy = Lap2Privacy(eps=3.0, delta=1e-5, engine=engine)  # type: ignore[arg-type]
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, callbacks=[privacy], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    clock = Clock()
    clock.wrap({"ghost": GhostEngine, "vmap": VmapEngine}[engine], "accumulate", ENGINE)
    clock.wrap(PoissonBatchSampler, "_draw", "drawing the sample")
    clock.wrap(FitSession, "deliver", "pairing batch and draw")
    clock.wrap(FitSession, "release", "release")
    clock.wrap(Spending, "charge", f"{INSIDE}charge, with the journal on disk")
    clock.wrap(releases, "release_", NOISE)
    clock.wrap(privacy, "on_train_batch_end", "logging epsilon")
    clock.wrap(EpsilonForecast, "epsilon", f"{INSIDE}epsilon itself")
    try:
        trainer.fit(Model(), DataLoader(data, batch_size=BATCH, shuffle=True))
    finally:
        clock.restore()
    return clock.parts


def share_table(parts: dict[str, list[float]], engine: str) -> str:
    """Median milliseconds per part, and what all outside the engine is of the step."""
    medians = {part: statistics.median(seen[WARM_UP:]) for part, seen in parts.items()}
    outside = sum(v for part, v in medians.items() if part != ENGINE and not part.startswith(INSIDE))
    step = outside + medians[ENGINE]
    lines = [f"| engine={engine!r} | CPU ms per step | of the private step |", "|---|---|---|"]
    rows = {**medians, "all outside the engine": outside, "the same, without noise": outside - medians[NOISE]}
    return "\n".join([*lines, *(f"| {part} | {v:.3f} | {100 * v / step:.2f} % |" for part, v in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=["ghost", "vmap"], default=["ghost", "vmap"])
    parser.add_argument("--steps", type=int, default=200, help="steps of the fit (default: 200)")
    parser.add_argument("--no-accountants", action="store_true", help="leave the accountant's timings out")
    parser.add_argument("--update", type=Path, metavar="FILE", help="write the tables into this document, in place")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must exceed the {WARM_UP} that are left out")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    written = [f"{machine()}; {options.steps} steps."]
    print(written[0])
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            written.append(share_table(run(engine, options.steps, folder), engine))
            print("\n" + written[-1], flush=True)
    if options.update:
        replace_block(options.update, "python -m benchmarks.overhead", "\n\n".join(written))
    if not options.no_accountants:
        print()
        accountants.main()


if __name__ == "__main__":
    main()
