"""What a Trainer has set up: its train loaders, and how it starts its processes."""

from __future__ import annotations

from typing import Any

from lightning_lap2.errors import UnsupportedSettingError


def check_loaders(trainer: Any, batches_per_epoch: float) -> None:
    """One loader, of whose length Lightning and the sampler think alike.

    Raises:
        UnsupportedSettingError: several loaders.
    """
    loop = trainer.fit_loop
    loaders = loop._combined_loader.flattened
    if len(loaders) != 1:
        raise UnsupportedSettingError(
            f"{len(loaders)} train loaders give one example several ways into a step; "
            "combine the data sets into one (torch.utils.data.ConcatDataset)"
        )
    if batches_per_epoch != loop.max_batches:
        raise RuntimeError(
            f"Lightning plans {loop.max_batches} batches per epoch, the sampler {batches_per_epoch}; please report this"
        )


def start_method(strategy: Any) -> str:
    """How processes of a job come about: ``"popen"`` from the script, others as copies of this process."""
    return getattr(strategy, "_start_method", "popen")
