"""``engine="auto"``: the first engine that a trial on real records accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_lap2.callback.selfcheck import Checked
from lightning_lap2.gradients import Engine, UnsupportedModelError


@dataclass(frozen=True)
class Choice:
    """An engine, what its check learnt, and why those before it were passed over."""

    engine: Engine
    checked: Checked
    passed_over: tuple[str, ...] = ()


def choose_engine(
    names: Sequence[str],
    make: Callable[[str], Engine],
    check: Callable[[Engine], Checked],
    agree: Callable[[bool], bool],
) -> Choice:
    """Tries ``names`` in order. All but the last are taken only where the check compared them with plain autograd;
    what is wrong with the model itself is then said about the last, as if it had been asked for.

    Whatever is chosen, each example's gradient is clipped to C and the guarantee is the same: engines differ in speed,
    memory and in what they accept.

    Args:
        make: the engine of a name.
        check: the self-check at fit start.
        agree: whether every rank says yes; called on every rank alike, so that all take the same engine.

    Raises:
        UnsupportedModelError: the last engine refuses too.
    """
    passed_over: list[str] = []
    for name in names[:-1]:
        engine, checked, reason = make(name), Checked(), "it could not be compared with plain autograd"
        try:
            checked = check(engine)
        except UnsupportedModelError as error:
            reason = str(error)
        if agree(checked.compared):
            return Choice(engine, checked, tuple(passed_over))
        # where another rank refused, this one has no reason of its own
        passed_over.append(f"{name!r} was passed over: {'another rank refused' if checked.compared else reason}")
    engine = make(names[-1])
    return Choice(engine, check(engine), tuple(passed_over))
