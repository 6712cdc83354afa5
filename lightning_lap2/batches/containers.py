"""Containers of tensors: taken apart and put together again, whatever the user's batches are made of.

At any depth: tuples, lists, named tuples, mappings (``dict``, ``defaultdict``, ``UserDict`` and so the Hugging Face
``BatchEncoding``), dataclasses, attrs classes, and types given to :func:`register_batch_type`. Everything else is a
leaf: a tensor, or a value that is handed on as it is (numbers, strings, arrays, objects of unknown classes).
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Children = dict[Hashable, Any]
PLAIN = (str, bytes, bool, int, float, complex, type(None))


class BatchType(NamedTuple):
    """How a registered class is taken apart (``split``) and made again (``join``)."""

    split: Callable[[Any], Mapping[Any, Any]]
    join: Callable[[Mapping[Any, Any]], Any]


_REGISTERED: dict[type, BatchType] = {}


def register_batch_type(
    kind: type, *, split: Callable[[Any], Mapping[Any, Any]], join: Callable[[Mapping[Any, Any]], Any]
) -> None:
    """Lets batches hold objects of a class whose tensors the fast engines can then take example by example.

    Without it such an object still trains, handed on whole to one example at a time (``engine="loop"``). Dataclasses,
    attrs classes, named tuples, lists and mappings need no registration.

    Args:
        kind: the class; subclasses are not covered.
        split: an object to a dict of its parts (tensors, or containers of them), the same keys for every object.
        join: such a dict to a new object. It must not keep the dict.

    Raises:
        TypeError: ``kind`` is not a class.

    Example:
        >>> class Pair:
        ...     def __init__(self, a, b):
        ...         self.a, self.b = a, b
        >>> register_batch_type(Pair, split=vars, join=lambda parts: Pair(**parts))
    """
    if not isinstance(kind, type):
        raise TypeError(f"kind must be a class, got {kind!r}")
    _REGISTERED[kind] = BatchType(split, join)


class Slot(NamedTuple):
    """Stands for a leaf in a skeleton: a tensor's or another value's place in its list."""

    place: int
    tensor: bool


class Flat(NamedTuple):
    """A batch taken apart.

    Attributes:
        skeleton: the containers, with a :class:`Slot` for each leaf.
        signature: equal for batches of the same containers, keys and kinds of leaves.
        tensors: the tensor leaves, in order.
        others: the other leaves, in order.
        paths: of the others, for messages.
    """

    skeleton: Any
    signature: Hashable
    tensors: list[Tensor]
    others: list[Any]
    paths: list[str]


def flatten(batch: Any) -> Flat:
    """Takes ``batch`` apart; :func:`rebuild` is its inverse."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    paths: list[str] = []

    def visit(node: Any, path: str) -> tuple[Any, Hashable]:
        if is_dense(node):
            tensors.append(node)
            return Slot(len(tensors) - 1, True), "tensor"
        parts = None if is_plain_list(node) else children(node)
        if parts is None:
            others.append(node)
            paths.append(path)
            return Slot(len(others) - 1, False), "other"
        made = {key: visit(child, f"{path}[{key!r}]") for key, child in parts.items()}
        skeleton = Inner(node, {key: found for key, (found, _) in made.items()})
        return skeleton, (type(node), *((key, kind) for key, (_, kind) in made.items()))

    skeleton, signature = visit(batch, "batch")
    return Flat(skeleton, signature, tensors, others, paths)


class Inner(NamedTuple):
    """A container in a skeleton: one of its kind, and what stands for its entries."""

    like: Any
    parts: Mapping[Hashable, Any]


def rebuild(skeleton: Any, tensors: Sequence[Any], others: Sequence[Any]) -> Any:
    """The batch again, with ``tensors`` and ``others`` for its leaves."""
    if isinstance(skeleton, Slot):
        return tensors[skeleton.place] if skeleton.tensor else others[skeleton.place]
    parts = {key: rebuild(child, tensors, others) for key, child in skeleton.parts.items()}
    return like(skeleton.like, parts)


def bare(skeleton: Any) -> Any:
    """The skeleton without the leaves that its containers still hold (a registered object or a dataclass keeps its
    fields): what may be kept for long, or sent to another process."""
    if isinstance(skeleton, Slot):
        return skeleton
    node = skeleton.like
    kept = _Kind(type(node), node.default_factory if isinstance(node, defaultdict) else None)
    return Inner(kept, {key: bare(child) for key, child in skeleton.parts.items()})


def structure(skeleton: Any) -> Hashable:
    """Equal for skeletons of the same containers, keys and kinds of leaves; of a bare skeleton."""
    if isinstance(skeleton, Slot):
        return skeleton
    return (skeleton.like, *((key, structure(child)) for key, child in skeleton.parts.items()))


class _Kind(NamedTuple):
    """A container's class without a container."""

    kind: type
    default_factory: Any


def is_dense(node: Any) -> bool:
    """Whether a leaf is a tensor that can be stacked with others of its shape."""
    return isinstance(node, Tensor) and node.layout is torch.strided and not node.is_nested


def is_plain_list(node: Any) -> bool:
    """Whether a list or tuple holds strings and numbers only: one value with an entry for each row."""
    return type(node) in (list, tuple) and bool(node) and all(isinstance(v, PLAIN) for v in node)


def children(node: Any) -> Children | None:
    """A container's entries by key; ``None`` for a leaf."""
    kind = type(node)
    if kind in _REGISTERED:
        return dict(_REGISTERED[kind].split(node))
    if isinstance(node, PackedSequence | str | bytes):
        return None
    if isinstance(node, Mapping | UserDict):
        return dict(node.items())
    if isinstance(node, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        return dict(enumerate(node))
    if kind is list:
        return dict(enumerate(node))
    names = fields_of(kind)
    if names is None:
        return None
    return {name: getattr(node, name) for name in names if hasattr(node, name)}


def fields_of(kind: type) -> list[str] | None:
    """Names of a dataclass's or attrs class's fields; ``None`` for other classes."""
    if dataclasses.is_dataclass(kind):
        return [f.name for f in dataclasses.fields(kind)]
    attrs = getattr(kind, "__attrs_attrs__", None)
    return None if attrs is None else [a.name for a in attrs]


def like(node: Any, parts: Mapping[Any, Any]) -> Any:
    """A container of ``node``'s kind with the entries ``parts``."""
    kind: type = node.kind if isinstance(node, _Kind) else type(node)
    if kind in _REGISTERED:
        return _REGISTERED[kind].join(dict(parts))
    if issubclass(kind, defaultdict):
        return kind(node.default_factory, parts)
    if issubclass(kind, Mapping | UserDict):
        return dict(parts) if kind is dict else kind(dict(parts))  # type: ignore[call-arg]
    if issubclass(kind, tuple):
        return tuple(parts.values()) if kind is tuple else kind(*parts.values())
    if kind is list:
        return list(parts.values())
    # a dataclass or attrs class: its fields are set as they are, past __init__ and __post_init__, which have run
    made = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def leaves(batch: Any) -> Iterator[Any]:
    """All leaves of a batch, tensors and others."""
    found = flatten(batch)
    yield from found.tensors
    yield from found.others


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """``batch`` with ``function`` applied to its dense tensors."""
    flat = flatten(batch)
    return rebuild(flat.skeleton, [function(t) for t in flat.tensors], flat.others)
