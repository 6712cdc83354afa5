"""Examples by the number: n of one structure and shape stacked, and a loader batch as a few such stacks.

Which dimension of a tensor is the batch is never asked. Whatever ``collate_fn`` makes of one record alone is that
example's batch, and examples whose batches have the same containers and shapes are stacked along a *new* leading
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_lap2.batches.containers import PLAIN, Flat, bare, flatten, is_plain_list, rebuild, structure
from lightning_lap2.errors import UnsupportedModelError


class Examples:
    """n examples of one structure and shape.

    Attributes:
        tensors: for each tensor of an example's batch the stack ``[n, *shape]``. ``shape`` includes the example's own
            batch dimension: an image is ``[n, 1, 3, 32, 32]``, K views of it ``[n, K, 3, 32, 32]``.
        others: for each other leaf its n values.
        count: n, at least 1.
    """

    __slots__ = ("_paths", "_skeleton", "count", "others", "tensors")

    def __init__(
        self, skeleton: Any, tensors: Sequence[Tensor], others: Sequence[list[Any]], paths: Sequence[str], count: int
    ) -> None:
        self._skeleton, self._paths = skeleton, tuple(paths)
        self.tensors, self.others, self.count = tuple(tensors), tuple(others), count

    @property
    def key(self) -> Hashable:
        """Equal for examples of the same structure and shape."""
        return structure(self._skeleton), tuple((t.shape[1:], t.dtype) for t in self.tensors)

    @property
    def roots(self) -> list[Tensor]:
        """All tensors that hold the examples' values, those inside objects of unknown classes included."""
        return [*self.tensors, *(t for values in self.others for t in _tensors_in(values, _DEPTH))]

    @property
    def rows_each(self) -> int:
        """How many rows each example's batch has, as far as tensors tell: their smallest leading dimension."""
        return min((int(t.shape[1]) for t in self.tensors if t.dim() > 1), default=1)

    def rebuild(self, tensors: Sequence[Any], others: Sequence[Any]) -> Any:
        """One example's batch of the given leaves; inside ``vmap`` as well."""
        return rebuild(self._skeleton, tensors, others)

    def example(self, index: int) -> Any:
        """The batch of example ``index``; its tensors are views of the stacks."""
        return self.rebuild([t[index] for t in self.tensors], [values[index] for values in self.others])

    def rows(self, start: int, stop: int) -> Examples:
        """The examples ``start`` to ``stop - 1``."""
        stop = min(stop, self.count)
        return Examples(
            self._skeleton,
            [t[start:stop] for t in self.tensors],
            [values[start:stop] for values in self.others],
            self._paths,
            stop - start,
        )

    def with_tensors(self, tensors: Sequence[Any]) -> Examples:
        """The same examples with other stacks."""
        return Examples(self._skeleton, tensors, self.others, self._paths, self.count)

    def apart(self, start: int, stop: int) -> Examples:
        """:meth:`rows` in memory of their own, so that what is known of it is known of these examples alone."""
        return self.rows(start, stop).map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    def holds_the_same(self, other: Examples) -> bool:
        """Whether the tensors of both have the same values, to the bit."""
        return all(
            torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
            for a, b in zip(self.tensors, other.tensors, strict=True)
        )

    def shared(self) -> list[Any]:
        """The other leaves for code that runs all examples at once: a value that is the same for all of them as it is,
        else an :class:`Untouchable`."""
        return [
            values[0] if _same_for_all(values) else Untouchable(path)
            for path, values in zip(self._paths, self.others, strict=True)
        ]

    def map(self, function: Callable[[Any], Any]) -> Examples:
        """With ``function`` applied to every tensor and to every other leaf that can be moved or pinned."""
        others = [[function(v) for v in values] for values in self.others]
        return Examples(self._skeleton, [function(t) for t in self.tensors], others, self._paths, self.count)

    def joined(self) -> Any:
        """One batch of all examples, as a batch-wise ``collate_fn`` would have made it: tensors ``[n, K, ...]`` as
        ``[n K, ...]`` (views of the stacks), lists one after the other, other values as a list."""
        tensors = [t.flatten(0, 1) if t.dim() > 1 else t for t in self.tensors]
        others = [
            [v for value in values for v in value] if isinstance(values[0], list | tuple) else _common(values)
            for values in self.others
        ]
        return self.rebuild(tensors, others)


_DEPTH = 6  # of attributes and containers in objects of unknown classes: graph data keeps its tensors four deep


def _tensors_in(node: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif depth and not isinstance(node, PLAIN):
        inside = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple | set) else ()
        for child in (*inside, *getattr(node, "__dict__", {}).values()):
            yield from _tensors_in(child, depth - 1)


def _same_for_all(values: list[Any]) -> bool:
    first = values[0]
    if len(values) == 1 or all(v is first for v in values):
        return True
    plain = isinstance(first, PLAIN) or is_plain_list(first)
    return plain and all(type(v) is type(first) and v == first for v in values)


def _common(values: list[Any]) -> Any:
    return values[0] if _same_for_all(values) else values


class _Growing:
    """Examples of one structure and shape, copied as they come: what made them may use its memory again."""

    def __init__(self, first: Flat) -> None:
        self._first = first
        self._stacks = [t.new_empty((1, *t.shape)) for t in first.tensors]
        self._others: list[list[Any]] = [[] for _ in first.others]
        self.places: list[int] = []

    def add(self, place: int, flat: Flat) -> None:
        row = len(self.places)
        for k, tensor in enumerate(flat.tensors):
            if row == len(self._stacks[k]):
                self._stacks[k] = torch.cat([self._stacks[k], torch.empty_like(self._stacks[k])])
            self._stacks[k][row] = tensor
        for values, value in zip(self._others, flat.others, strict=True):
            values.append(value)
        self.places.append(place)

    def examples(self) -> Examples:
        count, first = len(self.places), self._first
        return Examples(bare(first.skeleton), [s[:count] for s in self._stacks], self._others, first.paths, count)


class ExampleBatch:
    """One loader batch: its examples, those of one structure and shape together.

    Not a container by any of the usual protocols, so that what maps over batches leaves it alone. It can be moved and
    pinned as a batch can.

    Attributes:
        groups: the examples.
        order: for each group the places of its examples in the draw.
        lost: places of examples that could not be read, and count as if their gradient were zero.
    """

    __slots__ = ("groups", "lost", "order")

    def __init__(self, groups: Sequence[Examples], order: Sequence[Sequence[int]], lost: Sequence[int] = ()) -> None:
        self.groups, self.order = tuple(groups), tuple(tuple(places) for places in order)
        self.lost = tuple(lost)

    @classmethod
    def of(cls, batches: Iterable[Any]) -> ExampleBatch:
        """From the batches of single examples, grouped by structure and shape in the order of first appearance."""
        groups: dict[Any, _Growing] = {}
        for place, batch in enumerate(batches):
            flat = flatten(batch)
            key = (flat.signature, tuple((t.shape, t.dtype, t.device) for t in flat.tensors))
            if key not in groups:
                groups[key] = _Growing(flat)
            groups[key].add(place, flat)
        return cls([group.examples() for group in groups.values()], [group.places for group in groups.values()])

    def __reduce__(self) -> Any:
        """From worker to trainer in few pieces: each tensor that is sent takes a file of shared memory."""
        if len(self.groups) < 2:
            return ExampleBatch, (self.groups, self.order, self.lost)
        tensors = [t for group in self.groups for t in group.tensors]
        packed = {dtype: torch.cat([t.reshape(-1) for t in tensors if t.dtype is dtype]) for dtype in _dtypes(tensors)}
        bare_groups = [group.with_tensors([t.shape for t in group.tensors]) for group in self.groups]
        return _unpacked, (
            packed,
            [[t.dtype for t in g.tensors] for g in self.groups],
            bare_groups,
            self.order,
            self.lost,
        )

    def placed(self, places: Sequence[int], lost: Sequence[int]) -> ExampleBatch:
        """The same examples at other places of a draw, of which ``lost`` are without an example."""
        return ExampleBatch(self.groups, [[places[k] for k in group] for group in self.order], lost)

    @property
    def count(self) -> int:
        """Examples in all groups, and those that were lost."""
        return sum(group.count for group in self.groups) + len(self.lost)

    def __iter__(self) -> Iterator[Examples]:
        return iter(self.groups)

    def example(self, place: int) -> Any:
        """The batch of the example drawn as number ``place``."""
        for group, places in zip(self.groups, self.order, strict=True):
            if place in places:
                return group.example(places.index(place))
        raise IndexError(place)

    def map(self, function: Callable[[Any], Any]) -> ExampleBatch:
        return ExampleBatch([group.map(function) for group in self.groups], self.order, self.lost)

    def to(self, *args: Any, **options: Any) -> ExampleBatch:
        """Every leaf that has ``to`` moved by it."""
        return self.map(lambda leaf: leaf.to(*args, **options) if hasattr(leaf, "to") else leaf)

    def pin_memory(self, *args: Any) -> ExampleBatch:
        return self.map(lambda leaf: leaf.pin_memory(*args) if hasattr(leaf, "pin_memory") else leaf)

    def joined(self) -> Any:
        """One batch of all examples, in their order, for code that only looks on. Tensors of unlike shapes are filled
        up with zeros at their ends; examples of unlike containers come as a list of one batch for each kind. Where
        none could be read an empty list: Lightning takes None for a batch that is to be skipped."""
        if not self.groups:
            return []
        if len(self.groups) == 1:
            return self.groups[0].joined()
        places = sorted(place for group in self.order for place in group)
        flats = [flatten(self.example(place)) for place in places]
        if any(flat.signature != flats[0].signature for flat in flats):
            return [group.joined() for group in self.groups]
        columns = zip(*(flat.tensors for flat in flats), strict=True)
        if any(
            len({(t.dim(), t.dtype) for t in column}) > 1 for column in zip(*(f.tensors for f in flats), strict=True)
        ):
            return [group.joined() for group in self.groups]
        tensors = [_padded(column) for column in columns]
        others = [list(values) for values in zip(*(flat.others for flat in flats), strict=True)]
        return Examples(bare(flats[0].skeleton), tensors, others, flats[0].paths, len(flats)).joined()


def _dtypes(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(t.dtype for t in tensors))


def _unpacked(
    packed: dict[torch.dtype, Tensor], dtypes: list[list[torch.dtype]], groups: list[Examples], order: Any, lost: Any
) -> ExampleBatch:
    """The inverse of packing; each group in memory of its own again."""
    taken = dict.fromkeys(packed, 0)

    def take(dtype: torch.dtype, shape: Any) -> Tensor:
        start, taken[dtype] = taken[dtype], taken[dtype] + shape.numel()
        return packed[dtype][start : taken[dtype]].clone().view(shape)

    whole = [
        group.with_tensors([take(dtype, shape) for dtype, shape in zip(kinds, group.tensors, strict=True)])
        for group, kinds in zip(groups, dtypes, strict=True)
    ]
    return ExampleBatch(whole, order, lost)


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one rank stacked in the smallest shape that holds each."""
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    stack = tensors[0].new_zeros((len(tensors), *shape))
    for row, tensor in zip(stack, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return stack


class Untouchable:
    """Stands for a value that differs between examples inside ``vmap``, where all examples run at once.

    The step cannot be given "its" value there. Any use raises; handing it on untouched is fine.
    """

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(
            f"training_step uses {object.__getattribute__(self, '_path')}, which is no tensor and differs between "
            "examples. Where all examples run at once none can be given its own: turn it into tensors in the data set "
            "or collate_fn (a class of your own: register_batch_type), or use engine='loop'"
        )

    def __getattr__(self, _name: str) -> NoReturn:
        self._refuse()

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __str__ = __repr__ = __format__ = __reversed__ = _refuse
    __hash__ = None  # type: ignore[assignment]
