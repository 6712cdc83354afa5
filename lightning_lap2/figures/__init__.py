"""The numbers behind the paper's figures that need no training (numpy), and their drawing (matplotlib)."""

from __future__ import annotations

from lightning_lap2.figures.curves import FIGURES, build
from lightning_lap2.figures.model import Curve, Figure, Panel, Setting

__all__ = ["FIGURES", "Curve", "Figure", "Panel", "Setting", "build"]
