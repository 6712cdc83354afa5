"""The engines by name."""

from __future__ import annotations

from torch import nn

from lightning_lap2 import _validate
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.ghost import GhostEngine
from lightning_lap2.gradients.loop import LoopEngine
from lightning_lap2.gradients.vmap import VmapEngine

ENGINES: dict[str, type[Engine]] = {"vmap": VmapEngine, "ghost": GhostEngine, "loop": LoopEngine}


def make_engine(name: str, module: nn.Module, *, chunk_size: int | None = None) -> Engine:
    """The engine called ``name`` for ``module``.

    Raises:
        ValueError: an unknown name.
    """
    return ENGINES[_validate.choice("engine", name, ENGINES)](module, chunk_size=chunk_size)
