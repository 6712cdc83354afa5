"""All of torch's private names that the gradients need, in one place.

Inside ``vmap`` a tensor that differs between examples is a wrapper around a *physical* tensor, which has the examples'
dimension as well; where it lies is known to the wrapper alone. :func:`apart` and :func:`whole` look through it, and
:func:`outside` leaves ``vmap`` for a moment, so that one call of torch serves all examples at once.

Nothing here is documented by torch. An engine is refused where a name that it needs is missing (:func:`check_torch`);
``tests/gradients/test_physical.py`` says by name what is missing, or means something else, under another version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
import torch._functorch.autograd_function
import torch._functorch.eager_transforms
import torch.overrides
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import has_torch_function

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.step.replacing import Replacements

_C: Any = torch._C._functorch

_VMAP = (
    "_C._functorch._set_vmap_fallback_warning_enabled",
    "_functorch.autograd_function.VmapInfo",
    # torch.func.debug_unwrap looks it up; torch 2.6 has neither
    *(["_functorch.eager_transforms.get_unwrapped"] if hasattr(torch.func, "debug_unwrap") else []),
)
_GHOST = (
    *("_C._functorch." + name for name in ("maybe_get_level", "maybe_get_bdim", "_add_batch_dim")),
    *("_C._functorch." + name for name in ("pop_dynamic_layer_stack", "push_dynamic_layer_stack")),
    *("_C._functorch." + name for name in ("_vmap_increment_nesting", "_vmap_decrement_nesting", "_remove_batch_dim")),
    *("_C." + name for name in ("_len_torch_dispatch_stack", "_DisableTorchDispatch")),
    "overrides._get_current_function_mode_stack",
    *("_VF." + cell for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in (kind, kind + "_cell")),
    "utils.checkpoint.CheckpointFunction",
    *("nn.modules.module." + name for name in ("_global_backward_hooks", "_global_backward_pre_hooks")),
)
NAMES = {"vmap": _VMAP, "ghost": _VMAP + _GHOST}
"""What each engine that works inside ``vmap`` needs of torch's private names. Those that every engine needs are looked
up below, when this module is imported."""


@cache
def missing(engine: str) -> tuple[str, ...]:
    """What an engine needs of torch's private parts and this torch lacks: names, and checkpoints made plain."""
    absent = [f"torch.{name}" for name in NAMES[engine] if not _has(torch, name.split("."))]
    if engine == "ghost" and not absent and not _checkpoints_are_plain():
        absent.append("a torch.utils.checkpoint that can be made to call its function once")
    return tuple(absent)


def _has(owner: Any, path: list[str]) -> bool:
    return not path or (hasattr(owner, path[0]) and _has(getattr(owner, path[0]), path[1:]))


def check_torch(engine: str) -> None:
    """Refuses an engine where torch lacks a private name that it needs: what the name guards would pass unseen.

    Raises:
        UnsupportedModelError: naming what is missing; ``engine="auto"`` goes on to the next.
    """
    absent = missing(engine)
    if absent:
        raise UnsupportedModelError(
            f"engine={engine!r} needs {', '.join(absent)}, which torch {torch.__version__} does not have. Use "
            "engine='loop', which needs none of them, or a version of torch that docs/versions.md names"
        )


current_level: Callable[[], int | None] = _C.maybe_current_level
"""The number of ``torch.func`` transforms that the running code is in; ``None`` for none."""

is_wrapped: Callable[[Any], bool] = _C.is_functorch_wrapped_tensor
"""Whether a tensor is inside any ``torch.func`` transform."""


unwrapped: Callable[[Tensor], Tensor] = _C.get_unwrapped
"""What is under the outermost wrapper of a tensor."""

_is_wrapper_of_vmap: Callable[[Tensor], bool] = _C.is_batchedtensor


def innermost(tensor: Tensor) -> Tensor:
    """The physical tensor under all wrappers."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def is_batched(value: Any) -> bool:
    """Whether ``value`` differs between the examples of the innermost ``vmap``, and of no other transform inside it."""
    return isinstance(value, Tensor) and _is_wrapper_of_vmap(value) and _C.maybe_get_level(value) == current_level()


def carries_batch(tensor: Tensor) -> bool:
    """Whether a tensor differs between the examples of any ``vmap``."""
    while is_wrapped(tensor):
        if _is_wrapper_of_vmap(tensor):
            return True
        tensor = unwrapped(tensor)
    return False


def is_escape(error: Exception) -> bool:
    """Whether torch refused a tensor that an earlier ``vmap`` had wrapped."""
    return isinstance(error, RuntimeError) and "escaped from inside a function being vmapped" in str(error)


def apart(tensor: Tensor) -> Tensor:
    """The physical tensor ``[B, *shape]`` of a batched one of this ``shape``; only where :func:`is_batched`."""
    physical = unwrapped(tensor)
    dim = _C.maybe_get_bdim(tensor)
    return physical if dim == 0 else physical.movedim(dim, 0)


def whole(physical: Tensor) -> Tensor:
    """The inverse of :func:`apart`, for the innermost ``vmap``."""
    batched: Tensor = _C._add_batch_dim(physical, 0, current_level())
    return batched


@cache
def _load_rules() -> None:
    """Torch registers some of its batching rules when ``vmap`` is called for the first time."""
    torch.func.vmap(torch.clone)(torch.zeros(1))


def for_all(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """What ``torch.func.vmap(function, randomness="different")(*inputs)`` gives, without its search through containers:
    ``[count, ...]`` for each tensor that ``function`` returns.

    Raises:
        ValueError: there are no inputs.
    """
    if not inputs:
        raise ValueError("there is no tensor in an example's batch")
    _load_rules()
    level = _C._vmap_increment_nesting(count, "different")
    try:
        outputs = function(*[_C._add_batch_dim(tensor, 0, level) for tensor in inputs])
        return [_C._remove_batch_dim(tensor, level, count, 0) for tensor in outputs]
    finally:
        _C._vmap_decrement_nesting()


def leave_vmap() -> Any:
    """Leaves the innermost ``vmap``: torch is then called for physical tensors."""
    return _C.pop_dynamic_layer_stack()


def enter_vmap_again(layer: Any) -> None:
    """The inverse of :func:`leave_vmap`, given what that returned."""
    _C.push_dynamic_layer_stack(layer)


@contextmanager
def outside() -> Iterator[None]:
    """Inside, the innermost ``vmap`` is left."""
    layer = leave_vmap()
    try:
        yield
    finally:
        enter_vmap_again(layer)


def count_modes() -> int:
    """How many dispatch modes are active."""
    return int(torch._C._len_torch_dispatch_stack())


def unseen_by_modes() -> Any:
    """Operations are seen by no dispatch mode while the returned object lives."""
    return torch._C._DisableTorchDispatch()


PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
"""Classes that do nothing of their own."""
_TORCH = os.path.dirname(torch.__file__) + os.sep


def torchs_own(function: Any) -> bool:
    """Whether a function comes with torch, and is not one that the user has put in its place."""
    if getattr(function, "__module__", "").startswith("lightning_lap2."):
        function = getattr(function, "__wrapped__", function)  # what stands in for it is ours
    if isinstance(function, BuiltinFunctionType):
        return (function.__module__ or "").partition(".")[0] == "torch"
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


def seen_by_users(operands: Sequence[Any]) -> bool:
    """Whether an operation on these, outside ``vmap``, would be shown to code of the user's: a function mode that is
    active, or a class of tensors."""
    if not has_torch_function(operands):
        return any(isinstance(value, Tensor) and dispatches_itself(type(value)) for value in operands)
    modes = [type(mode) for mode in torch.overrides._get_current_function_mode_stack()]
    return any(mode.__module__.partition(".")[0] != "torch" for mode in modes) or any(
        hasattr(type(value), "__torch_function__") and type(value) not in PLAIN_TENSORS for value in operands
    )


def dispatches_itself(kind: Any) -> bool:
    """Whether a class of tensors is the user's and is called below ``vmap``, with all examples at once."""
    if kind in PLAIN_TENSORS or kind.__module__.partition(".")[0] == "torch":
        return False
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


recurrent_functions: Any = torch._VF
"""Where torch's recurrent layers find their functions."""

requires_grad: Callable[[Tensor], bool] = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
"""The flag itself, however ``Tensor.requires_grad`` may be replaced."""


def held_here(tensor: Tensor) -> Tensor:
    """What this rank holds: of a DTensor its shard, else the tensor itself. Nothing is sent for it."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def replicas_of(tensor: Tensor) -> torch.distributed.ProcessGroup | None:
    """The process group of the ranks that hold the same as this one: of a tensor that every rank has whole all of them,
    of a shard its replicas; ``None`` where no two do."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return torch.distributed.group.WORLD
    return mesh.get_group(0) if mesh.ndim > 1 else None


def recorded(tensor: Tensor) -> Tensor | None:
    """The layer of a tensor that an autograd graph is recorded of: under ``vmap`` the physical tensor, under ``grad``
    inside it the wrapper. ``None`` where no gradient will come."""
    while not requires_grad(tensor):
        if not is_wrapped(tensor):
            return None
        tensor = _C.get_unwrapped(tensor)
    return tensor


@contextmanager
def functorch_left() -> Iterator[None]:
    """Inside, every ``torch.func`` transform is left: for what has nothing to do with the examples."""
    if current_level() is None:
        yield
        return
    with torch._C._DisableFuncTorch():
        yield


@contextmanager
def quiet_fallback() -> Iterator[None]:
    """Some operators run example by example inside vmap and would warn; they are right, only slow.

    The switch has no getter; afterwards it stands as torch starts with it. (A warnings filter instead would make
    Python forget which of the user's warnings it has shown, at every step.)
    """
    _C._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _C._set_vmap_fallback_warning_enabled(True)


@contextmanager
def no_fallback() -> Iterator[None]:
    """Inside, operators without a batching rule raise. For tests: the switch has no getter either."""
    _C._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _C._set_vmap_fallback_enabled(True)


def _generator(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


class _Reentrant:
    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""What ``torch.utils.checkpoint`` calls; torch 2.14 has both and calls the second."""

plain_checkpoints = Replacements(
    [
        *(
            (torch.utils.checkpoint, name, lambda _: _generator)
            for name in _GENERATORS
            if hasattr(torch.utils.checkpoint, name)
        ),
        (torch.utils.checkpoint, "CheckpointFunction", lambda _: _Reentrant),
    ]
).active
"""Inside, ``torch.utils.checkpoint`` calls the function and keeps its activations. The gradients are the same; what
would be computed again could not be caught on the way."""


def _checkpoints_are_plain() -> bool:
    """Whether :func:`plain_checkpoints` does what it says: a name may still be there and no longer be called."""
    runs: list[None] = []

    def function(x: Tensor) -> Tensor:
        runs.append(None)
        return x.exp()

    with torch.enable_grad(), plain_checkpoints():
        x = torch.ones((), device="cpu", requires_grad=True)
        for reentrant in (True, False):
            torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).backward()
    return len(runs) == 2


HANDED_TO_RULES: tuple[Any, str] = (torch._functorch.autograd_function, "VmapInfo")
"""What a batching rule of the user's (``autograd.Function.vmap``, ``torch.library.register_vmap``) is handed first,
with the examples of the whole batch; rules that torch generates are not."""

UNWRAPS: tuple[Any, str] = (torch._functorch.eager_transforms, "get_unwrapped")
"""What ``torch.func.debug_unwrap`` calls, which would return them."""


def backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks on its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def global_backward_hooks() -> bool:
    """Whether hooks on the backward pass of every module are registered."""
    registered = torch.nn.modules.module
    return bool(registered._global_backward_hooks or registered._global_backward_pre_hooks)
