"""The engines by name, each loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from lightning_lap2 import _validate
from lightning_lap2.gradients.engine import Engine

ENGINES = {
    "vmap": ("lightning_lap2.gradients.vmap", "VmapEngine"),
    "ghost": ("lightning_lap2.gradients.ghost", "GhostEngine"),
    "loop": ("lightning_lap2.gradients.loop", "LoopEngine"),
}


def make_engine(name: str, module: nn.Module, *, chunk_size: int | None = None) -> Engine:
    """The engine called ``name`` for ``module``.

    Raises:
        ValueError: an unknown name.
    """
    home, kind = ENGINES[_validate.choice("engine", name, tuple(ENGINES))]
    engine: Engine = getattr(import_module(home), kind)(module, chunk_size=chunk_size)
    return engine
