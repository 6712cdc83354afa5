"""What a step reads out of its tensors (``.item()``, ``bool(...)``, ``float(...)``) while all examples run at once.

Under ``vmap`` a tensor stands for the values of all examples, and Python code for none of them in particular:

* ``.item()`` gives a :class:`Number`, which can be logged, returned and computed with. (Never a plain number: kept in
  some global it would be a way from one record to another that nothing could see.)
* a condition, ``float()`` or ``int()`` on which all examples agree gives the plain value: alone, each of them would
  have read the same. So assertions (``assert not torch.isnan(loss)``) and masks that are all ones cost nothing;
* where they do not agree it raises, and the next engine (``"loop"``) runs one example at a time.

An example's gradient is thus the one it has alone, whichever happens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_lap2.gradients.physical import carries_batch, current_level, innermost, is_wrapped
from lightning_lap2.gradients.step.replacing import Replacements

_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "__float__": float, "__int__": int, "__index__": operator.index, "__complex__": complex,
}  # fmt: skip


class Reading:
    """Reads of values in one pass over the user's code.

    Attributes:
        agreed: whether a value was read on which all examples agreed: from then on Python values can depend on the
            data.
    """

    def __init__(self) -> None:
        self.agreed = False
        self._level: int | None = None

    def begin(self) -> None:
        """The user's code is entered: transforms outside of it are the engine's, those inside the user's own."""
        self._level = current_level()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, tensors that carry examples give their values as described above."""
        _active.append(self)
        try:
            with _methods.active():
                yield
        finally:
            _active.remove(self)

    def ours(self, tensor: Tensor) -> bool:
        """Whether the engine's transforms alone stand between ``tensor`` and its values."""
        return is_wrapped(tensor) and current_level() == self._level

    def value(self, tensor: Tensor) -> Any:
        """The Python number on which all examples agree.

        Raises:
            RuntimeError: they do not, or it is not one number.
        """
        physical = innermost(tensor)
        if tensor.numel() != 1:
            raise RuntimeError(f"a tensor of {tensor.numel()} elements cannot be converted to a number")
        values = physical.detach().reshape(-1)
        if len(values) > 1:
            first = values[:1]
            # a NaN agrees with a NaN
            if not bool(((values == first) | ((values != values) & (first != first))).all()):
                raise RuntimeError("data-dependent: .item() of a value on which the examples do not agree")
            self.agreed = True
        return values[0].item()


_active: list[Reading] = []


def _python(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    convert = _CONVERSIONS[original.__name__]

    def method(tensor: Tensor) -> Any:
        reading = _active[-1]
        return convert(reading.value(tensor)) if reading.ours(tensor) else original(tensor)

    return method


def _item(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def item(tensor: Tensor) -> Any:
        reading = _active[-1]
        if not reading.ours(tensor) or tensor.numel() != 1:
            return original(tensor)
        if not carries_batch(tensor):
            return original(innermost(tensor))
        return Number(tensor.detach().reshape(()), reading)

    return item


def _tolist(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tolist(tensor: Tensor) -> Any:
        if not _active[-1].ours(tensor):
            return original(tensor)
        return tensor.item() if tensor.dim() == 0 else [row.tolist() for row in tensor]

    return tolist


_methods = Replacements(
    [*((Tensor, name, _python) for name in _CONVERSIONS), (Tensor, "item", _item), (Tensor, "tolist", _tolist)]
)


class Number:
    """A Python number that differs between examples: ``tensor`` is its value for each of them."""

    __slots__ = ("_reading", "tensor")

    def __init__(self, tensor: Tensor, reading: Reading) -> None:
        self.tensor, self._reading = tensor, reading

    def value(self) -> Any:
        """See :meth:`Reading.value`."""
        return self._reading.value(self.tensor)

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __str__(self) -> str:
        return str(self.value())

    def __format__(self, specification: str) -> str:
        return format(self.value(), specification)

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.value())

    def __round__(self, digits: int | None = None) -> Number:
        return Number(torch.round(self.tensor, decimals=digits or 0), self._reading)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A number among the arguments of a torch function counts as the 0-dim tensor that it is."""
        return func(*_tensors(args), **_tensors(kwargs or {}))


def _tensors(tree: Any) -> Any:
    if isinstance(tree, Number):
        return tree.tensor
    if isinstance(tree, dict):
        return {key: _tensors(value) for key, value in tree.items()}
    return type(tree)(map(_tensors, tree)) if type(tree) in (list, tuple) else tree


def _computing(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """An operator of :class:`Number`: with numbers it gives a number, with tensors a tensor."""

    def method(self: Number, *others: Any) -> Any:
        if not all(isinstance(o, Number | Tensor | int | float | complex) for o in others):
            return NotImplemented
        operands = [self.tensor, *_tensors(others)]
        result = function(*(reversed(operands) if swapped else operands))
        return result if any(isinstance(o, Tensor) for o in others) else Number(result, self._reading)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _computing(getattr(operator, _name)))
for _name in _BINARY:
    setattr(Number, f"__r{_name}__", _computing(getattr(operator, _name), swapped=True))
