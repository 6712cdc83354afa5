"""What a strategy leaves to us: what several ranks hold is equal on them when training begins, and stays so.

DistributedDataParallel tells every rank the weights of rank 0 when training begins; ModelParallelStrategy does not, so
adapters beside a sharded base, and the shards of each replica under HSDP, begin as every rank's own generator made
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import nn

from lightning_lap2.callback.ledger.module_mark import fingerprint
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients.physical import held_here, replicas_of


def equalise(module: nn.Module, strategy: Any) -> None:
    """Gives parameters and buffers that several ranks hold the value of the first of them, where the strategy did
    not."""
    if not _left_to_us(strategy):
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            group, own = replicas_of(tensor), held_here(tensor).detach()
            if group is not None:
                told = own.contiguous()
                torch.distributed.broadcast(told, group=group, group_src=0)
                if told is not own:
                    own.copy_(told)


def check_equal(module: nn.Module, strategy: Any) -> None:
    """
    Raises:
        UnsupportedSettingError: a parameter differs between ranks that hold the same, by name.
    """
    if not _left_to_us(strategy):
        return
    own = {
        name: (torch.distributed.get_process_group_ranks(group), fingerprint(parameter))
        for name, parameter in module.named_parameters()
        if (group := replicas_of(parameter)) is not None
    }
    told: list[Any] = [None] * strategy.world_size
    torch.distributed.all_gather_object(told, own)
    for rank, held in enumerate(told):
        for name, (members, found) in held.items():
            if told[members[0]][name][1] != found:
                raise UnsupportedSettingError(
                    f"the parameter {name} is not the same on ranks {members[0]} and {rank}: each computes gradients "
                    "at weights of its own, and none of them is what is trained. Something writes it on each rank by "
                    "itself (a callback, a hook): write the same everywhere, or on one rank and broadcast"
                )


def _left_to_us(strategy: Any) -> bool:
    return type(strategy).__name__ == "ModelParallelStrategy" and strategy.world_size > 1
