"""Which memory holds values of examples: known from what was computed from them, not from shapes.

A dispatch mode below ``vmap`` and autograd sees every operation on physical tensors. It marks the storage of what
comes out where something marked went in; views share the storage of what they view, so nothing else is needed. Marks
carry the number of the *generation* they were made in (a step, a chunk of it, one record under ``engine="loop"``) and
are never taken back: when an operation reads an older generation's memory, a tensor has escaped (into a global, a
closure, an ``lru_cache``) and come back, and with it other examples' values. Such an operation is refused.

What users' hooks compute between steps from the batch, the outputs, or tensors of unknown origin is marked as well
(:func:`mark_outside`), so that no step can read it, wherever the hook has put it.

What leaves torch (``.item()``, ``.tolist()``, numpy) and comes back as numbers is not seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lap2.errors import IsolationError, UnsupportedModelError
from lightning_lap2.gradients.lines import line_now
from lightning_lap2.gradients.physical import (
    PLAIN_TENSORS,
    carries_batch,
    count_modes,
    dispatches_itself,
    held_here,
    innermost,
    is_wrapped,
    requires_grad,
)

_generations = itertools.count(1)
RECORDS, UNKNOWN, DATA = 0, -1, -2
"""In place of a generation: made outside a step, from examples or from what may hold some; the train data's own."""
_MARK = "_lap2_generation"
_SLICES = "_lap2_slices"
_HOLDERS = (Tensor, list, tuple)
_SELECT, _STACK = torch.ops.aten.select.int, torch.ops.aten.stack.default


class Marks(TorchDispatchMode):
    """Follows the values of the examples while active. One generation: enter it once.

    Args:
        roots: physical tensors that hold the examples' values. Memory that several generations share (slices of one
            batch) belongs to the latest, so an escaped slice of it would not be noticed: give each its own.
        vmapped: whether the code inside runs under ``vmap``, where random numbers have the examples' dimension as well.
        graph: whether to note :attr:`nodes`.

    Attributes:
        nodes: the autograd nodes whose outputs hold values of examples and were read by some operation.
        slices: those among them whose outputs are of one example alone: where an operator has no batching rule,
            ``vmap`` runs it for one example after the other.
        slicing: whether it has begun to.
    """

    def __init__(self, roots: Iterable[Tensor], *, vmapped: bool, graph: bool = False) -> None:
        super().__init__()
        self.generation = next(_generations)
        self.nodes: set[Any] = set()
        self.slices: set[Any] = set()
        self.slicing = False
        self._vmapped, self._graph = vmapped, graph
        self._ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        for root in roots:
            setattr(_memory(root), _MARK, self.generation)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the function below, at a fifth of its time; compiled code does not come here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._ranks and (types or _is_collective(func)):
            _refuse_collective(func, types)
        if types and self._vmapped:
            _check_classes(types)
        if kwargs:
            read = [self._read(value) for value in (*args, *kwargs.values()) if isinstance(value, _HOLDERS)]
            out = func(*args, **kwargs)
        else:
            read = [self._read(value) for value in args if isinstance(value, _HOLDERS)]
            out = func(*args)
        if True in read or (self._vmapped and _is_random(func)):
            for tensor in _tensors(out):
                setattr(_memory(tensor), _MARK, self.generation)
            if self._graph:
                self._follow_slices(func, args, out)
        return out

    def told(self, read: Iterable[Any]) -> bool:
        """Of an operation that the mode is not to see, which reads these: whether it can be told, which it cannot of
        tensors that a further transform has wrapped or that are of a class of their own.

        Raises:
            IsolationError: one of them was computed from examples by an earlier call of the step.
        """
        for value in read:
            if isinstance(value, Tensor):
                if type(value) not in PLAIN_TENSORS or is_wrapped(value):
                    return False
                self._read(value)
        return True

    def made(self, tensor: Tensor) -> None:
        """Such an operation has made ``tensor`` from something that carries examples."""
        setattr(_memory(tensor), _MARK, self.generation)
        if self._graph and requires_grad(tensor):
            self.nodes.add(tensor.grad_fn)

    def _follow_slices(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """The user's ``select(0, ...)`` is ``select(1, ...)`` below ``vmap``: only ``vmap`` itself takes the examples
        apart along dimension 0, and stacks what came out."""
        if func is _SELECT and args[1] == 0:
            self.slicing = True
        elif not self.slicing or func is _STACK or not any(_is_slice(t) for t in _tensors(args)):
            return
        for tensor in _tensors(out):
            vars(_memory(tensor)).setdefault(_SLICES, set()).add(_place(tensor))

    def _read(self, tensor: Any) -> bool:
        """Whether an operand carries examples; of a list, whether some entry does."""
        if not isinstance(tensor, Tensor):
            return any([self._read(item) for item in tensor if isinstance(item, Tensor)])
        mark = getattr(_memory(tensor), _MARK, None)
        if mark is None:
            return False
        if mark != self.generation:
            raise _refusal(line_now(), mark)
        if self._graph and requires_grad(tensor):
            self.nodes.add(tensor.grad_fn)
            if self.slicing and _is_slice(tensor):
                self.slices.add(tensor.grad_fn)
        return True

    def __enter__(self) -> Marks:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)


def _check_classes(kinds: Iterable[Any]) -> None:
    for kind in kinds:
        if dispatches_itself(kind):
            raise UnsupportedModelError(
                f"{line_now()} uses a {kind.__name__}, whose __torch_dispatch__ would be handed the whole batch: use "
                "engine='loop' (as 'auto' does), or plain tensors"
            )


_active: list[Marks] = []


def following() -> Marks | None:
    """The marks that follow the examples now, where an operation can be hidden from the mode and told to it: no other
    mode is active, and ``vmap`` does not take the examples apart."""
    if not _active or count_modes() != 1 or _active[-1].slicing:
        return None
    return _active[-1]


def known_clean(tensor: Tensor) -> bool:
    """Whether values of examples are being followed, and none went into ``tensor``."""
    return bool(_active) and not carries_batch(tensor) and not hasattr(_memory(innermost(tensor)), _MARK)


def escaped(where: str = "") -> IsolationError:
    """What to raise where a tensor of an earlier call comes back that torch itself refuses: ``vmap`` had wrapped it."""
    return _refusal(where or "training_step", 1)


def _refusal(where: str, mark: int) -> IsolationError:
    if mark == DATA:
        return data_read(f"{where} reads")
    return IsolationError(f"{where} reads {_origin(mark)}")


def data_read(who: str) -> IsolationError:
    """What to raise where a step looks up other records."""
    return IsolationError(
        f"{who} memory of the train data set: a step works on one example, and what it looks up of others would carry "
        "them past the clipping. Make it part of the record before training; what is public may be kept as a buffer "
        "of the module, or as a copy"
    )


def _origin(mark: int) -> str:
    if mark > 0:
        made = "an earlier call of training_step computed from examples and that was kept outside the module"
    elif mark == RECORDS:
        made = "a hook computed from training records (the batch, the outputs) and kept"
    else:
        made = "a hook computed from something that may hold training records (metrics, data, an array) and kept"
    return (
        f"a tensor that {made} (on a class, a global, a closure, the trainer, a data module, a cache of a function): "
        "it would carry examples past the clipping into a later loss. Keep nothing of the data between steps"
    )


def mark_outside(tensors: Iterable[Tensor], mark: int = RECORDS) -> None:
    """Notes that these hold (:data:`RECORDS`) or may hold (:data:`UNKNOWN`) values of examples and belong to no step,
    or are the train data's own (:data:`DATA`): an operation in a step that reads one is refused."""
    for tensor in tensors:
        memory = _memory(held_here(tensor))
        if getattr(memory, _MARK, mark) <= mark:
            setattr(memory, _MARK, mark)


def unmark(tensor: Tensor) -> None:
    """Takes back what :func:`mark_outside` noted."""
    memory = _memory(held_here(tensor))
    if getattr(memory, _MARK, 1) <= RECORDS:
        delattr(memory, _MARK)


def holds_examples(tensor: Tensor) -> bool:
    """Whether values of examples are known to have gone into it, in a step or in a hook."""
    return getattr(_memory(held_here(tensor)), _MARK, UNKNOWN) >= RECORDS


def _memory(tensor: Tensor) -> Any:
    """What a mark is put on: the storage, which outlives views and is shared by them."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _place(tensor: Tensor) -> Any:
    """Which part of its memory a tensor is."""
    if tensor.layout is not torch.strided:
        return None
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_slice(tensor: Tensor) -> bool:
    return _place(tensor) in getattr(_memory(tensor), _SLICES, ())


_collective: dict[Any, bool] = {}
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"})


def _is_collective(func: Any) -> bool:
    found = _collective.get(func)
    if found is None:
        found = _collective[func] = func.namespace in _COLLECTIVES
    return found


def _refuse_collective(func: Any, types: Any) -> None:
    """
    Raises:
        UnsupportedModelError: the step talks to other ranks, or computes with a parameter that is in shards.
    """
    if any(kind.__name__ == "DTensor" for kind in types):
        raise UnsupportedModelError(
            f"{line_now()} computes with a parameter that fully_shard keeps in shards (a DTensor): its gradient would "
            "pass by clipping, and ranks that drew fewer examples would not take part. Use a layer by calling it: its "
            "weights are whole inside its forward. A penalty on weights belongs into the optimizer (weight_decay); "
            "engine='vmap' holds all that trains whole, and takes it here"
        )
    if _is_collective(func):
        raise UnsupportedModelError(
            f"{line_now()} calls a collective of torch.distributed ({func.__name__}), which mixes the examples of all "
            "ranks (and would wait for ranks that drew fewer): log with sync_dist=True, or gather in on_train_batch_end"
        )


_random: dict[Any, bool] = {}


def _is_random(func: Any) -> bool:
    found = _random.get(func)
    if found is None:
        # `lift_fresh` makes a tensor of Python numbers: torch tags it so that tracers leave it alone
        found = _random[func] = (
            torch.Tag.nondeterministic_seeded in func.tags and func is not torch.ops.aten.lift_fresh.default
        )
    return found
