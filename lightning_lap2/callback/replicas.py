"""What a strategy leaves to us: replicated parameters that are equal on all ranks, and stay so.

DistributedDataParallel tells every rank the weights of rank 0 when training begins; ModelParallelStrategy does not, so
adapters beside a sharded base begin as each rank's own generator made them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_lap2.callback.marks import fingerprint
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients.physical import held_here


def equalise(module: nn.Module, strategy: Any) -> None:
    """Gives every rank the replicated parameters and buffers of rank 0, where the strategy did not."""
    if _left_to_us(strategy):
        with torch.no_grad():
            for _, tensor in _replicated(module):
                torch.distributed.broadcast(tensor.data, src=0)


def check_equal(module: nn.Module, strategy: Any) -> None:
    """
    Raises:
        UnsupportedSettingError: a replicated parameter differs between ranks, by name.
    """
    if not _left_to_us(strategy):
        return
    own = [(name, fingerprint(tensor)) for name, tensor in _replicated(module) if isinstance(tensor, nn.Parameter)]
    first = strategy.broadcast(own)
    if not strategy.reduce_boolean_decision(own == first):
        names = [name for (name, here), (_, there) in zip(own, first, strict=True) if here != there]
        raise UnsupportedSettingError(
            f"replicated parameters are not the same on all ranks ({names[0] if names else 'on another rank'}): each "
            "rank computes gradients at weights of its own, and none of them is what is trained. Something writes them "
            "on each rank by itself (a callback, a hook): write the same everywhere, or on rank 0 and broadcast"
        )


def _left_to_us(strategy: Any) -> bool:
    return type(strategy).__name__ == "ModelParallelStrategy" and strategy.world_size > 1


def _replicated(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of which every rank has the whole, each once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if held_here(tensor) is tensor]
