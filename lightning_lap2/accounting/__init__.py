"""Privacy accounting for Laplace noise with l2 clipping. Imports numpy and scipy, never torch or Lightning."""

from __future__ import annotations

from lightning_lap2.accounting.accountant import MajorizedAccountant
from lightning_lap2.accounting.budget import NoFiniteNoiseError
from lightning_lap2.accounting.calibration import (
    ClipAndScale,
    calibrate_noise_multiplier,
    optimize_clip_and_scale,
)
from lightning_lap2.accounting.forecast import EpsilonForecast
from lightning_lap2.accounting.release import BOUNDS, MECHANISMS, Release, UnsoundBoundWarning
from lightning_lap2.accounting.routes.moments import log_moments

__all__ = [
    "BOUNDS",
    "MECHANISMS",
    "ClipAndScale",
    "EpsilonForecast",
    "MajorizedAccountant",
    "NoFiniteNoiseError",
    "Release",
    "UnsoundBoundWarning",
    "calibrate_noise_multiplier",
    "log_moments",
    "optimize_clip_and_scale",
]
