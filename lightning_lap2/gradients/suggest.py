"""Which layers of a model cannot be trained privately, and what to put in their place.

``suggest(model)`` looks at layers only; what a ``training_step`` or a ``forward`` does between them is found by the
pre-flight at fit start. It changes nothing: a swapped layer is another model, whose weights mean something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.ao.quantization import FakeQuantizeBase, ObserverBase
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

_ALL = ("vmap", "ghost", "loop")


@dataclass(frozen=True)
class Suggestion:
    """One layer that will be refused or run slowly, and a drop-in for it.

    Attributes:
        path: where the layer is, as in ``model.get_submodule(path)``; ``""`` is the model itself.
        layer: its class name.
        refused_by: names of the engines that refuse it; empty for a layer that runs, with a remark.
        reason: why.
        replacement: code to put in its place, or the setting to change.
    """

    path: str
    layer: str
    refused_by: tuple[str, ...]
    reason: str
    replacement: str

    def __str__(self) -> str:
        engines = "every engine" if self.refused_by == _ALL else " and ".join(f"engine={e!r}" for e in self.refused_by)
        verdict = f"refused by {engines}" if self.refused_by else "runs"
        return f"{self.path or '(the model)'}: {self.layer} {verdict}: {self.reason}. Use {self.replacement}"


class Suggestions(list[Suggestion]):
    """A list that prints one suggestion a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no layer to change"


def suggest(model: nn.Module) -> Suggestions:
    """Lists the layers of ``model``, in its present mode, that an engine will refuse, each with a drop-in.

    Changes nothing. A layer reachable by several paths is listed once. BatchNorm with running statistics that is in
    eval mode is frozen, which is fine as long as it stays so.
    """
    found = Suggestions()
    for path, layer in model.named_modules():
        for look in _LOOKS:
            seen = look(layer)
            if seen is not None:
                refused_by, reason, replacement = seen
                found.append(Suggestion(path, type(layer).__name__, refused_by, reason, replacement))
    return found


_Seen = tuple[tuple[str, ...], str, str] | None


def _batch_norm(layer: nn.Module) -> _Seen:
    if not isinstance(layer, _BatchNorm) or not (layer.training or layer.running_mean is None):
        return None
    reason = "its output for one example depends on the whole batch, and its running statistics are not noised"
    channels = layer.num_features
    if not channels:  # lazy, not yet initialised
        return _ALL, reason, "nn.GroupNorm(32, num_channels)"
    # over [B, C] a group of few channels would keep little more than their signs
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else _groups(channels)
    affine = "" if layer.affine else ", affine=False"
    return _ALL, reason, f"nn.GroupNorm({groups}, {channels}{affine})"


def _groups(channels: int) -> int:
    """The largest power of 2, at most 32, that leaves groups of two channels or more; else 1."""
    return max((g for g in (2, 4, 8, 16, 32) if channels % g == 0 and channels >= 2 * g), default=1)


def _instance_norm(layer: nn.Module) -> _Seen:
    if not isinstance(layer, _InstanceNorm) or not (layer.training and layer.track_running_stats):
        return None
    name = type(layer).__name__.removeprefix("Lazy")
    features = layer.num_features or "num_features"
    affine = ", affine=True" if layer.affine else ""
    return (
        _ALL,
        "its running statistics are not noised",
        f"nn.{name}({features}{affine}), without track_running_stats",
    )


def _embedding(layer: nn.Module) -> _Seen:
    if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return None
    made = f"nn.{type(layer).__name__}({layer.num_embeddings}, {layer.embedding_dim})"
    if layer.max_norm is not None:
        return _ALL, "max_norm rewrites the rows that a batch uses, without noise", f"{made} without max_norm"
    if layer.scale_grad_by_freq:
        reason = "scale_grad_by_freq divides by counts over one example here, over the batch in plain training"
        return (), reason, f"{made} without scale_grad_by_freq"
    if layer.sparse:
        # noise is dense: a sparse gradient would save nothing
        refused_by = ("vmap",) if isinstance(layer, nn.Embedding) else ("vmap", "ghost")
        return refused_by, "sparse gradients cannot be traced", f"{made} without sparse"
    if isinstance(layer, nn.EmbeddingBag):
        reason = "engine='ghost' and 'vmap' run it for one example after the other, ghost on copies of the table"
        return (), reason, "it as it is, or nn.Embedding and a mean over its rows"
    return None


def _lazy(layer: nn.Module) -> _Seen:
    if not isinstance(layer, LazyModuleMixin) or not layer.has_uninitialized_params():
        return None
    made = type(layer).__name__.removeprefix("Lazy")
    reason = "its number of parameters, and so the noise, is not known before data has been seen"
    return _ALL, reason, f"nn.{made} with sizes given, or run the model once on made-up data before fit"


def _spectral_norm(layer: nn.Module) -> _Seen:
    hooked = any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
    if not layer.training or not (hooked or isinstance(layer, _SpectralNorm)):
        return None
    reason = "spectral_norm writes its power iteration's vectors in every training step"
    return _ALL, reason, "nn.utils.parametrizations.weight_norm, or no normalisation"


def _checkpointing(layer: nn.Module) -> _Seen:
    # Hugging Face models carry the flag on the layers that checkpoint
    if not isinstance(layer, CheckpointWrapper) and getattr(layer, "gradient_checkpointing", False) is not True:
        return None
    reason = "activation checkpointing cannot be traced"
    return ("vmap",), reason, "no checkpointing, or engine='ghost', which keeps its activations"


def _quantised(layer: nn.Module) -> _Seen:
    home = type(layer).__module__
    if isinstance(layer, FakeQuantizeBase | ObserverBase):
        return (
            _ALL,
            "observers record the range of the data without noise",
            "the float model, quantised after training",
        )
    if home.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return _ALL, "quantised layers have no gradients", "the float model, quantised after training"
    if home.startswith("bitsandbytes."):
        return ("vmap", "ghost"), "its kernels cannot be traced", "engine='loop', or the float layer"
    return None


def _recurrent(layer: nn.Module) -> _Seen:
    if not isinstance(layer, nn.RNNBase):
        return None
    reason = (
        "engine='vmap' and 'ghost' run it without its fused kernel, so slowly, and packed sequences only run under "
        "engine='loop'"
    )
    return (), reason, "it as it is, or engine='loop' where the sequences are packed"


_LOOKS: tuple[Callable[[nn.Module], _Seen], ...] = (
    _batch_norm,
    _instance_norm,
    _embedding,
    _lazy,
    _spectral_norm,
    _checkpointing,
    _quantised,
    _recurrent,
)
