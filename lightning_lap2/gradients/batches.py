"""Batches taken apart into tensors with one row per example, and put together again for the user's code.

What a batch may hold, at any depth of tuples, lists, named tuples and mappings (``dict``, ``UserDict`` and so the
Hugging Face ``BatchEncoding``):

==========================================  ==============================================================
leaf                                        meaning
==========================================  ==============================================================
tensor ``[B, ...]``                         one row per example
0-dim tensor, number, string, ``None``      the same for all examples, handed on as it is
list or tuple of B strings or numbers, or   one entry per example
of B containers of them without a tensor
==========================================  ==============================================================

Everything else is refused by name. A container that is not understood would be handed to every example whole, and
each example's gradient would then depend on its batch mates: the clipped sum's sensitivity would be unbounded.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_lap2.gradients.engine import UnsupportedModelError

_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_CONTAINERS = "tuples, lists, named tuples, dicts and tensors with one row per example"


@dataclass(frozen=True)
class BatchParts:
    """A batch taken apart.

    Attributes:
        tensors: the leaves ``[B, ...]`` in a fixed order.
        count: B.
        batch: the batch itself, the skeleton that :meth:`rebuild` follows.
    """

    tensors: tuple[Tensor, ...]
    count: int
    batch: Any

    def rebuild(self, tensors: Sequence[Tensor], per_example: Callable[[str, Sequence[Any]], Any]) -> Any:
        """The batch with ``tensors`` in place of its own, in order.

        ``per_example(path, values)`` gives what stands for each list of B strings or numbers.
        """
        return _rebuild(self.batch, "batch", iter(tensors), per_example)

    def example(self, index: int, views: int = 1) -> Any:
        """A batch of one: the ``views`` rows of example ``index``."""
        return self.rows(index * views, (index + 1) * views)

    def examples(self, views: int) -> int:
        """How many examples of ``views`` rows each the batch holds, at least 1.

        Raises:
            ValueError: the rows are not whole examples. (A hook of the user's made rows, or dropped some.)
        """
        if self.count == 0 or self.count % views:
            raise ValueError(
                f"a batch of {self.count} rows is not made of examples of {views} rows each; an empty draw is a "
                "template of one example with StepCall.count 0"
            )
        return self.count // views

    def rows(self, start: int, stop: int) -> Any:
        """A batch of the rows ``start`` to ``stop - 1``, views of this one's memory."""
        return self.rebuild([t[start:stop] for t in self.tensors], lambda _, values: values[start:stop])


def take_apart(batch: Any) -> BatchParts:
    """Finds the rows of a batch.

    Raises:
        UnsupportedModelError: naming the path of a leaf whose leading dimension is not B, of an unknown container,
            or saying that the batch holds nothing with rows.
    """
    tensors: list[tuple[str, Tensor]] = []
    lists: list[tuple[str, Sequence[Any]]] = []
    _collect(batch, "batch", tensors, lists)
    sizes = [(path, int(t.shape[0]), "tensor") for path, t in tensors]
    sizes += [(path, len(values), "list of plain values") for path, values in lists]
    if not sizes:
        raise UnsupportedModelError(
            f"the batch (a {type(batch).__name__}) holds no tensor with one row per example; supported are "
            f"{_CONTAINERS}"
        )
    first_path, count, _ = sizes[0]
    for path, size, kind in sizes[1:]:
        if size != count:
            raise UnsupportedModelError(
                f"{path} is a {kind} of leading size {size}, but {first_path} has {count} rows. Each must have one "
                "entry per example, so that examples can be taken one at a time: transpose or pad it in the data "
                "set or collate_fn, or keep what is the same for all examples on the module or as a 0-dim tensor"
            )
    return BatchParts(tuple(t for _, t in tensors), count, batch)


def rows(batch: Any) -> int:
    """B, the number of examples in a batch.

    Raises:
        UnsupportedModelError: see :func:`take_apart`.
    """
    return take_apart(batch).count


def example(batch: Any, index: int) -> Any:
    """A batch of one that holds row ``index`` of ``batch``, in the same containers."""
    return take_apart(batch).example(index)


class Untouchable:
    """Stands for a list of B strings or numbers inside ``vmap``, where all examples run at once.

    The step cannot be given "its" string there. Any use raises, since code that, say, tokenised all B strings would
    make each example's gradient depend on the others. Handing it on untouched is fine.
    """

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(
            f"training_step uses {object.__getattribute__(self, '_path')}, a list with one string or number per "
            "example. Under engine='vmap' all examples run at once and none can be given its own entry: turn it "
            "into tensors in the data set or collate_fn, or use engine='loop'"
        )

    def __getattr__(self, _name: str) -> NoReturn:
        self._refuse()

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __str__ = __repr__ = __format__ = __reversed__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def untouchable(path: str, _values: Sequence[Any]) -> Untouchable:
    """For :meth:`BatchParts.rebuild`: a guard in place of the values."""
    return Untouchable(path)


def _is_per_example_list(node: Any) -> bool:
    """A list or tuple of strings and numbers, or of dicts and lists of them, and no tensor anywhere inside.

    A named tuple has fields, so its entries are no examples.
    """
    if type(node) not in (list, tuple) or all(v is None for v in node):
        return False
    return all(_is_plain(v) for v in node)


def _is_plain(node: Any) -> bool:
    if isinstance(node, _PLAIN):
        return True
    return _is_known_container(node) and all(_is_plain(v) for _, v in _children(node, ""))


def _children(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, Mapping | UserDict) else enumerate(node)
    for key, value in items:
        yield f"{path}[{key!r}]", value


def _collect(node: Any, path: str, tensors: list[tuple[str, Tensor]], lists: list[tuple[str, Sequence[Any]]]) -> None:
    """Appends the leaves with rows under ``node``, each with its path; refuses what is not understood."""
    if isinstance(node, Tensor):
        if node.layout is not torch.strided or node.is_nested:
            raise UnsupportedModelError(f"{path} is a sparse or nested tensor; give a dense (padded) one")
        if node.dim() > 0:
            tensors.append((path, node))
    elif isinstance(node, _PLAIN):
        return
    elif isinstance(node, PackedSequence):
        raise UnsupportedModelError(
            f"{path} is a PackedSequence, whose examples lie interleaved; hand on the padded tensor [B, T, ...] and "
            "the lengths [B], and pack inside training_step (with engine='loop')"
        )
    elif _is_known_container(node):
        if _is_per_example_list(node):
            lists.append((path, node))
            return
        for child_path, child in _children(node, path):
            _collect(child, child_path, tensors, lists)
    else:
        kind = type(node)
        raise UnsupportedModelError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, whose rows are not known; supported are "
            f"{_CONTAINERS} (numpy arrays: convert in collate_fn; dataclasses: use a dict or a NamedTuple)"
        )


def _is_known_container(node: Any) -> bool:
    if isinstance(node, tuple):
        return type(node) is tuple or hasattr(type(node), "_fields")
    return type(node) is list or isinstance(node, dict | UserDict)


def _rebuild(node: Any, path: str, tensors: Iterator[Tensor], per_example: Callable[[str, Sequence[Any]], Any]) -> Any:
    """``node`` again, its leaves with rows replaced in the order in which :func:`_collect` found them."""
    if isinstance(node, Tensor):
        return next(tensors) if node.dim() > 0 else node
    if isinstance(node, _PLAIN):
        return node
    if _is_per_example_list(node):
        return per_example(path, node)
    children = [_rebuild(child, at, tensors, per_example) for at, child in _children(node, path)]
    if isinstance(node, Mapping | UserDict):
        return _like_mapping(node, dict(zip(node.keys(), children, strict=True)), path)
    if isinstance(node, list):
        return children
    return tuple(children) if type(node) is tuple else type(node)(*children)


def _like_mapping(node: Any, items: dict[Any, Any], path: str) -> Any:
    if type(node) is dict:
        return items
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, items)
    try:
        return type(node)(items)
    except TypeError as error:
        kind = type(node)
        raise UnsupportedModelError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be built from a dict; use a dict"
        ) from error
