"""A trial of the user's step on a few records before any data is spent: it explains, the guarantee does not rest on
it."""

from __future__ import annotations

from lightning_lap2.gradients.trial.trying import Trial, identical_views, try_step

__all__ = ["Trial", "identical_views", "try_step"]
