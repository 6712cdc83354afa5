"""What the user's step leaves on its module.

The step runs once per batch here, on real values. A tensor or a float that it keeps (a running mean of the loss, a
memory bank, a list of losses) holds unclipped data, and fed back into a later loss it carries examples past the
clipping. So both are refused, wherever they are kept on the module. Allowed are counters and flags (integers,
booleans, strings) and tensors kept as attributes that were not there before (a mask made on first use): replaced at a
later step they are refused. Metrics keep state by design and are read only for logging.

Not seen: an integer that was computed from the data, and what a step keeps in globals, closures or objects of other
classes.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Sized
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_lap2.errors import UnsupportedModelError

# Lightning's own on a LightningModule, and what is walked by itself
_SKIPPED = {"_trainer", "_fabric", "_parameters", "_buffers", "_modules"}

Place = tuple[Any, str]
"""Where a value is kept: (place of its holder, or the module's path) and an attribute or index. Put into words only
where there is something to say: this runs twice a step."""


_OTHER, _TENSOR, _NUMBER, _MAPPING, _SEQUENCE = range(5)
_SEQUENCES = (list, tuple, deque, set)


class _Kinds(dict[type[Any], int]):
    """What to look for in objects of a class; worked out once for each."""

    def __missing__(self, of: type[Any]) -> int:
        found = _OTHER
        for kind, bases in ((_TENSOR, Tensor), (_NUMBER, float), (_MAPPING, dict), (_SEQUENCE, _SEQUENCES)):
            if issubclass(of, bases):
                found = kind
                break
        self[of] = found
        return found


class _Metrics(dict[type[Any], bool]):
    """Whether objects of a class keep state by design."""

    def __missing__(self, of: type[Any]) -> bool:
        self[of] = any(kind.__module__.startswith("torchmetrics.") for kind in of.__mro__)
        return self[of]


_KINDS, _METRICS = _Kinds(), _Metrics()


def _irrelevant(value: Any) -> bool:
    return _KINDS[type(value)] == _OTHER and not isinstance(value, nn.Module)


class Kept:
    """Every floating tensor and every float of ``module``, at any depth of its containers, in a fixed order.

    The walk through all attributes is made once; afterwards :meth:`untouched` compares object by object what the walk
    saw, at a tenth of its cost, and it is made again as soon as anything differs.

    Attributes:
        values: the objects themselves, so that none can be freed and its identity taken by another.
        versions: of the tensors, which count their writes in place; 0 for a float.
        places: where each is kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.values: list[Tensor | float] = []
        self.versions: list[int] = []
        self.places: list[Place] = []
        self._modules: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] = []  # of each module
        # views of the dictionaries, and the sequences, that were walked, and of the keys below the attributes
        self._seen: list[Collection[Any]] = []
        self._keyed: list[Collection[Any]] = []
        self._empty: list[Sized] = []
        self._plain = True  # every module keeps its tensors in dictionaries of its own
        self._module(module, "self")
        self._objects = list(chain.from_iterable(self._seen))
        self._keys = list(chain.from_iterable(self._keyed))

    def untouched(self) -> bool:
        """Whether a walk now would find the same values in the same places.

        A tensor or number is pinned by its identity, a container by its identity and what it holds. A flag, counter
        or word may have become another one.
        """
        if not self._plain or not all(map(operator.is_, map(vars, self._modules), self._attributes)):
            return False
        objects, keys = list(chain.from_iterable(self._seen)), list(chain.from_iterable(self._keyed))
        if len(objects) != len(self._objects) or len(keys) != len(self._keys):
            return False
        if not all(map(operator.is_, objects, self._objects)):
            replaced = [pair for pair in zip(objects, self._objects, strict=True) if pair[0] is not pair[1]]
            if not all(_irrelevant(new) and _irrelevant(old) for new, old in replaced):
                return False
            self._objects = objects
        return all(map(operator.is_, keys, self._keys)) and not any(map(len, self._empty))

    def versions_now(self) -> list[int]:
        return [value._version if isinstance(value, Tensor) else 0 for value in self.values]

    def renewed(self, module: nn.Module) -> Kept:
        """The same for ``module`` as it is now."""
        if not self.untouched():
            return Kept(module)
        self.versions = self.versions_now()
        return self

    def named(self) -> dict[str, tuple[Tensor | float, int]]:
        """By name, as Python would write it."""
        names = map(_words, self.places)
        return dict(zip(names, zip(self.values, self.versions, strict=True), strict=True))

    def _module(self, module: nn.Module, path: str) -> None:
        if _METRICS[type(module)]:
            return
        attributes = vars(module)
        self._modules.append(module)
        self._attributes.append(attributes)
        self._seen.append(attributes.values())
        for name in ("_parameters", "_buffers", "_modules"):
            held = getattr(module, name)
            self._plain &= attributes.get(name) is held and isinstance(held, dict)
            self._seen.append(held.values())
            if name != "_modules":
                for key, tensor in held.items():
                    if tensor is not None:
                        self._tensor(tensor, (path, key))
        for name, value in attributes.items():
            kind = _KINDS[type(value)]
            # most attributes of a module are flags and empty dictionaries of hooks
            if kind == _OTHER or name in _SKIPPED or name.startswith("__") or isinstance(value, nn.Module):
                continue
            self._value(value, kind, (path, name))
        for name, child in module._modules.items():
            if child is not None:
                self._module(child, f"{path}.{name}")

    def _value(self, value: Any, kind: int, place: Place) -> None:
        if kind == _TENSOR:
            self._tensor(value, place)
        elif kind == _NUMBER:
            self.values.append(value)
            self.versions.append(0)
            self.places.append(place)
        elif not len(value):
            self._empty.append(value)
        else:
            if kind == _MAPPING:
                self._keyed.append(value.keys())
            self._seen.append(value.values() if kind == _MAPPING else value)
            items: Iterable[tuple[Any, Any]] = value.items() if kind == _MAPPING else enumerate(value)
            for key, inner in items:
                kind = _KINDS[type(inner)]
                if kind != _OTHER:
                    self._value(inner, kind, (place, f"[{key!r}]"))

    def _tensor(self, tensor: Tensor, place: Place) -> None:
        if tensor.is_floating_point() and not tensor.is_inference():
            self.values.append(tensor)
            self.versions.append(tensor._version)
            self.places.append(place)


def _words(place: Place) -> str:
    holder, key = place
    if isinstance(holder, str):
        return f"{holder}.{key}"
    return f"{_words(holder)}{key}"


def refuse_written(module: nn.Module, before: Kept) -> None:
    """Compares with the state before the step.

    Raises:
        UnsupportedModelError: naming what the step wrote in place, replaced or added to a container.
    """
    if before.untouched() and before.versions_now() == before.versions:
        return
    known = before.named()
    for name, (value, version) in Kept(module).named().items():
        old, old_version = known.get(name, (None, 0))
        if old is value and version == old_version:
            continue
        if old is None and not name.endswith("]"):
            continue
        raise UnsupportedModelError(
            f"training_step writes {name}, which then holds data that no noise protects and could carry examples "
            f"past the clipping into a later loss: use self.log, or update it in on_train_batch_end from public "
            f"quantities"
        )
