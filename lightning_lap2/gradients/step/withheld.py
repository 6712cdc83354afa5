"""A value that may be handed on but not used: an optimizer closure's loss, state that holds records."""

from __future__ import annotations

from typing import Any, NoReturn


class Withheld:
    """Stands where plain training has a value that was computed from the records without noise.

    It can be stored, returned, compared by identity and overwritten. Whatever would look at the value raises.

    Args:
        reason: the whole message.
        error: what is raised.
    """

    __slots__ = ("_error", "_reason")

    def __init__(self, reason: str, error: type[Exception]) -> None:
        self._reason, self._error = reason, error

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._error(self._reason)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        found = _first([*args, *(kwargs or {}).values()])
        if found is not None:
            found._refuse()
        raise TypeError("a value was used that holds records")

    def __getattr__(self, name: str) -> Any:
        # what copies and pickles an object asks for dunders; that alone shows nothing
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return "<withheld>"

    def __deepcopy__(self, memo: Any) -> Withheld:
        return self

    def __copy__(self) -> Withheld:
        return self

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _refuse
    __truediv__ = __rtruediv__ = __itruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __index__ = __complex__ = __bool__ = __len__ = __next__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __call__ = __format__ = __str__ = __array__ = _refuse
    __enter__ = _refuse
    # No __iter__: iterating calls __getitem__, and what asks whether it can iterate (a metric's hash) hears no.

    def __eq__(self, other: object) -> Any:
        self._refuse()

    def __hash__(self) -> int:
        return id(self)


def _first(values: Any) -> Withheld | None:
    for value in values:
        if isinstance(value, Withheld):
            return value
        if isinstance(value, list | tuple) and (found := _first(value)) is not None:
            return found
    return None
