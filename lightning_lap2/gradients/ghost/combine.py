"""One parameter, several uses: the norm is of the sum, so the uses' inner products count."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lap2.gradients.ghost.numerics import CANCELLATION, root
from lightning_lap2.gradients.ghost.sources import Pulled, squares_by_rows
from lightning_lap2.gradients.ghost.terms import Dense, Outer, Rows, Term


def merge(terms: list[Term]) -> list[Term]:
    """Joins uses of one kind into one: positions of a layer that is called twice are positions of one call."""
    merged: list[Term] = [t for t in terms if not isinstance(t, Dense | Outer | Rows)]
    dense = [t for t in terms if isinstance(t, Dense)]
    outer = [t for t in terms if isinstance(t, Outer)]
    rows = [t for t in terms if isinstance(t, Rows)]
    if dense:
        grads = dense[0].grads
        for term in dense[1:]:
            grads = grads + term.grads
        merged.append(Dense(grads))
    if len(outer) > 1:
        left, right = (torch.cat([getattr(t, side) for t in outer], dim=1) for side in ("left", "right"))
        outer = [Outer(left, right, outer[0].dtype)]
    if len(rows) > 1:
        index = torch.cat([t.index for t in rows], dim=1)
        values = torch.cat([t.values for t in rows], dim=1)
        rows = [Rows(index, values, rows[0].height, rows[0].dtype)]
    return merged + outer + rows


def norms_of_sum(terms: list[Term]) -> Tensor:
    """Norms of the sum of merged uses: ``[B]`` in fp64."""
    if len(terms) == 1:
        return terms[0].norms()
    return root(_squares_of_sum(terms))


def _squares_of_sum(terms: list[Term]) -> Tensor:
    if all(isinstance(t, Pulled) and t.keeps_norms() for t in terms):
        # q, k and v cut out of one matrix: orthogonal where no entry is taken twice
        covers = [t.cover() for t in terms if isinstance(t, Pulled)]
        if bool(torch.stack(covers).sum(dim=0).max() <= 1):
            return torch.stack([t.squares() for t in terms]).sum(dim=0)
    by_kind = {type(t): t for t in terms}
    outer, rows = by_kind.get(Outer), by_kind.get(Rows)
    if len(terms) == 2 and isinstance(outer, Outer) and isinstance(rows, Rows):
        own = outer.squares() + rows.squares()
        squares = own + 2 * rows.product(outer)
        if not bool((own > CANCELLATION * squares).any()):
            return squares
    return squares_by_rows(terms)
