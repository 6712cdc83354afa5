"""Which dimension of an activation is the batch.

A node of the graph knows sizes, not meanings: the batch is the dimension whose size is the number of rows.
Where two have that size (sequence length equal to the batch), what was seen for the same use before decides. The
self-check at fit start, which compares with plain autograd, is what proves the choice: a wrong one gives other norms
and is refused. Afterwards a use must have its batch where it was, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from lightning_lap2.errors import UnsupportedModelError

NO_BATCH = -1


class BatchDims:
    """Remembers for each use of a parameter where the batch was."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, set[int]] = {}
        self._first_call = True
        self.rows = 0

    def start(self, rows: int) -> None:
        """Begins a call with a batch of this many rows."""
        self.rows = rows

    def finish(self) -> None:
        """Ends a call that went through."""
        self._first_call = False

    def find(self, key: Hashable, candidates: Sequence[int], what: Callable[[], str], *, optional: bool = False) -> int:
        """The batch dimension among ``candidates``, the dimensions of the right size.

        Args:
            key: identifies the use: parameter, operation, rank.
            what: makes the words for a message.
            optional: whether the tensor may have no batch dimension (position indices): ``NO_BATCH``.

        Raises:
            UnsupportedModelError: none has the right size; several have and nothing seen before decides; or the
                one that has is not where the batch was in the first call.
        """
        seen = self._seen.setdefault(key, set())
        possible = [*candidates, NO_BATCH] if optional else list(candidates)
        if not possible:
            raise UnsupportedModelError(
                f"{what()}: no dimension has the size of the batch ({self.rows}), so its rows cannot be told "
                f'apart by example (patches or time steps folded into the batch?). Use engine="vmap".'
            )
        if self._first_call or not seen:
            return self._first_sight(seen, possible, len(candidates), what)
        known = seen.intersection(possible)
        if len(known) != 1:
            raise UnsupportedModelError(
                f"{what()}: the batch ({self.rows} rows) lies along one of the dimensions {possible}, where "
                f'the first batches had it along {sorted(seen)}. Use engine="vmap".'
            )
        return known.pop()

    def _first_sight(self, seen: set[int], possible: list[int], fitting: int, what: Callable[[], str]) -> int:
        """The first dimension of the right size; after the first call only if no other has it."""
        if fitting > 1 and not self._first_call:
            raise UnsupportedModelError(
                f"{what()}: dimensions {possible[:fitting]} all have the size of the batch ({self.rows}), and "
                f'nothing seen before tells which is the batch. Use another batch size or engine="vmap".'
            )
        seen.add(possible[0])
        return possible[0]
