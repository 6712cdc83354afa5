"""Argument checks of the accounting layer: each message names the argument, its value and the legal set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

MAX_STEPS = 2**53
"""Largest count of releases: beyond it a float no longer counts by ones."""


def _real(name: str, value: object, legal: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number in {legal}, got {value!r} of type {type(value).__name__}")
    return float(value)


def noise_multiplier(value: object, name: str = "noise_multiplier") -> float:
    """Noise scale over the clipping norm, in [0, inf]."""
    number = _real(name, value, "[0, inf]")
    if not number >= 0.0:
        raise ValueError(f"{name} must be in [0, inf], got {value!r}")
    return number


def sample_rate(value: object, name: str = "sample_rate") -> float:
    """Probability that an example enters a release, in [0, 1]."""
    number = _real(name, value, "[0, 1]")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
    return number


def dimension(value: object, name: str = "dimension") -> float:
    """Number of noised coordinates: a non-negative integer or ``math.inf``; returned as a float."""
    number = _real(name, value, "{0, 1, 2, ...} or inf")
    if not number >= 0.0 or (math.isfinite(number) and number != math.floor(number)):
        raise ValueError(f"{name} must be in {{0, 1, 2, ...}} or inf, got {value!r}")
    return number


def steps(value: object, name: str = "steps") -> int:
    """Number of releases, an integer in [0, 2**53]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer >= 0, got {value!r} of type {type(value).__name__}")
    if not 0 <= int(value) <= MAX_STEPS:
        raise ValueError(f"{name} must be an integer in [0, 2**53], got {value!r}")
    return int(value)


def delta(value: object, name: str = "delta") -> float:
    """Failure probability of (epsilon, delta), in [0, 1]."""
    number = _real(name, value, "[0, 1]")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
    return number


def eps(value: object, name: str = "eps") -> float:
    """Privacy loss bound of (epsilon, delta), in [0, inf]."""
    number = _real(name, value, "[0, inf]")
    if not number >= 0.0:
        raise ValueError(f"{name} must be in [0, inf], got {value!r}")
    return number


def blocks(value: object, name: str = "extra_blocks") -> tuple[tuple[float, float], ...]:
    """Pairs (dimension, noise multiplier) released beside the main block under the same coin."""
    return tuple(
        (dimension(n, f"{name} dimension"), noise_multiplier(m, f"{name} noise_multiplier"))
        for n, m in _rows(name, value, ("dimension", "noise_multiplier"))
    )


def layers(value: object, whole: float, name: str = "layers") -> tuple[tuple[float, float, int], ...]:
    """Triples (dimension, share, count) that split a vector of ``whole`` coordinates."""
    found = []
    for n, share, count in _rows(name, value, ("dimension", "share", "count")):
        part = _real(f"{name} share", share, "(0, inf)")
        if not 0.0 < part < math.inf:
            raise ValueError(f"{name} share must be in (0, inf), got {share!r}")
        found.append((dimension(n, f"{name} dimension"), part, steps(count, f"{name} count")))
    total = sum(n * count for n, _, count in found if count)
    if found and total != whole:
        raise ValueError(f"{name} must hold as many coordinates as dimension={whole!r}, got {total!r}")
    return tuple(found)


def _rows(name: str, value: object, fields: tuple[str, ...]) -> Iterable[Sequence[object]]:
    legal = f"({', '.join(fields)})"
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of {legal} tuples, got {value!r}")
    for item in value:
        if isinstance(item, (str, bytes)) or not isinstance(item, Sequence) or len(item) != len(fields):
            raise TypeError(f"{name} must hold {legal} tuples, got {item!r}")
        yield item
