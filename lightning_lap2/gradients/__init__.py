"""Per-example gradients, clipping and their sum (torch only; no Lightning)."""

from __future__ import annotations

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.clipping import Clipper, FlatClipper, make_clipper, register_clipping
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.parameters import ParameterLayout, make_layout, reshard
from lightning_lap2.gradients.step.runner import StepRunner
from lightning_lap2.gradients.step.stepcall import StepCall

__all__ = [
    "Clipper",
    "Engine",
    "FlatClipper",
    "ParameterLayout",
    "StepCall",
    "StepRunner",
    "UnsupportedModelError",
    "make_clipper",
    "make_layout",
    "register_clipping",
    "reshard",
]
