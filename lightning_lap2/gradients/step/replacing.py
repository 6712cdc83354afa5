"""Attributes of modules and classes that are something else while the user's step runs, and put back after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from types import ModuleType
from typing import Any

_ABSENT = object()
Wanted = tuple[Any, str, Callable[[Any], Any]]


class Replacements:
    """Attributes that are replaced together.

    What stands in for an attribute is made from what is found there, once: anew only where something else is found, so
    that a function which the user has replaced between two steps is the one that is called.

    Args:
        wanted: owner, name, and from the original to what stands in for it; no name of an owner twice.
    """

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        plain: list[Wanted] = []
        others: list[Wanted] = []
        for each in wanted:
            (plain if type(each[0]) is ModuleType else others).append(each)
        self._places = [kind(own) for kind, own in ((_InModules, plain), (_Elsewhere, others)) if own]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside they are replaced; afterwards each owner is as it was, an inherited attribute inherited again."""
        undo: list[tuple[_Places, list[Any]]] = []
        try:
            for places in self._places:
                undo.append((places, places.replace()))
            yield
        finally:
            for places, before in reversed(undo):
                places.put_back(before)


class _Places(ABC):
    """Some attributes: the originals that were last found there, and what stands in for them."""

    def __init__(self, wanted: list[Wanted]) -> None:
        self._owners = [owner for owner, _, _ in wanted]
        self._names = [name for _, name, _ in wanted]
        self._makers = [make for _, _, make in wanted]
        self._found: list[Any] = [_ABSENT] * len(wanted)
        self._instead: list[Any] = [None] * len(wanted)

    def _learn(self, originals: list[Any]) -> None:
        for k, original in enumerate(originals):
            if self._found[k] is not original:
                self._instead[k] = self._makers[k](original)
                self._found[k] = original

    @abstractmethod
    def replace(self) -> list[Any]:
        """Replaces all, or none where it raises; returns what was there."""

    @abstractmethod
    def put_back(self, before: list[Any]) -> None:
        """Makes the owners what they were."""


class _InModules(_Places):
    """The names of a plain module are entries of a dictionary: they are compared, and set, without asking it."""

    def __init__(self, wanted: list[Wanted]) -> None:
        super().__init__(wanted)
        self._spaces = [vars(owner) for owner in self._owners]

    def replace(self) -> list[Any]:
        before = list(map(dict.get, self._spaces, self._names))
        if not all(map(is_, before, self._found)):
            before = list(map(getattr, self._owners, self._names))  # names what is not there
            self._learn(before)
        self._set(self._instead)
        return before

    def put_back(self, before: list[Any]) -> None:
        self._set(before)

    def _set(self, values: list[Any]) -> None:
        deque(map(dict.__setitem__, self._spaces, self._names, values), maxlen=0)


class _Elsewhere(_Places):
    """A class must hear of each attribute, and a module of a class of its own may make them when asked."""

    def replace(self) -> list[Any]:
        pairs = list(zip(self._owners, self._names, strict=True))
        before = [vars(owner).get(name, _ABSENT) for owner, name in pairs]
        self._learn(
            [getattr(owner, name) if own is _ABSENT else own for (owner, name), own in zip(pairs, before, strict=True)]
        )
        for (owner, name), instead in zip(pairs, self._instead, strict=True):
            setattr(owner, name, instead)
        return before

    def put_back(self, before: list[Any]) -> None:
        for owner, name, own in zip(self._owners, self._names, before, strict=True):
            if own is not _ABSENT:
                setattr(owner, name, own)
            elif name in vars(owner):
                delattr(owner, name)


def replaced(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """``owner.name`` is ``value`` inside; afterwards ``owner`` is as it was."""
    return Replacements([(owner, name, lambda _: value)]).active()
