"""Norms of per-example gradients, measured on public data, from which a clipping norm C is chosen.

The accountant sees only C / b, so C costs no privacy as long as it is not computed from private data. The paper's
choice in practice is a percentile of gradient norms. A norm, or a percentile of norms, of *private* records is itself
private: no noise protects it. Hence the data here must be public, and the caller has to say that they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_lap2 import _validate
from lightning_lap2.batches import split_rows
from lightning_lap2.choices import NORMS, Norm
from lightning_lap2.gradients.clipping import total_norm
from lightning_lap2.gradients.engine import Engine
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.stepcall import StepCall
from lightning_lap2.gradients.trial.state import untouched


def gradient_norms(
    module: nn.Module,
    dataloader: Iterable[Any],
    *,
    data_is_public: bool,
    engine: str = "vmap",
    chunk_size: int | None = None,
    norm: Norm = "l2",
    max_examples: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Norm of the gradient of each example of PUBLIC data: what clipping to C would compare with C.

    .. warning:: The norms, and any C computed from them, are as private as the data they come from. On the private
       training set they break the guarantee, and no report would show it. Take a public data set of the same kind,
       or records that are published anyway.

    The user's ``training_step`` runs as in training: batch transfer hooks of the module, dropout and the train or
    eval mode of each layer as they are. It runs in the parameters' own precision and without a Trainer, so a step that
    uses ``self.trainer`` fails. Nothing is logged. Parameters, buffers, ``.grad``, metrics, attributes and the random
    generators are afterwards as they were. Norms are those of the parameters as they are: they change in training.

    Args:
        module: the LightningModule, on the device where it should run.
        dataloader: batches as ``training_step`` takes them; one pass over it.
        data_is_public: must be True, which declares that no record of the data is private.
        engine, chunk_size: as in ``Lap2Privacy``.
        norm: ``"l2"``, or ``"l1"`` for ``mechanism="laplace_l1"``.
        max_examples: stop after so many; ``None``: all.
        progress: a progress bar on stderr, if that is a terminal.

    Returns:
        fp64 tensor ``[N]`` on the CPU, in the order of the loader. ``inf`` stands for a gradient that is not finite
        (training drops such an example), 0 for an example without a loss.

    Raises:
        ValueError: ``data_is_public`` is not True, or there are no examples or no trainable parameters.
        UnsupportedModelError: the engine cannot run the step; names what it is and what to use instead.

    Example:
        >>> norms = gradient_norms(model, public_dataloader, data_is_public=True)  # doctest: +SKIP
        >>> Lap2Privacy(eps=1.0, max_grad_norm=suggest_max_grad_norm(norms))  # doctest: +SKIP

    Source: Lap2 (arXiv 2602.23516) for the choice of C by a percentile.
    """
    if not _validate.boolean("data_is_public", data_is_public):
        raise ValueError(
            "data_is_public must be True: norms of private gradients are private themselves, and a clipping norm "
            "chosen from them voids the guarantee. Measure on public data of the same kind, or choose max_grad_norm "
            "without data"
        )
    _validate.choice("norm", norm, NORMS)
    if max_examples is not None:
        _validate.integer("max_examples", max_examples, minimum=1)
    layout = ParameterLayout(module)
    if not layout.numel:
        raise ValueError(f"module must have trainable parameters, got a {type(module).__name__} without any")
    runner = _Runner(module, make_engine(engine, module, chunk_size=chunk_size), layout, _Meter(norm))
    found: list[Tensor] = []
    count = 0
    with untouched(module):
        for index, batch in enumerate(_shown(dataloader, progress)):
            found.append(runner.norms(batch, index))
            count += found[-1].numel()
            if max_examples is not None and count >= max_examples:
                break
    if not count:
        raise ValueError("dataloader must hold at least one example, got none")
    return torch.cat(found)[:max_examples]


@overload
def suggest_max_grad_norm(norms: Tensor | Sequence[float], percentile: float = 50.0) -> float: ...
@overload
def suggest_max_grad_norm(norms: Tensor | Sequence[float], percentile: Sequence[float]) -> list[float]: ...
def suggest_max_grad_norm(
    norms: Tensor | Sequence[float], percentile: float | Sequence[float] = 50.0
) -> float | list[float]:
    """A clipping norm C from norms of per-example gradients on public data: their percentile.

    At percentile p about 100 - p per cent of the gradients are cut, at the start of training. A smaller C means less
    noise and more bias; the privacy cost is the same for each, see ``optimize_clip_and_scale``.

    Args:
        norms: of :func:`gradient_norms`, ``[N]``. Infinite ones are left out.
        percentile: in [0, 100]; several give a list, a grid for ``optimize_clip_and_scale``.

    Returns:
        C > 0, linearly interpolated between norms; one per percentile, in the order given.

    Raises:
        TypeError, ValueError: a percentile outside [0, 100]; no finite norm, or a negative one; a percentile that is
            0 (gradients vanish), naming it.
    """
    values = np.asarray(norms.detach().cpu() if isinstance(norms, Tensor) else norms, dtype=np.float64).reshape(-1)
    if np.isnan(values).any() or (values < 0).any():
        raise ValueError("norms must not be negative or nan")
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise ValueError(f"norms must hold at least one finite norm, got {values.size} values without any")
    if isinstance(percentile, Sequence) and not isinstance(percentile, str):
        return [_percentile(finite, p) for p in percentile]
    return _percentile(finite, percentile)


def _percentile(finite: np.ndarray, percentile: float) -> float:
    number = _validate.real("percentile", percentile)
    if not 0.0 <= number <= 100.0:
        raise ValueError(f"percentile must lie in [0, 100], got {percentile!r}")
    value = float(np.percentile(finite, number))
    if value == 0.0:
        raise ValueError(
            f"percentile={percentile!r} of the norms is 0, which is no clipping norm: that many gradients vanish. Take "
            "a larger percentile"
        )
    return value


@dataclass
class _Meter:
    """A clipper that keeps the norms and lets nothing into the sum."""

    norm: Norm
    seen: list[Tensor] = field(default_factory=list)

    def weights(self, norms: Tensor) -> Tensor:
        self.seen.append(total_norm(norms, self.norm).cpu())
        return torch.zeros_like(norms)

    def take(self, count: int) -> Tensor:
        """The norms since the last call; a step that returned no loss was never asked about: zeros."""
        found = torch.cat(self.seen) if self.seen else torch.zeros(count, dtype=torch.float64)
        self.seen = []
        return torch.where(torch.isfinite(found), found, torch.inf)


@dataclass(frozen=True)
class _Runner:
    module: nn.Module
    engine: Engine
    layout: ParameterLayout
    meter: _Meter

    def norms(self, batch: Any, index: int) -> Tensor:
        """Norms ``[B]`` of one loader batch."""
        batch = _transferred(self.module, batch, self.layout.device)
        examples = split_rows(batch)
        if self.engine.name != "loop":
            return self._measure(batch, examples.count, index)
        # one call per example, so that one without a loss keeps its place
        return torch.cat([self._measure(examples.example(i), 1, index) for i in range(examples.count)])

    def _measure(self, batch: Any, count: int, index: int) -> Tensor:
        args = (batch, index) if _takes_index(self.module) else (batch,)
        self.engine.accumulate(StepCall(args, count), self.layout, self.meter, self.layout.zeros())
        return self.meter.take(count)


def _takes_index(module: nn.Module) -> bool:
    """Whether ``training_step`` takes ``batch_idx`` beside the batch."""
    kinds = inspect.signature(module.training_step).parameters.values()  # type: ignore[arg-type]
    positional = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in kinds)


def _transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """The batch as ``training_step`` gets it: through the module's hooks, where it is a LightningModule."""
    if not hasattr(module, "transfer_batch_to_device"):
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, device, 0)
    return module.on_after_batch_transfer(batch, 0)


def _shown(dataloader: Iterable[Any], progress: bool) -> Iterator[Any]:
    if not progress:
        yield from dataloader
        return
    from tqdm import tqdm

    yield from tqdm(dataloader, desc="gradient norms", unit="batch", disable=None)
