"""What the user's step does to its module: noticed, undone where that is the plain effect, refused where it is not.

An engine runs the step several times per batch, on traced tensors or on single examples. A step that writes to its
module would then write several times, or keep a tensor of one example that feeds into the next example's loss, which
breaks the sensitivity bound. The rules:

* parameters, buffers and tensors that are written in place, under any engine: refused by attribute name;
* a tensor of the trace that is kept anywhere on the module: refused by attribute name;
* under ``vmap`` plain Python values cannot depend on the data (reading a traced tensor raises), so counters, lists
  and caches are allowed, tensors included that no example went into (a mask made on first use). Every call but the
  first starts from the values before the batch, and the first call's values stay: the effect of one plain step;
* one example at a time (``"loop"``) they can depend on the data (``.item()``), so any change is refused.

Looked into: submodules, lists, tuples, dicts, sets, deques, and objects of the user's own classes. What a step
writes elsewhere (globals, closures, files) cannot be seen from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.physical import carries_batch, innermost, is_wrapped
from lightning_lap2.gradients.recorder import Deferred
from lightning_lap2.gradients.values import Number

_REGISTERED = ("_parameters", "_buffers", "_modules")
# what nn.Module keeps for itself ("training" is watched: a step that switches modes is noticed), what the recorder
# and the pre-flight shadow meanwhile, and what recurrent layers keep of their weights (tracing.way_through resets it)
_OWN = (frozenset(vars(nn.Module())) - {"training", *_REGISTERED}) | {
    "_trainer", "_fabric", "log", "log_dict", "print", "update", "forward", "compute", "reset",
    "_flat_weights", "_flat_weight_refs",
}  # fmt: skip
_LIBRARIES = frozenset(
    {"builtins", "collections", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities",
     "torchmetrics", "transformers", "tokenizers", "peft", "numpy", "functools", "logging", "enum", "pathlib",
     "lightning_lap2"}
)  # fmt: skip


@dataclass(frozen=True)
class _Node:
    """A mutable container as it was: ``items`` is a shallow copy, ``versions`` count writes to its tensors."""

    path: str
    live: Any
    items: dict[Any, Any]
    versions: dict[Any, int]

    def changed(self) -> dict[Any, Any]:
        """New values of the entries that are not what they were (``None`` for those that are gone)."""
        now = _items(self.live)
        if now.keys() == self.items.keys() and all(map(is_, now.values(), self.items.values())):
            return {}
        changed = {k: v for k, v in now.items() if k not in self.items or v is not self.items[k]}
        return changed | dict.fromkeys(self.items.keys() - now.keys())

    def written(self) -> list[Any]:
        """Keys of the tensors that were written in place."""
        return [k for k, version in self.versions.items() if self.items[k]._version != version]

    def restore(self) -> None:
        live = self.live
        if isinstance(live, list):
            live[:] = self.items.values()
        elif isinstance(live, deque):
            live.clear()
            live.extend(self.items.values())
        elif isinstance(live, set):
            live.clear()
            live.update(self.items.values())
        else:
            entries = live if isinstance(live, dict) else vars(live)
            for key in self.changed():
                if key in self.items:
                    entries[key] = self.items[key]
                else:
                    del entries[key]

    def replace(self, key: Any, value: Any) -> None:
        """Sets one entry of a list, dict or attribute."""
        entries = self.live if isinstance(self.live, list | deque | dict) else vars(self.live)
        entries[key] = value

    def name(self, key: Any) -> str:
        for registered in _REGISTERED:
            if self.path.endswith(f".{registered}"):
                return f"{self.path.removesuffix(registered)}{key}"
        return f"{self.path}.{key}" if _kind(self.live) == "object" else f"{self.path}[{key!r}]"


class AttributeGuard:
    """Watches a module's attributes over the calls of one batch.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = _capture(module)
        self.after: list[_Node] | None = None

    def begin_call(self) -> None:
        """Before each call of the step: what an earlier call left behind is put back."""
        if self.after is not None:
            self.undo()

    def end_call(self, *, allow_plain: bool) -> None:
        """After each call of the step.

        Args:
            allow_plain: whether Python values that hold no traced tensor may change (see above).

        Raises:
            UnsupportedModelError: naming the attribute.
        """
        changed = False
        for node in self.before:
            for key in node.written():
                raise UnsupportedModelError(
                    f"training_step writes {node.name(key)} in place. It would be written once per example with "
                    "values that no noise protects: update it in on_train_batch_end from public quantities, or drop it"
                )
            for key, value in node.changed().items():
                changed = True
                constant = _data_independent(value)
                if allow_plain and constant is not None:
                    node.replace(key, constant)
                else:
                    self._check(node.name(key), value, allow_plain)
        if self.after is None:
            self.after = _capture(self.module) if changed else self.before

    def _check(self, name: str, value: Any, allow_plain: bool) -> None:
        if not allow_plain:
            raise UnsupportedModelError(
                f"training_step changes {name}. This engine runs it once per example, and the value could carry one "
                "example into the next one's loss: change it in on_train_batch_start or on_train_batch_end"
            )
        if any(isinstance(found, Number | Deferred) or is_wrapped(found) for found in _values(value, set())):
            raise UnsupportedModelError(
                f"training_step keeps a tensor computed from the data in {name}. Fed back into a later loss it would "
                "carry examples past the clipping, and outside the step it is dead: log it with self.log instead"
            )

    def close(self) -> None:
        """After the batch: leaves the values of the first call."""
        if self.after is not None and self.after is not self.before:
            _restore(self.after)

    def undo(self) -> None:
        """Puts back the values from before the batch; after an exception no traced tensor stays."""
        _restore(self.before)


def _data_independent(value: Any) -> Tensor | None:
    """The plain tensor inside a traced one that no example's data went into (a mask made on first use), or ``None``."""
    if not isinstance(value, Tensor) or not is_wrapped(value) or carries_batch(value):
        return None
    return innermost(value)


def _restore(nodes: list[_Node]) -> None:
    for node in nodes:
        if node.changed():
            node.restore()


def _capture(module: nn.Module) -> list[_Node]:
    nodes: list[_Node] = []
    _visit(module, "self", nodes, set())
    return nodes


def _visit(value: Any, path: str, nodes: list[_Node], seen: set[int]) -> None:
    """Appends a node for ``value``, if it is a container, and for every container inside."""
    if id(value) in seen:
        return
    seen.add(id(value))
    items = _items(value)
    types: set[Any] = set(map(type, items.values()))
    kinds = set(map(_class_kind, types))
    versions = {}
    if "tensor" in kinds:
        versions = {k: v._version for k, v in items.items() if isinstance(v, Tensor) and not v.is_inference()}
    node = _Node(path, value, items, versions)
    nodes.append(node)
    if kinds & {"container", "object"}:
        for key, child in items.items():
            if _kind(child) in ("container", "object"):
                _visit(child, node.name(key), nodes, seen)


def _kind(value: Any) -> str:
    """How a value is looked at: ``tensor``, ``container``, ``object`` (by its attributes) or ``leaf``."""
    cls: Any = type(value)
    return _class_kind(cls)


@cache
def _class_kind(cls: Any) -> str:
    if issubclass(cls, Tensor):
        return "tensor"
    if issubclass(cls, nn.Module):
        return "object"
    if issubclass(cls, list | tuple | dict | set | deque):
        return "container"
    if issubclass(cls, type | FunctionType | MethodType | ModuleType) or not cls.__dictoffset__:
        return "leaf"
    return "leaf" if cls.__module__.partition(".")[0] in _LIBRARIES else "object"


def _items(value: Any) -> dict[Any, Any]:
    """A shallow copy of a container's entries by key, position or attribute."""
    if isinstance(value, nn.Module):
        return {k: v for k, v in vars(value).items() if k not in _OWN}
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if _kind(value) == "object" else dict(enumerate(value))


def _values(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors in ``value``, and what stands for numbers of the trace."""
    kind = _kind(value)
    if kind == "tensor" or isinstance(value, Number | Deferred):
        yield value
    elif kind != "leaf" and id(value) not in seen:
        seen.add(id(value))
        for child in _items(value).values():
            yield from _values(child, seen)
