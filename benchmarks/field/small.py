"""Small data, a quiet Trainer and other parts that several packages' cases share."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.field.cases import Run

GROUP_NORM = "a loop that puts `nn.GroupNorm` where `lightning_lap2.suggest(model)` names a BatchNorm"


def trainer(run: Run, **options: Any) -> Any:
    import lightning as L

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    length = {"max_steps": run.max_steps, "max_epochs": -1}
    if run.compares:
        quiet["precision"] = "64-true"
    return L.Trainer(
        callbacks=run.callbacks, accelerator="cpu", enable_model_summary=False, **length | quiet | options
    )  # fmt: skip


def random(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


def image(seed: int, side: int, channels: int = 3) -> Any:
    """``[C, H, W]`` in [0, 1)."""
    import torch

    return torch.rand(channels, side, side, generator=random(seed), dtype=torch.float32)


def with_group_norm(model: Any) -> Any:
    """``model``, its BatchNorms replaced in place."""
    import torch

    import lightning_lap2

    for found in lightning_lap2.suggest(model):
        if found.layer.startswith("BatchNorm"):
            home, _, name = found.path.rpartition(".")
            channels = model.get_submodule(found.path).num_features
            setattr(model.get_submodule(home), name, torch.nn.GroupNorm(math.gcd(4, channels // 2), channels))
    return model
