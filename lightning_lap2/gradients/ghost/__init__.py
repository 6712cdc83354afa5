"""The one-backward engine, built on the autograd graph of the user's loss."""

from __future__ import annotations

from lightning_lap2.gradients.ghost.engine import GhostEngine

__all__ = ["GhostEngine"]
