"""Code of the user's that would be handed all examples at once, although the step runs under ``vmap``: refused by name.

``vmap`` keeps the examples apart as long as only torch's own batching rules see the physical tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients import physical
from lightning_lap2.gradients.step.replacing import Replacements

_AUTO = "Use engine='auto', which goes on to an engine that runs it"


def _refuses(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(f"training_step {what}. {_AUTO}")

    return refuse


_rule = _refuses(
    "calls an operation with a batching rule of its own (autograd.Function.vmap, register_vmap), which is handed "
    "the examples of the whole batch and could mix them; generate_vmap_rule = True is fine"
)
_unwrap = _refuses("looks behind vmap (torch.func.debug_unwrap), where the examples of the whole batch lie")


def _entering(enter: Callable[[TorchDispatchMode], Any]) -> Callable[[TorchDispatchMode], Any]:
    def enter_known(mode: TorchDispatchMode) -> Any:
        if type(mode).__module__.partition(".")[0] != "torch":
            _refuses(
                f"enters {type(mode).__name__}, a TorchDispatchMode, which sees the examples of the whole batch at once"
            )()
        return enter(mode)

    return enter_known


seen_by_rules_refused = Replacements(
    [
        (*physical.HANDED_TO_RULES, lambda _: _rule),
        *([(*physical.UNWRAPS, lambda _: _unwrap)] if hasattr(*physical.UNWRAPS) else []),
        (TorchDispatchMode, "__enter__", _entering),
    ]
).active
"""For every engine that runs under ``vmap``: batching rules of the user's, looks behind ``vmap``, and dispatch modes
that the step enters, which work below it."""


@contextmanager
def seen_by_backward_refused(layers: Iterable[nn.Module]) -> Iterator[None]:
    """For an engine that runs one backward pass for all examples: what looks into it.

    Raises:
        UnsupportedModelError: at once where a layer has a hook on its backward pass; inside, where the step installs
            one or saves tensors by hooks.
    """
    hooked = next((layer for layer in layers if physical.backward_hooks(layer)), None)
    if hooked is not None or physical.global_backward_hooks():
        where = "every layer" if hooked is None else f"a {type(hooked).__name__}"
        raise UnsupportedModelError(
            f"{where} has a backward hook (register_full_backward_hook), which engine='ghost' does not call, since its "
            f"backward pass is that of all examples together. {_AUTO}, or remove the hook"
        )
    saved = (
        "torch.autograd.graph.saved_tensors_hooks (or save_on_cpu) would be handed what the backward pass keeps of all "
        "examples together"
    )
    with torch.autograd.graph.disable_saved_tensors_hooks(saved), _looked_through.active():
        yield


def _requires_grad(tensor: Tensor) -> bool:
    """What the step would read for one example alone: ``vmap``'s wrappers always say ``False``."""
    return physical.requires_grad(physical.innermost(tensor) if physical.is_batched(tensor) else tensor)


def _set_requires_grad(tensor: Tensor, value: bool) -> None:
    tensor.requires_grad_(value)


def _register_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        if physical.is_batched(tensor):
            _refuses("registers a hook on a tensor's gradient, which engine='ghost' does not call")()
        return original(tensor, hook)

    return register_hook


_looked_through = Replacements(
    [
        (Tensor, "requires_grad", lambda _: property(_requires_grad, _set_requires_grad)),
        (Tensor, "register_hook", _register_hook),
    ]
)
