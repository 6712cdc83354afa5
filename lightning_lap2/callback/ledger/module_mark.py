"""What a module's weights have spent, kept with the module.

A ledger belongs to weights, not to a callback: whoever trains the same module with a new callback, another Trainer or
a callback from ``configure_callbacks`` spends further on the same weights. So a fit leaves a mark on the module and
on each of its submodules that is trained (parts are taken over into other modules), a plain attribute: it is in no
``state_dict``, and copies of the module have it. In memory the mark holds the ledger itself, so that it is up to date
however a fit ends; in a pickle it is a dict of plain values, which opens where this package is not installed.

The mark also knows the weights as the fit left them, by a fingerprint of each parameter. Weights that differ when the
next fit begins were changed by something that no ledger saw: training without the callback, or ``load_state_dict``.
That cannot be charged, but it can be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lap2.callback.ledger.ledger import Account, Ledger
from lightning_lap2.gradients.physical import held_here

NAME = "_lap2_privacy_mark"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # so that squares fit 64 bits
_PIECE = 2**24  # scalars looked at at once, so that no large copy is made

UNKNOWN_GRADIENTS = (
    "the module's parameters held gradients when its first private fit began: something differentiated it without this "
    "callback. If that was training on the same records, epsilon does not cover it"
)

Fingerprint = tuple[int, int, int]


class Mark:
    """On one module and its parts.

    Args:
        ledger: what the weights have spent.
        weights: fingerprints of the parameters when the last fit ended; ``None`` while one goes on.
    """

    __slots__ = ("ledger", "weights")

    def __init__(self, ledger: Ledger, weights: frozenset[Fingerprint] | None = None) -> None:
        self.ledger, self.weights = ledger, weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        """Of a copied module: the same ledger, its own weights from here on."""
        return Mark(self.ledger, self.weights)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        weights = None if self.weights is None else sorted(self.weights)
        return dict, ({"ledger": self.ledger.state_dict(), "weights": weights},)


def put(module: nn.Module, ledger: Ledger) -> None:
    """Marks the module and those of its parts that are trained: a fit is about to make releases. To be called again
    where parameters may have been unfrozen meanwhile. A frozen part, or a loss without parameters, learns nothing."""
    mark = vars(module).get(NAME)
    if not _is_open(mark, ledger):
        mark = Mark(ledger)
    vars(module)[NAME] = mark
    for part in module.modules():
        if any(p.requires_grad for p in part.parameters()):
            vars(part)[NAME] = mark


def seal(module: nn.Module, ledger: Ledger) -> None:
    """The fit has ended: remembers the weights that it left. Does nothing where none had begun."""
    if _is_open(vars(module).get(NAME), ledger):
        put(module, ledger)
        sealed = Mark(ledger, frozenset(fingerprint(p) for p in module.parameters()))
        for part in module.modules():
            if _is_open(vars(part).get(NAME), ledger):
                vars(part)[NAME] = sealed


def _is_open(mark: object, ledger: Ledger) -> bool:
    return isinstance(mark, Mark) and mark.ledger is ledger and mark.weights is None


def note_unknown_training(module: nn.Module, ledger: Ledger) -> None:
    """A caveat where a module, or a part of it, was never trained privately and yet holds gradients: of a plain fit,
    say. To be called before Lightning clears them."""
    unmarked = (part for part in module.modules() if NAME not in vars(part))
    if not ledger.releases and any(p.grad is not None for part in unmarked for p in part.parameters(recurse=False)):
        ledger.add_caveat(UNKNOWN_GRADIENTS)


def adopt(module: nn.Module, account: Account, restore: Callable[[Mapping[str, Any]], Ledger]) -> int:
    """Makes the ledger of ``account`` go on from all that the module's weights have spent.

    A callback that has released nothing yet takes over the module's ledger as it is; any other adds to its own what is
    new to it.

    Args:
        restore: a ledger from a mark that came out of a pickle.

    Returns:
        Releases that are new to the callback.

    Raises:
        ValueError: they were made under another mechanism, bound, adjacency or delta; the ledger of a pickled mark is
            damaged.
    """
    marks = [mark for mark in _marks(module, restore) if mark.ledger.releases]
    if not marks:
        return 0
    changed = _changed(module, marks)
    before = account.ledger.releases
    for mark in marks:
        if mark.ledger is account.ledger:
            continue
        account.ledger.check_continues(mark.ledger, of="the module, which was trained privately before,")
        if account.ledger.releases:
            account.ledger.absorb(mark.ledger)
        else:
            for text in account.ledger.caveats:
                mark.ledger.add_caveat(text)
            account.ledger = mark.ledger
    if changed is not None:
        account.ledger.add_caveat(
            f"the weights were changed outside private training after {account.ledger.releases} releases ({changed} "
            "first): by training without this callback, a conversion, or load_state_dict. If private data went into "
            "that, epsilon does not cover it"
        )
    return account.ledger.releases - before


def spent(module: nn.Module) -> int:
    """Releases that the module's weights have seen by its marks: the most of any part."""
    marks = [mark for part in module.modules() if (mark := vars(part).get(NAME)) is not None]
    return max((m.ledger.releases if isinstance(m, Mark) else int(m["ledger"]["releases"]) for m in marks), default=0)


def _marks(module: nn.Module, restore: Callable[[Mapping[str, Any]], Ledger]) -> list[Mark]:
    """One for each ledger that the module or a part of it is marked with; pickled ones are made anew in place."""
    restored: dict[int, Mark] = {}
    found: dict[int, Mark] = {}
    for part in module.modules():
        mark = vars(part).get(NAME)
        if isinstance(mark, Mapping):
            if id(mark) not in restored:
                weights = mark["weights"]
                known = None if weights is None else frozenset((int(a), int(b), int(c)) for a, b, c in weights)
                restored[id(mark)] = Mark(restore(mark["ledger"]), known)
            mark = vars(part)[NAME] = restored[id(mark)]
        if isinstance(mark, Mark):
            found.setdefault(id(mark.ledger), mark)
    return list(found.values())


def _changed(module: nn.Module, marks: Iterable[Mark]) -> str | None:
    """The first parameter of a marked part that is not what the fit left."""
    ledgers = {id(mark.ledger) for mark in marks}
    for prefix, part in module.named_modules():
        mark = vars(part).get(NAME)
        if not isinstance(mark, Mark) or id(mark.ledger) not in ledgers or mark.weights is None:
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if fingerprint(parameter) not in mark.weights:
                return f"{prefix}.{name}" if prefix else name
    return None


def fingerprint(tensor: Tensor) -> Fingerprint:
    """(size, sum, sum of squares modulo 2^64) of the bit patterns, read as integers of at most 32 bits, computed where
    the tensor lies: finds accidental change. No protection against forgery."""
    flat = held_here(tensor).detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = square = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.contiguous().view(_BITS[flat.element_size()]).split(_PIECE):
        wide = piece.to(torch.int64)
        total, square = total + wide.sum(), square + (wide * wide).sum()
    return flat.numel(), int(total), int(square)
