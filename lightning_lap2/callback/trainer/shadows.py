"""What is shadowed in a Trainer and its module for the length of one fit.

Instance attributes only (no class is ever touched), undone in one place, :meth:`Patches.undo`:

``trainer.strategy.process_dataloader``
    the train loader is replaced by a Poisson one. Here, because it runs after Lightning's own sampler injection and
    serves ``fit(dl)``, datamodules and ``train_dataloader()`` alike. No public hook does.
``trainer.fit_loop.setup_data``
    followed by the plan: data, dimension and ledger are known, and no batch was trained on yet. ``max_steps`` is capped
    here so that learning-rate schedules built from ``estimated_stepping_batches`` see the capped number.
``trainer.fit_loop.epoch_loop.on_run_start``
    preceded by aligning the sampler's accumulation windows with the Trainer's batch counter, which a resumed run
    knows only here.
``trainer.fit_loop.epoch_loop.advance``, ``on_advance_end``
    followed by checking that what was drawn is released.
``trainer.fit_loop.epoch_loop.automatic_optimization.run``, ``_make_closure``
    the step's own output goes to ``on_train_batch_end``; the optimizer's closure gives no value that can be used.
``trainer.strategy.batch_to_device``, ``module._on_before_batch_transfer``
    a train batch reaches the device, hooks and the step as :mod:`~lightning_lap2.callback.trainer.delivery` says.
``trainer.strategy.training_step``
    the engine runs the user's ``training_step`` for per-example gradients. No public hook lies between "batch ready"
    and "backward"; the module itself stays unpatched, and DistributedDataParallel.forward is never entered, so its
    reducer is never armed. Before the plan stands it refuses to run at all.
``trainer.strategy.all_gather``
    refused inside ``training_step`` on several ranks: it would bring other ranks' examples into a loss.
``trainer.fit_loop.epoch_loop.max_steps``, ``min_steps``, ``trainer.fit_loop.min_epochs``
    the last step that the budget affords; only where it is earlier than the Trainer's own.
hooks of the user's
    watched, see :mod:`~lightning_lap2.callback.trainer.user_hooks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_lap2.batches import ExampleBatch
from lightning_lap2.callback.trainer.delivery import find_examples
from lightning_lap2.callback.trainer.patches import Patches, withhold_loss
from lightning_lap2.errors import UnsupportedModelError


class Steps(Protocol):
    """What takes the place of Lightning's own steps."""

    in_step: bool
    """Whether the user's ``training_step`` runs."""

    def start_epoch(self, batch: int) -> bool:
        """An epoch begins at loader batch ``batch``; whether the loader's iterator was made for another one."""

    def deliver(self, batch: Any, examples: ExampleBatch) -> Any:
        """A train batch, on its way to the device; returns what hooks are shown."""

    def training_step(self, *args: Any) -> Any:
        """The gradients of a batch; returns a loss that has none."""

    def take_output(self) -> dict[str, Any]:
        """What the user's step returned."""

    def check_trained(self) -> None:
        """Every batch that was fetched went through the step."""

    def after_advance(self) -> None:
        """A part of the epoch loop is over."""


def shadow_data(patches: Patches, trainer: Any, *, loader: Callable[[Any], Any], ready: Callable[[], None]) -> None:
    """Until the plan stands.

    Args:
        loader: gives what is trained on instead of a train loader.
        ready: called once Lightning has set new train data up.
    """
    strategy, fit_loop = trainer.strategy, trainer.fit_loop
    process, setup = strategy.process_dataloader, fit_loop.setup_data

    def process_dataloader(given: Any) -> Any:
        given = process(given)
        return loader(given) if trainer.training else given

    def setup_data() -> None:
        before = fit_loop._combined_loader
        setup()
        if fit_loop._combined_loader is not None and fit_loop._combined_loader is not before:
            ready()

    def training_step(*args: Any) -> Any:
        raise RuntimeError("training_step before the privacy plan was made; please report this")

    patches.shadow(strategy, "process_dataloader", process_dataloader)
    patches.shadow(fit_loop, "setup_data", setup_data)
    patches.shadow(strategy, "training_step", training_step)


def shadow_steps(patches: Patches, trainer: Any, module: Any, steps: Steps) -> None:
    """From the plan to the end of the fit."""
    _shadow_delivery(patches, trainer, module, steps)
    _shadow_optimization(patches, trainer, steps)
    _shadow_epochs(patches, trainer.fit_loop.epoch_loop, steps)


def _shadow_delivery(patches: Patches, trainer: Any, module: Any, steps: Steps) -> None:
    to_device, before_transfer = trainer.strategy.batch_to_device, module._on_before_batch_transfer

    def batch_to_device(batch: Any, *args: Any, **options: Any) -> Any:
        examples = find_examples(batch)
        return to_device(batch, *args, **options) if examples is None else steps.deliver(batch, examples)

    def on_before_batch_transfer(batch: Any, *args: Any, **options: Any) -> Any:
        return batch if find_examples(batch) is not None else before_transfer(batch, *args, **options)

    patches.shadow(trainer.strategy, "batch_to_device", batch_to_device)
    patches.shadow(module, "_on_before_batch_transfer", on_before_batch_transfer)


def _shadow_optimization(patches: Patches, trainer: Any, steps: Steps) -> None:
    strategy, optimization = trainer.strategy, trainer.fit_loop.epoch_loop.automatic_optimization
    run, make_closure, gather = optimization.run, optimization._make_closure, strategy.all_gather

    def run_optimization(*args: Any, **options: Any) -> Any:
        run(*args, **options)
        return steps.take_output()

    def _make_closure(*args: Any, **options: Any) -> Any:
        return withhold_loss(make_closure(*args, **options), trainer)

    def all_gather(*args: Any, **options: Any) -> Any:
        if steps.in_step and trainer.world_size > 1:
            raise UnsupportedModelError(
                "training_step calls self.all_gather, which mixes the examples of all ranks (and would wait for "
                "ranks that drew fewer): log with sync_dist=True, or gather in on_train_batch_end"
            )
        return gather(*args, **options)

    patches.shadow(optimization, "run", run_optimization)
    patches.shadow(optimization, "_make_closure", _make_closure)
    patches.shadow(strategy, "training_step", steps.training_step)
    patches.shadow(strategy, "all_gather", all_gather)


def _shadow_epochs(patches: Patches, epoch_loop: Any, steps: Steps) -> None:
    on_run_start = epoch_loop.on_run_start

    def aligned(fetcher: Any) -> None:
        """Lightning counts windows from ``batch_progress.current.ready``, which a resumed run only knows here; the
        loader's iterator may have been made before, for another position."""
        ready = epoch_loop.batch_progress.current.ready
        iterator = fetcher.iterator
        stale = steps.start_epoch(ready)
        on_run_start(fetcher)
        if stale and fetcher.iterator is iterator:
            iter(fetcher)
            fetcher.fetched += ready

    def watched(advance: Callable[[Any], None]) -> Callable[[Any], None]:
        def and_checked(fetcher: Any) -> None:
            try:
                advance(fetcher)
            except StopIteration:  # on_train_batch_start returned -1
                steps.check_trained()
                raise
            steps.after_advance()

        return and_checked

    patches.shadow(epoch_loop, "on_run_start", aligned)
    for name in ("advance", "on_advance_end"):
        patches.shadow(epoch_loop, name, watched(getattr(epoch_loop, name)))
