"""The one walk through everything that a module holds.

Looked into: submodules, lists, tuples, dicts, sets, deques, and objects of the user's own classes, from the module and
from what its code reaches by name (globals and closures). Objects of libraries and files are leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

_REGISTERED = ("_parameters", "_buffers", "_modules")
# what nn.Module keeps for itself ("training" is watched: a step that switches modes is noticed), what the recorder
# and the trial shadow meanwhile, and what recurrent layers keep of their weights (tracing.way_through resets it)
_OWN = (frozenset(vars(nn.Module())) - {"training", *_REGISTERED}) | {
    "_trainer", "_fabric", "log", "log_dict", "print", "update", "forward", "compute", "reset",
    "_flat_weights", "_flat_weight_refs",
}  # fmt: skip
_LINKS = frozenset({"_trainer", "_fabric"})
_LIBRARIES = frozenset(
    {"builtins", "collections", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities",
     "torchmetrics", "transformers", "tokenizers", "peft", "numpy", "functools", "logging", "enum", "pathlib",
     "lightning_lap2"}
)  # fmt: skip
GONE = object()
"""In place of an entry that is not there."""


class Node:
    """A container as it was.

    Attributes:
        path: how the user's code reaches it.
        live: the container itself.
        items: a shallow copy of its entries by key, position or attribute.
    """

    __slots__ = ("_keys", "_values", "items", "live", "path")

    def __init__(self, path: str, live: Any, items: dict[Any, Any]) -> None:
        self.path, self.live, self.items = path, live, items
        self._values: list[Any] = []
        self._keys: list[Any] = []
        self.look()

    def look(self) -> None:
        """Remembers the container's present values, for :meth:`untouched`."""
        held = _held(self.live)
        self._values = list(held.values()) if isinstance(held, dict) else list(held)
        self._keys = list(held) if isinstance(held, dict) else []

    def untouched(self) -> bool:
        """Whether every entry is the object that was there at the last :meth:`look`: a quick sufficient condition."""
        held = _held(self.live)
        if len(held) != len(self._values):
            return False
        if isinstance(held, dict):
            return all(map(is_, held.values(), self._values)) and all(map(is_, held, self._keys))
        return all(map(is_, held, self._values))

    def same_entries(self) -> bool:
        """Whether it holds the very objects of :attr:`items` and no others, as far as :func:`entries` looks."""
        now = entries(self.live)
        return len(now) == len(self.items) and all(now.get(key, GONE) is old for key, old in self.items.items())

    @property
    def ordered(self) -> bool:
        """Whether entries have a place only, no key of their own."""
        return isinstance(self.live, list | tuple | set | deque)

    def changed(self, *, everything: bool = False) -> bool:
        """Whether it holds something else than ``items``."""
        now = entries(self.live, everything=everything)
        return now.keys() != self.items.keys() or not all(map(is_same, now.values(), self.items.values()))

    def differing(self, *, everything: bool = False) -> dict[Any, Any]:
        """Present values of the entries that are not what they were, :data:`GONE` for those that are no more."""
        now = entries(self.live, everything=everything)
        found = {k: v for k, v in now.items() if k not in self.items or not is_same(v, self.items[k])}
        return found | dict.fromkeys((k for k in self.items if k not in now), GONE)

    def restore(self, *, everything: bool = False) -> None:
        if isinstance(self.live, tuple) or not self.changed(everything=everything):
            return
        if self.ordered:
            refill(self.live, self.items.values())
        else:
            for key in self.differing(everything=everything):
                put(self.live, key, self.items.get(key, GONE))

    def name(self, key: Any) -> str:
        if not self.path:
            return str(key)
        for registered in _REGISTERED:
            if self.path.endswith(f".{registered}"):
                return f"{self.path.removesuffix(registered)}{key}"
        return f"{self.path}.{key}" if kind(self.live) == "object" else f"{self.path}[{key!r}]"


class Sight:
    """All containers at once: :meth:`Node.untouched` of each, in a few passes over one list.

    Args:
        nodes: as they are now; each must have been looked at last when all of them were.
    """

    __slots__ = ("_dicts", "_held", "_keys", "_objects", "_sizes", "_values", "nodes")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        # a tuple stays what it is
        held = [_held(node.live) for node in nodes if not isinstance(node.live, tuple)]
        self._objects = [node.live for node in nodes if node.live is not _held(node.live)]
        self._dicts = [vars(live) for live in self._objects]
        # views, which show what a dictionary holds now, whatever its class makes of `values`
        self._held = [dict.values(h) if isinstance(h, dict) else h for h in held]
        self._keys = [h for h in held if isinstance(h, dict)]
        self._sizes, self._values = self._look()

    def _look(self) -> tuple[list[int], list[Any]]:
        return list(map(len, self._held)), [*chain.from_iterable(self._held), *chain.from_iterable(self._keys)]

    def untouched(self) -> bool:
        """Whether no container holds anything else, in another place, than when this was made."""
        if not all(map(is_, map(vars, self._objects), self._dicts)):
            return False
        sizes, values = self._look()
        return sizes == self._sizes and all(map(is_, values, self._values))


def _held(value: Any) -> Any:
    return value if isinstance(value, list | tuple | dict | set | deque) else vars(value)


def refill(container: Any, values: Iterable[Any]) -> None:
    """Gives a list, deque or set other entries."""
    values = list(values)
    container.clear()
    if isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def put(container: Any, key: Any, value: Any) -> None:
    """Sets one entry of a list, deque, dict or of an object's attributes, or takes it away (:data:`GONE`)."""
    target = container if isinstance(container, list | deque | dict) else vars(container)
    if value is not GONE:
        target[key] = value
    elif key in target:
        del target[key]


def walk(roots: Iterable[tuple[str, Any]], *, everything: bool = False, closed: Iterable[int] = ()) -> list[Node]:
    """A node for every container that is reached from the roots ``(name, value)``, each once.

    Args:
        everything: also what ``nn.Module`` keeps for itself, such as hooks.
        closed: identities of containers that are not looked into.
    """
    nodes: list[Node] = []
    seen = set(closed)
    bare: dict[Any, Any] = {}
    for name, value in roots:
        if kind(value) in ("container", "object"):
            _visit(value, name, nodes, seen, everything)
        else:
            bare[name] = value
    if bare:
        nodes.append(Node("", bare, dict(bare)))
    return nodes


def _visit(value: Any, path: str, nodes: list[Node], seen: set[int], everything: bool) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    node = Node(path, value, entries(value, everything=everything))
    nodes.append(node)
    for key, child in node.items.items():
        if kind(child) in ("container", "object"):
            _visit(child, node.name(key), nodes, seen, everything)


def kind(value: Any) -> str:
    """How a value is looked at: ``tensor``, ``array``, ``container``, ``object`` (by its attributes) or ``leaf``."""
    cls: Any = type(value)
    return _class_kind(cls)


@cache
def _class_kind(cls: Any) -> str:
    if issubclass(cls, Tensor):
        return "tensor"
    if issubclass(cls, np.ndarray):
        return "array"
    if issubclass(cls, nn.Module):
        return "object"
    if issubclass(cls, list | tuple | dict | set | deque):
        return "container"
    if issubclass(cls, type | FunctionType | MethodType | ModuleType) or not cls.__dictoffset__:
        return "leaf"
    return "leaf" if cls.__module__.partition(".")[0] in _LIBRARIES else "object"


def entries(value: Any, *, everything: bool = False) -> dict[Any, Any]:
    """A shallow copy of a container's entries by key, position or attribute."""
    if isinstance(value, nn.Module):
        skipped = _LINKS if everything else _OWN
        return {k: v for k, v in vars(value).items() if k not in skipped}
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if kind(value) == "object" else dict(enumerate(value))


def leaves(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is not looked into, ``value`` itself if it is such."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        found = stack.pop()
        if kind(found) not in ("container", "object"):
            yield found
        elif id(found) not in seen:
            seen.add(id(found))
            stack.extend(entries(found).values())


_SCALARS = (bool, int, float, str, type(None))


def is_same(a: Any, b: Any) -> bool:
    """Whether two entries are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, _SCALARS) and a == b)


def reached_code(module: nn.Module) -> list[FunctionType]:
    """The user's functions that a step may run, by the names in their code.

    From ``training_step`` and the ``forward`` of every layer over the methods and global functions whose names occur
    there. What is called in another way (``getattr`` with a computed name, ``importlib``) is not found.
    """
    classes = {base for m in module.modules() for base in type(m).__mro__ if not is_library(base)}
    methods: dict[str, list[Any]] = {}
    for space in [*map(vars, classes), vars(module)]:
        for name, value in space.items():
            methods.setdefault(name, []).append(getattr(value, "__func__", getattr(value, "fget", value)))
    queue = [*methods.get("training_step", ()), *methods.get("forward", ())]
    found: dict[int, FunctionType] = {}
    while queue:
        function = queue.pop()
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or id(function) in found or is_library(function):
            continue
        found[id(function)] = function
        queue += [value for _, value in _named(function)]
        queue += [method for name in _names(function) for method in methods.get(name, ())]
    return list(found.values())


def reached_names(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Every global and attribute that occurs in the functions' code."""
    return frozenset(name for function in functions for name in _names(function))


def reached_by_name(functions: Iterable[FunctionType]) -> list[tuple[str, Any]]:
    """Globals and closed-over values that the functions name: roots of the walk beside the module.

    Data sets and loaders are not among them: :class:`lightning_lap2.sampling.reach.DataReach` keeps a step from these.
    """
    found: dict[int, tuple[str, Any]] = {}
    for function in functions:
        for name, value in _named(function):
            if kind(value) in ("container", "object", "tensor", "array") and not _is_of_the_fit(value):
                found.setdefault(id(value), (name, value))
    return list(found.values())


_OF_THE_FIT = frozenset({"Trainer", "Callback", "DataLoader", "Dataset", "LightningDataModule"})


def _is_of_the_fit(value: Any) -> bool:
    return any(base.__name__ in _OF_THE_FIT for base in type(value).__mro__)


def is_library(value: Any) -> bool:
    """Whether a class or function is none of the user's."""
    return (value.__module__ or "builtins").partition(".")[0] in _LIBRARIES


def _codes(function: FunctionType) -> Iterator[CodeType]:
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        yield code


def _names(function: FunctionType) -> Iterator[str]:
    for code in _codes(function):
        yield from code.co_names


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _names(function):
        if name in function.__globals__:
            yield f"the global {name}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the closed-over {name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
