"""What a module holds beside its weights, and what of it a step may read and leave.

:mod:`walk` finds it, :mod:`guard` watches it over the steps of one batch, :mod:`provenance` knows what of it was
computed from public things alone.
"""

from lightning_lap2.gradients.step.state.guard import StateGuard, StateMemory
from lightning_lap2.gradients.step.state.provenance import Provenance

__all__ = ["Provenance", "StateGuard", "StateMemory"]
