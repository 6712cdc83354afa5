"""Running the user's code for a look, and leaving no trace of it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def untouched(module: nn.Module) -> Iterator[set[str]]:
    """Undoes at exit what user code run inside did to ``module`` and to the random generators.

    Restored: parameters, buffers, ``.grad``, training flags, and every attribute of every submodule that is a
    number, string, tensor, or a list, dict, set or deque of such at any depth (so torchmetrics states,
    running averages kept on the module, lists appended to). Modules in plain lists are followed. Objects of
    other classes are not looked into.

    Inside, ``log``, ``log_dict`` and ``print`` of the module do nothing: nothing reaches Lightning. Yields
    the set of names that were passed to ``log`` and ``log_dict``, which fills as the code runs.
    """
    snapshot = _Snapshot()
    snapshot.take(module)
    generators = _generator_states()
    names: set[str] = set()
    try:
        _silence(module, names)
        yield names
    finally:
        snapshot.restore()
        _restore_generators(generators)


def _silence(module: nn.Module, names: set[str]) -> None:
    """Shadows the logging methods in the instance dicts, which the snapshot puts back."""

    def log(name: str, *_args: Any, **_kwargs: Any) -> None:
        names.add(name)

    def log_dict(dictionary: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        names.update(dictionary.keys())

    def no_print(*_args: Any, **_kwargs: Any) -> None:
        return None

    shadows: dict[str, Callable[..., None]] = {"log": log, "log_dict": log_dict, "print": no_print}
    for owner in module.modules():
        # nested LightningModules too; a `log` of some other module is its own arithmetic
        lightning_like = owner is module or callable(getattr(type(owner), "log_dict", None))
        for name, shadow in shadows.items():
            if lightning_like and callable(getattr(type(owner), name, None)):
                owner.__dict__[name] = shadow


class _Snapshot:
    """Contents of a module's mutable attributes, found once and put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # values keep the objects alive, so that ids stay unique

    def take(self, node: Any) -> None:
        if id(node) in self._seen:
            return
        if isinstance(node, Tensor):
            self._seen[id(node)] = node
            self._take_tensor(node)
        elif isinstance(node, nn.Module):
            self._seen[id(node)] = node
            self.take(node.__dict__)
        elif isinstance(node, dict):
            self._seen[id(node)] = node
            items = dict(node)
            self._undo.append(lambda: _restore_dict(node, items))
            for value in items.values():
                self.take(value)
        elif isinstance(node, list | set | deque):
            self._seen[id(node)] = node
            values = list(node)
            self._undo.append(lambda: _restore_values(node, values))
            for value in values:
                self.take(value)
        elif isinstance(node, tuple):
            self._seen[id(node)] = node
            for value in node:
                self.take(value)

    def _take_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf:
            grad = tensor.grad
            self._undo.append(lambda: setattr(tensor, "grad", grad))
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        saved = tensor.detach().clone()

        def restore() -> None:
            with torch.no_grad():
                if tensor.shape != saved.shape:
                    tensor.set_(saved)  # type: ignore[call-overload]
                elif not torch.equal(tensor, saved):
                    tensor.copy_(saved)

        self._undo.append(restore)

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()


def _restore_dict(node: dict[Any, Any], items: dict[Any, Any]) -> None:
    unchanged = list(node) == list(items) and all(node[key] is value for key, value in items.items())
    if not unchanged:
        dict.clear(node)
        dict.update(node, items)


def _restore_values(node: list[Any] | set[Any] | deque[Any], values: list[Any]) -> None:
    node.clear()
    if isinstance(node, set):
        node.update(values)
    else:
        node.extend(values)


def _generator_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002 (global)


def _restore_generators(states: tuple[Any, ...]) -> None:
    cpu, cuda, numpy_state, python_state = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    np.random.set_state(numpy_state)  # noqa: NPY002 (global)
    random.setstate(python_state)
