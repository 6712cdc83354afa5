"""Modules whose parameters are sharded by ``fully_shard`` (FSDP2): weights gathered when a step needs them, sums of
gradients reduced into shards.

FSDP's own hooks serve one forward and one backward pass that all ranks make together, and reduce what they find in
``.grad``. A private step makes passes that differ between ranks, under ``vmap``, and leaves nothing in ``.grad``. So
while it runs

* each gathering of a layer's weights is asked for by :class:`~lightning_lap2.gradients.exchange.Exchange`;
* a layer's weights are gathered again when the gradient of its output is there, and freed when that of its input is:
  hooks on the tensors that the graph is recorded of, which under ``vmap`` are the physical ones;
* no gradient is reduced by FSDP. The clipped sum is, parameter by parameter, each at once into its shards: no rank
  ever holds the sum of them all;
* every pass begins with weights gathered anew, so that nothing written into them reaches another example.

Norms need no other rank: each rank has examples of its own and, for the moment, whole weights.

torch's private names of FSDP2 are all in this file; ``tests/gradients/test_sharding.py`` pins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.gradients.exchange import Exchange
from lightning_lap2.gradients.marks import unmark
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.physical import functorch_left, recorded, replicas_of
from lightning_lap2.gradients.step.replacing import replaced


class Sharding:
    """The sharded layers of one module.

    Args:
        module: some of whose layers went through ``fully_shard``.

    Raises:
        UnsupportedSettingError: parameters that are sharded in another way, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._states: list[Any] = []
        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                state: Any = layer._get_fsdp_state()
                state._lazy_init()  # the first of a tree is its root
                if state not in self._states:
                    self._states.append(state)
        self._groups: list[Any] = [group for state in self._states for group in _groups_of(state)]
        self._of = {id(p.sharded_param): (number, p) for number, g in enumerate(self._groups) for p in g.fsdp_params}
        self.contributions = 0
        self._held = False
        self._kept: set[int] = set()
        self._sums: tuple[ShardedLayout, list[Tensor]] | None = None
        self._pending: tuple[Tensor, Tensor] | None = None
        self._check(module)
        self.in_low_precision = any(
            group.mp_policy.param_dtype not in (None, torch.float32, torch.float64) for group in self._groups
        )
        self.device: torch.device = self._groups[0].device
        self.exchange = Exchange(self._serve, self.device)

    def _check(self, module: nn.Module) -> None:
        ranks = torch.distributed.get_world_size()
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            known = self._of.get(id(parameter))
            if known is None:
                raise UnsupportedSettingError(
                    f"the parameter {name} is a DTensor that fully_shard does not manage (tensor parallelism, "
                    "distribute_tensor), and norms over parts of a gradient are not proven: shard by fully_shard "
                    "alone, with ModelParallelStrategy(tensor_parallel_size=1)"
                )
            if isinstance(self._groups[known[0]].offload_policy, CPUOffloadPolicy):
                raise UnsupportedSettingError(
                    f"the parameter {name} has offload_policy=CPUOffloadPolicy(), which was never tried: use "
                    "fully_shard without it"
                )
            kinds = [type(placement) for placement in parameter.placements]
            if kinds not in ([Shard], [Replicate, Shard]) or parameter.device_mesh.size() != ranks:
                raise UnsupportedSettingError(
                    f"the parameter {name} is placed by {parameter.placements} on {parameter.device_mesh.size()} of "
                    f"{ranks} ranks; shard over all ranks (FSDP), or over a mesh of replicas and shards (HSDP)"
                )

    # -- one meeting, one pass ------------------------------------------------------------------------------------

    @contextmanager
    def meeting(self, layout: ShardedLayout, total: Tensor | None) -> Iterator[None]:
        """Around what all ranks do together: a step on a batch. Weights are sharded before and after.

        Args:
            total: where this rank's part of the sums goes, those of other ranks' examples too.
        """
        self.rest()
        self._sums = None if total is None else (layout, layout.views(total))
        with ExitStack() as undo:
            undo.callback(self.rest)
            for number, group in enumerate(self._groups):
                for name, value in self._methods(number, group).items():
                    undo.enter_context(replaced(group, name, value))
            for state in self._states:
                undo.enter_context(replaced(state, "_register_pre_backward_hook", self._before_backward(state)))
            undo.enter_context(_own_collectives_refused())
            undo.enter_context(self.exchange.meeting())
            yield

    def rest(self) -> None:
        """Every layer as it is between steps: its weights freed but for this rank's shards."""
        self._held = False
        self._kept.clear()
        for state in self._states:
            idle = type(state._training_state).IDLE
            state._training_state = idle
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            getattr(state, "_modules_to_run_forward", set()).clear()
            state._comm_ctx.post_forward_order.clear()
            for group in _groups_of(state):
                group._training_state = idle
                group._post_forward_indices.clear()
                group._to_sharded()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, the modules hold the parameters that they hold between steps; the gathered ones are kept aside.
        Where the user's code has put something else it stays."""
        aside = []
        for group in self._groups:
            if group.is_unsharded:
                for p in group.fsdp_params:
                    for owner, name in _places(p):
                        if owner._parameters.get(name) is p._unsharded_param:
                            owner._parameters[name] = p.sharded_param
                            aside.append((owner._parameters, name, p._unsharded_param))
        try:
            yield
        finally:
            for held, name, value in aside:
                held[name] = value

    # -- weights --------------------------------------------------------------------------------------------------

    def leaf(self, parameter: Tensor) -> Tensor:
        """What the graph is recorded of in place of a parameter, once it was gathered."""
        known = self._of.get(id(parameter))
        return parameter if known is None else getattr(known[1], "_unsharded_param", parameter)

    def whole(self, parameter: Tensor) -> Tensor:
        """The parameter with all its entries, gathered until the end of the pass."""
        number, p = self._of[id(parameter)]
        if not self._groups[number].is_unsharded:
            self.exchange.request(number)
        self._kept.add(number)
        return p._unsharded_param

    def hold(self) -> None:
        """From here to the end of the pass no weights are freed."""
        self._held = True

    def _methods(self, number: int, group: Any) -> dict[str, Any]:
        """What stands in place of a group's own while the ranks meet."""

        def unshard(async_op: bool = False) -> None:
            if not group.is_unsharded:
                self.exchange.request(number)

        def reshard() -> None:
            forward = group._training_state == type(group._training_state).FORWARD
            # a forward pass within a backward one computes activations again: its own backward is next
            if not _in_backward() and not (forward and not group._reshard_after_forward):
                self._free(number)

        def after_backward(args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._watch((args, kwargs), lambda grad: self._free(number))
            return args, kwargs

        return {
            "unshard": unshard,
            "reshard": reshard,
            "_register_post_backward_hook": after_backward,
            "_record_post_forward": lambda: None,
        }

    def _before_backward(self, state: Any) -> Callable[[Any], Any]:
        def register(output: Any) -> Any:
            def gather(grad: Tensor) -> None:
                for group in _groups_of(state):
                    group.unshard()

            self._watch(output, gather)
            return output

        return register

    def _watch(self, tree: Any, hook: Callable[[Tensor], None]) -> None:
        """Calls ``hook`` when the gradient of any of the tensors is there."""
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and (tensor := recorded(leaf)) is not None:
                tensor.register_hook(hook)

    def _free(self, number: int) -> None:
        if not self._held and number not in self._kept:
            self._groups[number]._to_sharded()

    # -- collectives ----------------------------------------------------------------------------------------------

    def _serve(self, request: int, mine: bool) -> None:
        if request < len(self._groups):
            self._gather(self._groups[request], mine)
        else:
            self._reduce(request - len(self._groups), mine)

    @torch.no_grad()
    def _gather(self, group: Any, mine: bool) -> None:
        """All ranks give their shards of a layer's weights. On a rank that did not ask everything is as before."""
        gathered = group.is_unsharded
        before = [(o._parameters, n, o._parameters[n]) for p in group.fsdp_params for o, n in _places(p)]
        with _disable_current_modes(), functorch_left(), group.use_training_state(type(group._training_state).IDLE):
            group._to_sharded()
            type(group).unshard(group)
            type(group).wait_for_unshard(group)
            for p in group.fsdp_params:
                unmark(p._unsharded_param)  # the same memory may have held what a hook computed
            if not mine:
                if not gathered:
                    group._to_sharded()
                for held, name, value in before:
                    held[name] = value

    def reduce(self, number: int, whole: Tensor, into: Tensor) -> None:
        """Adds the sum over ranks of what they have for a parameter to its shards, on this rank to ``into``."""
        self._pending, self.contributions = (whole, into), self.contributions + 1
        self.exchange.request(len(self._groups) + number)
        self._pending = None

    def _reduce(self, number: int, mine: bool) -> None:
        assert self._sums is not None
        layout, views = self._sums
        whole, into = None, views[number]
        if mine:
            assert self._pending is not None
            whole, into = self._pending
        with _disable_current_modes(), functorch_left():
            into += layout.reduced(number, whole)


class ShardedLayout(ParameterLayout):
    """The layout of a module with sharded layers, trainable or frozen.

    The flat vector of sums holds, of every sharded trainable parameter, this rank's shard, and after them the whole of
    every replicated one. Shards hold the sum over all ranks at once; the rest this rank's own until it is released.

    Args:
        sharding: of the module.

    Attributes:
        own: entries of the shards, the first of the flat vector: summed over all ranks, and noised by this rank alone.
        replicas: the process group of the ranks that hold the same shards; ``None`` where no two do.
    """

    among_others = True

    def __init__(self, module: nn.Module, sharding: Sharding) -> None:
        super().__init__(module)
        self._sharding = sharding
        self._shards = {k: p.to_local() for k, p in enumerate(self.parameters) if isinstance(p, DTensor)}
        self.scattered, self.in_low_precision = bool(self._shards), sharding.in_low_precision
        self._local: list[slice] = [slice(0, 0)] * len(self.parameters)
        start = 0
        for k in sorted(range(len(self.parameters)), key=lambda k: k not in self._shards):
            size = self._shards[k].numel() if k in self._shards else self.sizes[k]
            self._local[k] = slice(start, start + size)
            start += size
        self._held = start
        self.own = sum(shard.numel() for shard in self._shards.values())
        self.replicas = self._replicas()

    def _replicas(self) -> torch.distributed.ProcessGroup | None:
        """
        Raises:
            UnsupportedSettingError: some parameters are replicated and others not.
        """
        sharded: list[Any] = [self.parameters[k] for k in self._shards]
        if len(meshes := {p.device_mesh for p in sharded}) > 1:
            raise UnsupportedSettingError(
                f"trainable parameters are sharded over {len(meshes)} different device meshes; give fully_shard one "
                "mesh for all layers that train"
            )
        return replicas_of(sharded[0]) if sharded else None

    @property
    def contributions(self) -> int:  # type: ignore[override]
        return self._sharding.contributions

    def again(self, module: nn.Module) -> ParameterLayout:
        self._sharding.rest()
        return ShardedLayout(module, self._sharding)

    def meeting(self, total: Tensor | None = None) -> AbstractContextManager[None]:
        return self._sharding.meeting(self, total)

    def everywhere(self, fact: bool) -> bool:
        return self._sharding.exchange.everywhere(fact)

    def begin_pass(self) -> None:
        self._sharding.rest()

    def at_rest(self) -> AbstractContextManager[None]:
        return self._sharding.at_rest()

    def leaves(self) -> Sequence[Tensor]:
        return [self._sharding.leaf(p) for p in self.parameters]

    def whole(self, number: int) -> Tensor:
        parameter = self.parameters[number]
        return self._sharding.whole(parameter) if number in self._shards else parameter

    def hold(self) -> None:
        self._sharding.hold()

    @property
    def held(self) -> int:
        return self._held

    @property
    def device(self) -> torch.device:
        return self._sharding.device

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` (``[held]``, or longer), one per parameter: of shards in the shards' shape."""
        shapes = (self._shards[k].shape if k in self._shards else p.shape for k, p in enumerate(self.parameters))
        return [flat[place].view(shape) for place, shape in zip(self._local, shapes, strict=True)]

    def write_grads(self, flat: Tensor) -> None:
        for k, (parameter, view) in enumerate(zip(self.parameters, self.views(flat), strict=True)):
            grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            parameter.grad = self._sharded_like(parameter, grad) if k in self._shards else grad

    @staticmethod
    def _sharded_like(parameter: Any, shard: Tensor) -> DTensor:
        return DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @contextmanager
    def summand(self, views: Sequence[Tensor], number: int) -> Iterator[Tensor]:
        """See :meth:`ParameterLayout.summand`. A sharded parameter's is whole inside; then all ranks' are added up,
        each shard on the rank that it belongs to."""
        if number not in self._shards:
            yield views[number]
            return
        whole = torch.zeros(self.parameters[number].shape, dtype=self.dtype, device=self.device)
        yield whole
        self._sharding.reduce(number, whole, views[number])

    @torch.no_grad()
    def reduced(self, number: int, whole: Tensor | None) -> Tensor:
        """This rank's shard of the sum over ranks; ``None`` on those that have nothing to add. Called by all."""
        parameter: Any = self.parameters[number]
        if whole is None:
            whole = torch.zeros(parameter.shape, dtype=self.dtype, device=self.device)
        partial = DTensor.from_local(
            whole, parameter.device_mesh, [Partial()] * parameter.device_mesh.ndim, run_check=False
        )
        return _REDISTRIBUTE(partial, placements=parameter.placements)._local_tensor


_REDISTRIBUTE = DTensor.redistribute


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.11
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _places(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """Every (module, name) that holds a parameter."""
    info = fsdp_param._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _own_collectives_refused() -> Iterator[None]:
    """Inside, the user's step may not gather a sharded parameter itself."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedModelError(
                f"training_step calls {name}() on a parameter that fully_shard keeps in shards: its gradient would "
                "pass by clipping, and ranks that drew fewer examples would not take part. Use the layer by calling "
                "it (its weights are whole inside its forward), and compute penalties on weights in the optimizer "
                "(weight_decay)"
            )

        return refused

    with ExitStack() as undo:
        for name in ("full_tensor", "to_local", "redistribute"):
            undo.enter_context(replaced(DTensor, name, refuse(name)))
        yield
