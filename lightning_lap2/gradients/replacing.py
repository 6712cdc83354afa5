"""Attributes of modules and classes that are something else while the user's step runs, and put back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Replacements:
    """A few attributes that are replaced together.

    What stands in for an attribute is made from what is found there, once: anew only where something else is found, so
    that a function which the user has replaced between two steps is the one that is called.

    Args:
        wanted: owner, name, and from the original to what stands in for it.
    """

    def __init__(self, wanted: Iterable[tuple[Any, str, Callable[[Any], Any]]]) -> None:
        self._wanted = [_Place(*each) for each in wanted]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside they are replaced; afterwards each owner is as it was, an inherited attribute inherited again."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for place in self._wanted:
                owner, name = place.owner, place.name
                before = vars(owner).get(name, _ABSENT)
                undo.append((owner, name, before))
                setattr(owner, name, place.instead(getattr(owner, name) if before is _ABSENT else before))
            yield
        finally:
            for owner, name, before in reversed(undo):
                if before is not _ABSENT:
                    setattr(owner, name, before)
                elif name in vars(owner):
                    delattr(owner, name)


class _Place:
    """One attribute, the original that was last found there, and what stands in for that."""

    __slots__ = ("_instead", "_make", "_original", "name", "owner")

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.owner, self.name, self._make = owner, name, make
        self._original: Any = _ABSENT
        self._instead: Any = None

    def instead(self, original: Any) -> Any:
        if original is not self._original:
            self._original, self._instead = original, self._make(original)
        return self._instead
