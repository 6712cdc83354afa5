"""What a search draws from: a public, finite set of configurations."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = list[int]
"""One index for each name of a :class:`Space`; JSON-able."""


class Space:
    """A grid (name -> values; every combination is equally likely) or a list of configurations (each is).

    Args:
        given: a mapping from names to non-empty sequences, or a non-empty sequence of anything. A value that stands
            there several times is drawn as often.

    Raises:
        TypeError, ValueError: it is neither, or something in it is empty.
    """

    def __init__(self, given: Mapping[str, Sequence[Any]] | Sequence[Any]) -> None:
        if isinstance(given, Mapping):
            self._names: list[str] | None = list(given)
            values = [given[name] for name in given]
        elif _is_list(given):
            self._names, values = None, [given]
        else:
            raise TypeError(
                f"space must be a list of configurations or a mapping from names to lists of values, got {given!r}"
            )
        if not values:
            raise ValueError("space must name at least one hyperparameter, got an empty mapping")
        for name, found in zip(self._names or ["the list"], values, strict=True):
            if not isinstance(name, str):
                raise TypeError(f"space must have strings as names, got {name!r}")
            if not _is_list(found):
                raise TypeError(f"space must give a list of values for {name!r}, got {found!r}")
            if not len(found):
                raise ValueError(f"space must not be empty, but {name!r} has no values")
        self._values = [list(found) for found in values]

    @property
    def names(self) -> list[str]:
        """Of a grid; empty for a list of configurations."""
        return list(self._names or ())

    @property
    def size(self) -> int:
        """Number of configurations."""
        return math.prod(map(len, self._values))

    def draw(self, below: Callable[[int], int]) -> Choice:
        """One of them at random; ``below(n)`` gives a uniform integer in [0, n)."""
        return [below(len(found)) for found in self._values]

    def config(self, choice: Choice) -> Any:
        """A copy of its own, so that no run can change what the next ones see."""
        values = copy.deepcopy([found[i] for found, i in zip(self._values, choice, strict=True)])
        return values[0] if self._names is None else dict(zip(self._names, values, strict=True))

    def fingerprint(self) -> str:
        """Equal for equal spaces: by which a resumed search knows its own."""
        content = json.dumps([self._names, self._values], default=repr)
        return hashlib.sha256(content.encode()).hexdigest()


def _is_list(found: Any) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, (str, bytes))
