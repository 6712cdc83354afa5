"""One argument, or entry of a file, at a time: each function returns it as its plain type, or raises.

A wrong type is a ``TypeError``, a wrong value a ``ValueError``, and the message names the argument, its value and the
legal set. What concerns more than one value, or an object, is a ``check_...`` where the object is known
(docs/decisions.md, "One word for each kind of check"). No torch here: accounting uses it too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=str)
MAX_STEPS = 2**53
"""Largest count of releases: beyond it a float no longer counts by ones."""


def real(name: str, value: Any) -> float:
    """``value`` as a float; bool, str and NaN are refused."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan")
    return number


def positive(name: str, value: Any, *, finite: bool = False) -> float:
    number = real(name, value)
    if not number > 0 or (finite and math.isinf(number)):
        raise ValueError(f"{name} must be positive{' and finite' if finite else ''}, got {value!r}")
    return number


def non_negative(name: str, value: Any) -> float:
    number = real(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return number


def probability(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    number = real(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return number


def open_unit(name: str, value: Any) -> float:
    """A number strictly between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value!r}")
    return number


def integer(name: str, value: Any, *, minimum: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value!r}")
    return int(value)


def dimension(name: str, value: Any) -> float:
    """Number of noised coordinates: a non-negative integer or ``math.inf``; as a float."""
    number = real(name, value)
    if number < 0 or (math.isfinite(number) and number != math.floor(number)):
        raise ValueError(f"{name} must be a non-negative integer or inf, got {value!r}")
    return number


def steps(name: str, value: Any) -> int:
    """Number of releases, an integer in [0, 2**53]."""
    number = integer(name, value, minimum=0)
    if number > MAX_STEPS:
        raise ValueError(f"{name} must be at most 2**53, got {value!r}")
    return number


def choice(name: str, value: Any, legal: Collection[Choice]) -> Choice:
    """``value``, one of ``legal``."""
    if not isinstance(value, str):
        raise TypeError(
            f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r} of type {type(value).__name__}"
        )
    for known in legal:
        if value == known:
            return known
    raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    return value


def texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list of strings, got {value!r}")
    return [text(name, part) for part in value]


def rows(name: str, value: Any, *fields: str) -> list[Sequence[Any]]:
    """A sequence of tuples that have one entry for each of ``fields``, which are not looked at."""
    legal = f"({', '.join(fields)})"
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of {legal} tuples, got {value!r}")
    found = list(value)
    for row in found:
        if isinstance(row, (str, bytes)) or not isinstance(row, Sequence) or len(row) != len(fields):
            raise TypeError(f"{name} must hold {legal} tuples, got {row!r}")
    return found
