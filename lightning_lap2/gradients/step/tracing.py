"""Everything that is patched or checked while the user's ``training_step`` is traced, in one place, undone after.

Through ``vmap`` some code fails that has no need to: masks in Hugging Face models and ``F.one_hot`` read a value
(``.item()``), GRU and RNN make a hidden state without the example dimension. :func:`way_through` replaces these for
traced tensors only, so untraced code sees no change. What cannot run, or would break the guarantee, is refused here
by name.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.lines import line_of
from lightning_lap2.gradients.marks import known_clean
from lightning_lap2.gradients.physical import carries_batch, is_wrapped, quiet_fallback
from lightning_lap2.gradients.step.replacing import Replacements


def is_traced(value: Any) -> bool:
    """Whether ``value`` is a tensor inside a ``torch.func`` transform."""
    return isinstance(value, Tensor) and is_wrapped(value)


# --- refused by name -------------------------------------------------------------------------------------------------


def check_layers(module: nn.Module, layers: Iterable[nn.Module], *, vmapped: bool) -> None:
    """Raises for layers that mix examples, that write what no noise protects, or that ``vmap`` cannot run; for
    BatchNorm see :func:`check_batch_norm`.

    Args:
        layers: all of ``module``, see :func:`layers_of`.

    Raises:
        UnsupportedModelError: naming the layer and what to use instead.
    """
    for layer in layers:
        if not isinstance(layer, _REFUSABLE):
            continue
        reason = layer_refusal(layer, vmapped=vmapped)
        if reason is not None:
            raise _refused(module, layer, reason)


def check_batch_norm(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raises for a BatchNorm in train mode. Where a step switches modes itself, :func:`batch_statistics_refused` sees
    what it is called with.

    Args:
        layers: all of ``module``, see :func:`layers_of`.

    Raises:
        UnsupportedModelError: naming the layer and what to use instead.
    """
    for layer in layers:
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise _refused(module, layer, _BATCH_NORM)


_BATCH_NORM = (
    "normalises by statistics of the batch, so each example's gradient depends on the others, and keeps "
    "running statistics that no noise protects: replace it by nn.GroupNorm, or freeze it with .eval() "
    "(in on_train_epoch_start, since Lightning calls .train(), or in the step) where it has running statistics"
)


def _refused(module: nn.Module, layer: nn.Module, reason: str) -> UnsupportedModelError:
    name = next(name for name, found in module.named_modules() if found is layer)
    return UnsupportedModelError(f"{type(layer).__name__} {name!r} {reason}")


def layers_of(module: nn.Module) -> list[nn.Module]:
    """What ``module.modules()`` gives, in its order, without making names: a step asks for it several times."""
    seen = {id(module)}
    found = [module]
    stack = [iter(module._modules.values())]
    while stack:
        for child in stack[-1]:
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
                if child._modules:
                    stack.append(iter(child._modules.values()))
                    break
        else:
            stack.pop()
    return found


_REFUSABLE = (nn.SyncBatchNorm, _InstanceNorm, _SpectralNorm, nn.Embedding, nn.EmbeddingBag)
"""The classes that :func:`layer_refusal` looks at."""


def layer_refusal(layer: nn.Module, *, vmapped: bool) -> str | None:
    """Why this layer, in its present mode, cannot be trained privately; ``None`` where it can."""
    if isinstance(layer, nn.SyncBatchNorm) and layer.training:
        return _BATCH_NORM  # with several ranks it has kernels of its own
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training:
        return (
            "writes running statistics of the data that no noise protects: use track_running_stats=False or "
            "nn.GroupNorm"
        )
    if isinstance(layer, _SpectralNorm) and layer.training:
        return (
            "takes a step of its power iteration at every call and keeps it in buffers, so at every example: switch "
            "it to evaluation before fit (layer.parametrizations.weight.eval()), and iterate in on_train_batch_end "
            "(norm.train(); layer.weight; norm.eval()), from the weights alone"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            return "has max_norm, which rescales the rows that a batch uses in place, without noise: use max_norm=None"
        if layer.sparse and vmapped:
            return "has sparse=True, which engine='vmap' cannot run: use sparse=False, or engine='loop'"
    return None


_modules: list[nn.Module] = []
"""The user's module whose step runs."""


@contextmanager
def batch_statistics_refused(module: nn.Module) -> Iterator[None]:
    """Inside, the functional forms of what :func:`check_layers` and :func:`check_batch_norm` refuse raise too.

    A custom layer may call ``F.batch_norm`` itself; its kernel writes the running statistics without counting it as a
    write, so nothing else would notice.
    """
    _modules.append(module)
    try:
        with _statistics.active():
            yield
    finally:
        _modules.pop()


def _named_first(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch refuses a batch of one in its own words before it gets to ``torch.batch_norm``."""

    def batch_norm(
        input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if training and running_mean is not None and _modules:
            _refuse_own_layer(_modules[-1], running_mean)
        return original(input, running_mean, running_var, weight, bias, training, *args, **kwargs)

    return batch_norm


def _refuse_own_layer(module: nn.Module, running_mean: Tensor) -> None:
    """Refuses by name the BatchNorm that keeps this mean."""
    for layer in layers_of(module):
        if isinstance(layer, _BatchNorm) and layer.running_mean is running_mean:
            raise _refused(module, layer, _BATCH_NORM)


def _no_batch_statistics(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = original.__name__

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        # torch.nn.functional gives (input, weight, bias, running_mean, running_var, use_batch_statistics, ...);
        # instance_norm may use the statistics of the example itself as long as it keeps none
        uses_own = len(args) > 5 and args[5]
        if uses_own and name == "batch_norm" and args[3] is None and known_clean(args[0]):
            return original(*args, **kwargs)  # of a weight: standardised by its own statistics
        if uses_own and (name == "batch_norm" or args[3] is not None):
            if args[3] is not None and _modules:
                _refuse_own_layer(_modules[-1], args[3])
            raise UnsupportedModelError(
                f"F.{name} is called with the batch's statistics: it mixes examples or writes running statistics that "
                "no noise protects. Use F.group_norm, or training=False with statistics that do not change"
            )
        if name == "batch_norm" and len(args) == 9 and _is_miscounted(args[0]):
            return _by_known_statistics(*args[:5], eps=args[7])
        return original(*args, **kwargs)

    norm.__wrapped__ = original  # type: ignore[attr-defined]
    return norm


def _is_miscounted(x: Tensor) -> bool:
    """Whether torch's kernel may give a wrong gradient.

    For a batch of one the stride of the leading dimension says nothing, so layers write anything there (``flatten`` and
    ``transpose`` behind a stem, as in XCiT and LeViT). The CPU's backward kernel takes an output gradient in channels
    last with such a stride for one of another layout (torch 2.13.0 and 2.14.1: gradients wrong by their own size).
    """
    return x.dim() > 3 and x.shape[0] == 1 and x.device.type == "cpu"


def _by_known_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *, eps: float
) -> Tensor:
    """``F.batch_norm`` in evaluation: x ``[1, C, ...]``, the others ``[C]``."""
    over = (...,) + (None,) * (x.dim() - 2)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - mean[over]) * scale[over]
    return (y if bias is None else y + bias[over]).to(x.dtype)


_statistics = Replacements(
    [
        *((torch, name, _no_batch_statistics) for name in ("batch_norm", "instance_norm")),
        (F, "batch_norm", _named_first),
    ]
)


def batch_dimension_kept(rows: int) -> AbstractContextManager[None]:
    """Inside, ``squeeze()`` without a dimension keeps a leading dimension of one.

    Among several examples it keeps the batch dimension, and code relies on that; for one example alone torch takes that
    away as well. Tensors that no example went into are squeezed as ever.

    Args:
        rows: of an example's batch; from two on there is nothing to do.
    """
    return _squeezing.active() if rows == 1 else nullcontext()


def _keeping(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def squeeze(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or input.dim() == 0 or input.shape[0] != 1 or known_clean(input):
            return original(input, *args, **kwargs)
        return original(input, tuple(range(1, input.dim())))

    return squeeze


_squeezing = Replacements(
    [(owner, name, _keeping) for owner, name in ((torch, "squeeze"), (Tensor, "squeeze"), (Tensor, "squeeze_"))]
)


# --- ways through vmap -----------------------------------------------------------------------------------------------


_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


@contextmanager
def traceable(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, code that fails under ``vmap`` without need runs; afterwards nothing is left patched.

    Args:
        layers: all of the user's module.
    """
    recurrent = [vars(layer) for layer in layers if isinstance(layer, nn.RNNBase)]
    # their forward collects the parameters it finds, which may be traced ones
    flat = [(attributes, {name: attributes[name] for name in _FLAT_WEIGHTS}) for attributes in recurrent]
    with quiet_fallback(), _libraries(len(sys.modules)).active():
        try:
            yield
        finally:
            for attributes, before in flat:
                attributes.update(before)


@contextmanager
def way_through(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """:func:`traceable` for ``vmap(grad(...))``."""
    with traceable(layers), ExitStack() as undo:
        if device.type == "cpu":
            # the CPU's fused attention has no batching rule: it would run one example at a time
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        for layer in layers:
            if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
                handle = layer.register_forward_pre_hook(_batched_state, with_kwargs=True)
                undo.callback(handle.remove)
        yield


def _is_tracing(original: Callable[..., bool]) -> Callable[..., bool]:
    """Hugging Face mask code asks this before it reads values to skip a mask that is all ones."""

    def is_tracing(tensor: Any = None) -> bool:
        return is_traced(tensor) or original(tensor)

    return is_tracing


def _without_gradient(mode: Any) -> None:
    """``torch.inference_mode`` around what a step logs, as ``no_grad``: ``vmap`` cannot wrap inference tensors."""
    mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)


def _one_hot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.one_hot`` checks the range of the classes by value; here out-of-range classes give rows of zeros."""

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if not is_traced(tensor):
            return original(tensor, num_classes)
        if num_classes < 0:
            raise UnsupportedModelError(
                "F.one_hot without num_classes reads the largest class of the batch, which mixes examples: "
                "give num_classes"
            )
        return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()

    return one_hot


@lru_cache(maxsize=1)
def _libraries(_modules: int) -> Replacements:
    """What libraries do otherwise inside, so that they neither ask for values nor make tensors of one example where
    there is no need; searched anew when modules were loaded.

    torchmetrics' functional metrics check their arguments by value (``torch.unique``); torch's distributions draw
    normal numbers into a tensor without the examples' dimension.
    """
    found: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (F, "one_hot", _one_hot),
        (torch.inference_mode, "__enter__", lambda _: _without_gradient),
    ]
    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None and "is_tracing" in vars(masking):  # transformers 5
        found.append((masking, "is_tracing", _is_tracing))
    for home, module in list(sys.modules.items()):
        for name in list(vars(module)) if home.startswith(_LIBRARIES) else ():
            if _VALIDATION.fullmatch(name):
                found.append((module, name, _unchecked))
            elif name == "_standard_normal":
                found.append((module, name, lambda _: _standard_normal))
    return Replacements(found)


_LIBRARIES = ("torchmetrics.functional.", "torch.distributions.")
_VALIDATION = re.compile(r"_\w*_tensor_validation")


def _unchecked(original: Callable[..., None]) -> Callable[..., None]:
    def validation(*args: Any, **kwargs: Any) -> None:
        if not any(map(is_traced, (*args, *kwargs.values()))):
            original(*args, **kwargs)

    return validation


def _standard_normal(shape: Any, dtype: Any, device: Any) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _batched_state(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives recurrent layers an input and an initial state that both carry the examples' dimension, where one does."""
    assert isinstance(layer, nn.RNNBase | nn.RNNCellBase)
    named = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    x, hx = named["input"], named.get("hx")
    if not isinstance(x, Tensor):  # packed
        return None
    pair = isinstance(layer, nn.LSTM | nn.LSTMCell)
    given = [] if hx is None else list(hx) if pair else [hx]
    like = next((t for t in (x, *given) if carries_batch(t)), None)
    if like is None:
        return None
    given = given or [like.new_zeros(shape, dtype=x.dtype) for shape in _state_shapes(layer, x)]
    x, *given = [t if carries_batch(t) else t + like.new_zeros((), dtype=t.dtype) for t in (x, *given)]
    return (x, tuple(given) if pair else given[0]), {}


def _state_shapes(layer: nn.RNNBase | nn.RNNCellBase, x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the initial state (h, and c for an LSTM) for the input ``x``."""
    if isinstance(layer, nn.RNNCellBase):
        return [(*x.shape[:-1], layer.hidden_size)] * (2 if isinstance(layer, nn.LSTMCell) else 1)
    batch = [x.shape[0] if layer.batch_first else x.shape[1]] if x.dim() == 3 else []
    layers = layer.num_layers * (2 if layer.bidirectional else 1)
    shapes = [(layers, *batch, layer.proj_size or layer.hidden_size), (layers, *batch, layer.hidden_size)]
    return shapes if isinstance(layer, nn.LSTM) else shapes[1:]


# --- naming the line -------------------------------------------------------------------------------------------------


def explain(error: BaseException, module: nn.Module, *, engine: str = "vmap") -> NoReturn:
    """Raises :class:`UnsupportedModelError` for code that runs alone but not under ``vmap``.

    The message names the user's line, the innermost layer where one is known, and the engine that can run it.

    Args:
        engine: which one met it.
    """
    if isinstance(error, UnsupportedModelError):
        raise error
    where = line_of(error.__traceback__)
    layer = _innermost_layer([frame for frame, _ in traceback.walk_tb(error.__traceback__)], module)
    at = f" in layer {layer}" if layer else ""
    summary = str(error).strip().split("\n")[0][:200]
    if "mutate a captured Tensor" in summary:
        raise UnsupportedModelError(
            f"{where}{at} writes into a tensor from outside the step, such as a buffer: no noise protects it, so this "
            f"is refused under every engine. Write it in on_train_batch_end, from public quantities "
            f"[{type(error).__name__}: {summary}]"
        ) from error
    remedy = {
        "vmap": "Use engine='loop', which runs one example at a time, or rewrite that line",
        "ghost": "Use engine='auto', which goes on to an engine that runs it, or rewrite that line",
    }
    raise UnsupportedModelError(
        f"{where}{at} cannot run for all examples at once (engine={engine!r}): {_cause(summary)}. "
        f"{remedy[engine]} [{type(error).__name__}: {summary}]"
    ) from error


_CHECKPOINTS = ("checkpoint", "saved_tensors_hooks", "saved tensor hooks", "_NoopSaveInputs")
"""What torch says of activation checkpoints under ``vmap``; torch 2.6 names its own function."""


def _cause(message: str) -> str:
    """What functorch's message means for the user."""
    if ".item()" in message or "data-dependent" in message or "aten::_local_scalar_dense" in message:
        return "it reads the value of a tensor (.item(), float(), bool(), an `if` on data, a boolean index)"
    if "inplace" in message or "in-place" in message:
        return (
            "it writes an example's values into a tensor without the examples' dimension (make it by x.new_zeros(...) "
            "or torch.zeros_like(x) instead of torch.zeros; a buffer must not be written at all)"
        )
    if "autograd.Function" in message or "setup_context" in message:
        return "a custom autograd.Function has no vmap rule (set generate_vmap_rule = True and define setup_context)"
    if "stack expects each tensor to be equal size" in message or "dynamic shape" in message:
        return "the size of a tensor depends on the data (packed sequences, boolean indices)"
    if "data pointer" in message or "storage" in message:
        return "it needs a tensor's memory (numpy(), packed sequences, a fused kernel)"
    if "does not require grad" in message or "differentiated Tensors" in message:
        return "it asks autograd for a gradient inside the step (torch.autograd.grad, backward)"
    if "saved_tensors_hooks (or" in message:
        return "what the backward pass keeps is that of all examples together"
    if any(words in message for words in _CHECKPOINTS):
        return "activation checkpointing cannot be traced"
    return "torch.func has no way to run it"


def _innermost_layer(frames: list[FrameType], module: nn.Module) -> str | None:
    names = {id(layer): name for name, layer in module.named_modules()}
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        name = names.get(id(owner)) if isinstance(owner, nn.Module) else None
        if name:
            return f"{name!r} ({type(owner).__name__})"
    return None
