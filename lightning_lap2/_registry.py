"""What can be added to the library from outside (docs/extending.md): by name, once, and told of in reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from lightning_lap2 import _validate

Value = TypeVar("Value")


class Registry(Mapping[str, Value]):
    """Names of one kind, the library's own and those that were added.

    Args:
        what: of which kind, for people: "mechanism".
        own: the library's.
        on_trust: whether the guarantee rests on what is added; reports then name it.
    """

    def __init__(self, what: str, own: Mapping[str, Value], *, on_trust: bool) -> None:
        self._what, self._own, self._on_trust = what, dict(own), on_trust
        self._added: dict[str, Value] = {}
        REGISTRIES.append(self)

    def own(self, values: Mapping[str, Value]) -> None:
        """Names the library's own, where they are made after the registry."""
        self._own.update(values)

    def add(self, name: str, value: Value) -> None:
        """Adds ``value`` as ``name``.

        Raises:
            TypeError, ValueError: no name, or one that is taken. What was computed under a name is kept (in ledgers,
                in caches), so its meaning does not change within a process.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a {self._what} must be a string that is not empty, got {name!r}")
        if name in self:
            raise ValueError(
                f"{self._what} {name!r} is known already, and what was computed with it is kept: choose another name"
                + ("" if name in self._own else ", or start a new process")
            )
        self._added[name] = value

    def chosen(self, setting: str, name: object) -> Value:
        """What is known by ``name``.

        Raises:
            TypeError, ValueError: nothing is; the message names the setting, its value and the names there are.
        """
        return self[_validate.choice(setting, name, tuple(self))]

    @property
    def trusted(self) -> tuple[str, ...]:
        """Names that were added, where the guarantee rests on them."""
        return tuple(self._added) if self._on_trust else ()

    @property
    def what(self) -> str:
        return self._what

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._added

    def __getitem__(self, name: str) -> Value:
        return self._own[name] if name in self._own else self._added[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._added

    def __len__(self) -> int:
        return len(self._own) + len(self._added)


REGISTRIES: list[Registry[Any]] = []


def trusted() -> tuple[str, ...]:
    """What was added in this process and is trusted as the library's own code is: "mechanism 'logistic'"."""
    return tuple(f"{registry.what} {name!r}" for registry in REGISTRIES for name in registry.trusted)
