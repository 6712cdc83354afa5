"""One call of the user's ``training_step``, as the fit asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_lap2.batches import ExampleBatch, split_rows

Revise = Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]]


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class StepCall:
    """One call of ``training_step(batch, batch_idx, ...)``.

    Attributes:
        args: the arguments. ``args[0]`` holds the examples: an :class:`ExampleBatch`, or a batch whose rows are
            examples.
        count: how many examples there are. 0 marks an empty draw: the batch is then a template of one record, run for
            its log calls only; it must add nothing to the sum.
        views: rows per example of a batch of rows, side by side: example i is rows ``i * views`` to ``(i + 1) * views
            - 1``.
        context: entered around the user's step (autocast of the precision plugin).
        prepare: from one example's batch to the step's first argument, inside ``vmap`` as well: the user's batch
            transfer hooks, and the container that the loader was given in.
        revise: ``None`` in training. An audit's ``revise(places, gradients)`` gives what is clipped and summed in
            place of the gradients ``[b, *shape]`` (one tensor per parameter) of the examples drawn at ``places``.
        key: entropy for the generators that the user's code draws from, for runs that must be repeatable; ``None``: the
            operating system's.
        skip_errors: an example on which the user's code raises adds nothing, instead of ending the fit.
    """

    args: tuple[Any, ...]
    count: int
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    views: int = 1
    prepare: Callable[[Any], Any] = field(default=_as_it_is)
    revise: Revise | None = None
    key: bytes | None = None
    skip_errors: bool = False

    @property
    def examples(self) -> ExampleBatch:
        """The examples in groups of one shape.

        Raises:
            UnsupportedModelError: a batch of rows that cannot be split.
        """
        batch = self.args[0]
        if isinstance(batch, ExampleBatch):
            return batch
        group = split_rows(batch, self.views)
        return ExampleBatch([group], [range(group.count)])
