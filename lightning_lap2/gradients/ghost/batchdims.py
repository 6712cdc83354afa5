"""Which dimension of an activation is the batch.

A node of the graph knows sizes, not meanings: the batch is the dimension whose size is the number of examples.
Where two have that size (sequence length equal to the batch), what was seen for the same use at another batch
size decides. The self-check at fit start, which compares with the loop engine, is what proves the choice: a wrong
one gives other norms and is refused. Later calls can then only repeat a proven choice or be refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_lap2.gradients.engine import UnsupportedModelError

NO_BATCH = -1


class BatchDims:
    """Remembers for each use of a parameter where the batch was."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, set[int]] = {}
        self._first_call = True
        self.examples = 0

    def start(self, examples: int) -> None:
        """Begins a call with this many examples."""
        self.examples = examples

    def finish(self) -> None:
        """Ends a call that went through."""
        self._first_call = False

    def find(self, key: Hashable, candidates: Sequence[int], what: str, *, optional: bool = False) -> int:
        """The batch dimension among ``candidates``, the dimensions of the right size.

        Args:
            key: identifies the use: parameter, operation, rank.
            what: words for the message.
            optional: whether the tensor may have no batch dimension (position indices): ``NO_BATCH``.

        Raises:
            UnsupportedModelError: none has the right size, or several have and nothing seen before decides.
        """
        seen = self._seen.setdefault(key, set())
        if not candidates:
            if optional:
                seen.add(NO_BATCH)
                return NO_BATCH
            raise UnsupportedModelError(
                f"{what}: no dimension has the size of the batch ({self.examples}), so its rows cannot be told "
                f'apart by example (patches or time steps folded into the batch?). Use engine="vmap".'
            )
        if len(candidates) == 1 and not (optional and seen):
            seen.add(candidates[0])
            return candidates[0]
        known = seen & {*candidates, NO_BATCH}
        if len(known) == 1:
            return known.pop()
        if not known and (self._first_call or len(candidates) == 1):
            seen.add(candidates[0])
            return candidates[0]
        raise UnsupportedModelError(
            f"{what}: dimensions {list(candidates)} all have the size of the batch ({self.examples}), and nothing "
            f'seen before tells which is the batch. Use another batch size or engine="vmap".'
        )
