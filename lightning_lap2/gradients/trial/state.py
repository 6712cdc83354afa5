"""Running the user's code for a look, and leaving no trace of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lap2.gradients.physical import held_here
from lightning_lap2.gradients.step.state.walk import walk


@contextmanager
def untouched(module: nn.Module) -> Iterator[set[str]]:
    """Undoes at exit what user code run inside did to ``module`` and to the random generators.

    Restored: parameters, buffers, ``.grad``, training flags, and everything else that
    :func:`~lightning_lap2.gradients.step.state.walk.walk` finds (so torchmetrics states, running averages kept on the
    module, lists appended to).

    Inside, ``log``, ``log_dict`` and ``print`` of the module do nothing: nothing reaches Lightning. Yields
    the set of names that were passed to ``log`` and ``log_dict``, which fills as the code runs.
    """
    snapshot = _Snapshot(module)
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
    """A module's state, found once and put back: containers, contents of tensors and arrays, ``.grad``."""

    def __init__(self, module: nn.Module) -> None:
        self._nodes = walk([("self", module)], everything=True)
        values = [v for node in self._nodes for v in node.items.values()]
        tensors = list({id(t): t for v in values if isinstance(v, Tensor) for t in (v, held_here(v))}.values())
        self._grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        own = [t for t in tensors if t is held_here(t) and not is_lazy(t) and t.layout is torch.strided]
        self._copies = [(t, t.detach().clone()) for t in own]
        self._arrays = [(v, v.copy()) for v in values if isinstance(v, np.ndarray)]

    def restore(self) -> None:
        for node in self._nodes:
            node.restore(everything=True)
        with torch.no_grad():
            for tensor, copied in self._copies:
                if tensor.shape != copied.shape:
                    tensor.set_(copied)  # type: ignore[call-overload]
                elif not torch.equal(tensor, copied):
                    tensor.copy_(copied)
        for tensor, grad in self._grads:
            tensor.grad = grad
        for array, values in self._arrays:
            array[...] = values


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
