"""Sharded layers in one process: torch's private names of FSDP2, and what is refused. Several are in tests/sharded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, StepRunner, make_layout
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.gradients.sharding import ShardedLayout, Sharding, _groups_of


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A job of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Net(nn.Module):
    """Two layers, with the step of a LightningModule."""

    def __init__(self, *, shard: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        if shard:
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(self.first, mesh=mesh, **options)
            fully_shard(self, mesh=mesh, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def batch(number: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(number, 3, generator=generator), torch.arange(number) % 2


def summed(module: nn.Module, *engines: str, **options: Any) -> Tensor:
    layout = make_layout(module)
    total = layout.zeros()
    runner = StepRunner(module, [make_engine(name, module, **options) for name in engines])
    runner.accumulate(StepCall((batch(), 0), 5), layout, FlatClipper(0.3), total)
    return total


def test_the_private_names_of_fsdp() -> None:
    module = Net()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()
    for name in ("_state_ctx", "_comm_ctx", "_training_state", "_register_pre_backward_hook"):
        assert hasattr(state, name), name
    for name in ("iter_forward_root", "post_backward_final_callback_queued"):
        assert hasattr(state._state_ctx, name), name
    assert isinstance(state._comm_ctx.post_forward_order, list)
    assert {"FORWARD", "IDLE"} <= set(type(state._training_state).__members__)
    (group,) = _groups_of(state)
    for name in ("fsdp_params", "is_unsharded", "_to_sharded", "unshard", "wait_for_unshard", "reshard", "device",
                 "use_training_state", "offload_policy", "mp_policy", "_reshard_after_forward", "_record_post_forward",
                 "_post_forward_indices"):  # fmt: skip
        assert hasattr(group, name), name
    assert list(inspect.signature(group._register_post_backward_hook).parameters) == ["args", "kwargs"]
    assert list(inspect.signature(state._register_pre_backward_hook).parameters) == ["output"]
    group.unshard()
    group.wait_for_unshard()
    for parameter in group.fsdp_params:
        assert isinstance(parameter.sharded_param, DTensor)
        assert type(parameter._unsharded_param) is nn.Parameter
        info = parameter._module_info
        assert info.module._parameters[info.param_name] is parameter._unsharded_param
        assert info.shared_modules == info.shared_param_names == []
    group._to_sharded()
    assert torch._C._current_graph_task_id() == -1  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
def test_sums_are_those_of_a_whole_module(engine: str) -> None:
    module = Net()
    before = [p.to_local().clone() for p in module.parameters()]  # type: ignore[attr-defined]
    torch.testing.assert_close(summed(module, engine), summed(Net(shard=False), "loop"), rtol=0, atol=1e-6)
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert isinstance(parameter, DTensor) and parameter.grad is None
        assert torch.equal(parameter.to_local(), value)


def test_the_layout_knows_the_whole_and_its_part() -> None:
    module = Net()
    layout, plain = make_layout(module), ParameterLayout(Net(shard=False))
    assert isinstance(layout, ShardedLayout) and layout.scattered
    assert layout.numel == layout.held == layout.own == plain.numel == 26
    assert (layout.names, layout.layer_sizes) == (plain.names, plain.layer_sizes)
    flat = torch.arange(26.0)
    layout.write_grads(flat)
    for parameter, expected in zip(module.parameters(), plain.views(flat), strict=True):
        assert isinstance(parameter.grad, DTensor) and torch.equal(parameter.grad.to_local(), expected)
    for parameter in module.second.parameters():
        parameter.requires_grad_(False)
    assert layout.again(module).numel == 16
    assert type(make_layout(Net(shard=False))) is ParameterLayout


def test_an_engine_that_gave_up_after_a_part_was_added_is_not_repeated() -> None:
    """What was added to other ranks' shards cannot be taken back."""

    class Late(Net):
        passes = 0

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            type(self).passes += 1
            if type(self).passes == 3:
                raise UnsupportedModelError("no more")
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedSettingError, match="cannot be repeated: use engine='ghost' without chunk_size"):
        summed(Late(), "ghost", "loop", chunk_size=2)


def test_what_is_not_sharded_by_fully_shard_alone_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    module = Net(shard=False)
    module.first.weight = nn.Parameter(distribute_tensor(module.first.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(UnsupportedSettingError, match=r"first\.weight is a DTensor .*tensor_parallel_size=1"):
        make_layout(module)
    with pytest.raises(UnsupportedSettingError, match="CPUOffloadPolicy"):
        Sharding(Net(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def test_records_are_taken_one_by_one() -> None:
    """A record's clipped gradient is its own: sums of parts add up to the whole."""
    module, (x, y) = Net(), batch()
    layout = make_layout(module)
    runner, parts = StepRunner(module, [make_engine("ghost", module)]), layout.zeros()
    for k in range(5):
        runner.accumulate(StepCall(((x[k : k + 1], y[k : k + 1]), 0), 1), layout, FlatClipper(0.3), parts)
    torch.testing.assert_close(parts, summed(Net(), "ghost"), rtol=0, atol=1e-6)
