"""A batch whose rows are known to be examples, split into them.

For batches that torch's own ``default_collate`` made (whose code is known), and for callers who say so themselves:
tests, benchmarks and measurements on public data. What such a batch may hold, in the containers of
:mod:`~lightning_lap2.batches.containers`:

==========================================  ==============================================================
leaf                                        meaning
==========================================  ==============================================================
tensor ``[B, ...]``                         one row per example
0-dim tensor, number, string, ``None``      the same for all examples
list or tuple of B strings or numbers, or   one entry per example
of B containers of them without a tensor
==========================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_lap2.batches.containers import PLAIN, Inner, Slot, bare, children, is_dense
from lightning_lap2.batches.examples import Examples
from lightning_lap2.errors import UnsupportedModelError


def split_rows(batch: Any, views: int = 1) -> Examples:
    """The examples of a batch, each ``views`` consecutive rows of it; tensors are views of the batch's memory.

    Raises:
        UnsupportedModelError: naming the path of a leaf whose leading dimension is not B or of an unknown class, or
            saying that the batch holds nothing with rows.
        ValueError: B is 0, or no multiple of ``views``.
    """
    return _Split(batch, views).examples()


def count_rows(batch: Any) -> int:
    """B.

    Raises:
        UnsupportedModelError: see :func:`split_rows`.
    """
    return _Split(batch, 1).count


class _Split:
    def __init__(self, batch: Any, views: int) -> None:
        self._tensors: list[Tensor] = []
        self._others: list[list[Any]] = []
        self._paths: list[str] = []
        self._sizes: list[tuple[str, int, str]] = []
        self._views, self._constants = views, set[int]()
        self._skeleton = self._visit(batch, "batch")
        if not self._sizes:
            raise UnsupportedModelError(
                f"the batch (a {type(batch).__name__}) holds no tensor with one row per example; supported are "
                "tensors with one row per example, in tuples, lists, dicts and dataclasses"
            )
        first_path, self.count, _ = self._sizes[0]
        for path, size, kind in self._sizes[1:]:
            if size != self.count:
                raise UnsupportedModelError(
                    f"{path} is a {kind} of leading size {size}, but {first_path} has {self.count} rows. Each must "
                    "have one entry per example, so that examples can be taken one at a time: transpose or pad it in "
                    "the data set or collate_fn, or keep what is the same for all examples on the module or as a 0-dim "
                    "tensor"
                )

    def examples(self) -> Examples:
        views = self._views
        if self.count == 0 or self.count % views:
            raise ValueError(
                f"a batch of {self.count} rows is not made of examples of {views} rows each; an empty draw is a "
                "template of one example with StepCall.count 0"
            )
        n = self.count // views
        tensors = [t.unflatten(0, (n, views)) if t.dim() else t.expand(n) for t in self._tensors]
        others = [
            values * n if k in self._constants else [values[i * views : (i + 1) * views] for i in range(n)]
            for k, values in enumerate(self._others)
        ]
        return Examples(bare(self._skeleton), tensors, others, self._paths, n)

    def _visit(self, node: Any, path: str) -> Any:
        """What stands for ``node`` in the skeleton; refuses what is not understood."""
        if is_dense(node):
            self._tensors.append(node)
            if node.dim():
                self._sizes.append((path, int(node.shape[0]), "tensor"))
            return Slot(len(self._tensors) - 1, True)
        if isinstance(node, PLAIN):
            return self._other([node], path, constant=True)
        if _is_per_example_list(node):
            self._sizes.append((path, len(node), "list of plain values"))
            return self._other(node, path)
        parts = children(node)
        if parts is None:
            raise UnsupportedModelError(_unknown(node, path))
        made: dict[Hashable, Any] = {key: self._visit(child, f"{path}[{key!r}]") for key, child in parts.items()}
        return Inner(node, made)

    def _other(self, values: Any, path: str, *, constant: bool = False) -> Slot:
        if constant:
            self._constants.add(len(self._others))
        self._others.append(values)
        self._paths.append(path)
        return Slot(len(self._others) - 1, False)


def _unknown(node: Any, path: str) -> str:
    if isinstance(node, Tensor):
        return f"{path} is a sparse or nested tensor; give a dense (padded) one"
    if isinstance(node, PackedSequence):
        return (
            f"{path} is a PackedSequence, whose examples lie interleaved; hand on the padded tensor [B, T, ...] and "
            "the lengths [B], and pack inside training_step"
        )
    kind = type(node)
    return (
        f"{path} is a {kind.__module__}.{kind.__qualname__}, whose rows are not known: use tensors in tuples, lists, "
        "dicts or dataclasses, or register_batch_type"
    )


def _is_per_example_list(node: Any) -> bool:
    """A list or tuple of strings and numbers, or of dicts and lists of them, and no tensor anywhere inside.

    A named tuple has fields, so its entries are no examples.
    """
    if type(node) not in (list, tuple) or all(v is None for v in node):
        return False
    return all(_is_plain(v) for v in node)


def _is_plain(node: Any) -> bool:
    if isinstance(node, PLAIN):
        return True
    parts = children(node)
    return parts is not None and all(_is_plain(v) for v in parts.values())
