"""The one-backward engine, built on the autograd graph of the user's loss."""

from __future__ import annotations

from lightning_lap2.gradients.ghost.engine import GhostEngine
from lightning_lap2.gradients.ghost.graph import Use
from lightning_lap2.gradients.ghost.rules import Scope, reduce_to, register_ghost_rule
from lightning_lap2.gradients.ghost.terms import Convolution, Dense, Outer, Rows, Term

__all__ = [
    "Convolution",
    "Dense",
    "GhostEngine",
    "Outer",
    "Rows",
    "Scope",
    "Term",
    "Use",
    "reduce_to",
    "register_ghost_rule",
]
