"""Privacy accounting for Laplace noise with l2 clipping. Imports numpy and scipy, never torch or Lightning."""

from __future__ import annotations

from lightning_lap2.accounting.accountant import MajorizedAccountant
from lightning_lap2.accounting.budget import NoFiniteNoiseError
from lightning_lap2.accounting.calibration import (
    ClipAndScale,
    calibrate_noise_multiplier,
    optimize_clip_and_scale,
)
from lightning_lap2.accounting.families import GAUSSIAN, LAPLACE, LAPLACE_L1
from lightning_lap2.accounting.family import FAMILIES, Family, Noise, family_of, noise_of, register_mechanism
from lightning_lap2.accounting.forecast import EpsilonForecast
from lightning_lap2.accounting.release import Release, UnsoundBoundWarning
from lightning_lap2.accounting.routes.best import register_route
from lightning_lap2.accounting.routes.moments import log_moments
from lightning_lap2.choices import BOUNDS, MECHANISMS

__all__ = [
    "BOUNDS",
    "FAMILIES",
    "GAUSSIAN",
    "LAPLACE",
    "LAPLACE_L1",
    "MECHANISMS",
    "ClipAndScale",
    "EpsilonForecast",
    "Family",
    "MajorizedAccountant",
    "NoFiniteNoiseError",
    "Noise",
    "Release",
    "UnsoundBoundWarning",
    "calibrate_noise_multiplier",
    "family_of",
    "log_moments",
    "noise_of",
    "optimize_clip_and_scale",
    "register_mechanism",
    "register_route",
]
