"""Where an audit meets a fit: what it may place there, and what it is shown. In training there is no probe.

The places are those of the strongest attacker that the guarantee speaks of. It chooses a record's gradient (which
then goes the way of every other: drawn by the same coin, clipped and summed by the same code), it knows all other
records and coins, and it sees every noised release. What it must not see is the un-noised sum, and it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_lap2.gradients import ParameterLayout, StepCall
from lightning_lap2.gradients.trial import Trial
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise.grid import CELLS
from lightning_lap2.sampling import Part


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the fit claims of each of its releases.

    Attributes:
        mechanism: noise multiplier and clipping norm as planned.
        sample_rate: q, the probability that an example enters a release; 1 without sampling.
        normaliser: what the noised sum is divided by.
        steps: releases that the fit plans, ``inf`` without a last one.
        layout: the order of the coordinates of a release.
    """

    mechanism: Mechanism
    sample_rate: float
    normaliser: int
    steps: float
    layout: ParameterLayout


class Probe:
    """Places nothing and sees nothing; an audit overrides what it needs.

    Attributes:
        absent: indices of records that are left out of the data: they are drawn like any other, and dropped. N, q
            and the plan are those of the whole data, so this is the neighbouring data set of the same public N.
        trial: what an earlier fit of the same module and data found by trying the step; ``None`` lets this fit try it.
            Set by the fit.
        cells: of the grid of the releases; see :class:`~lightning_lap2.noise.NoiseSource`.
    """

    absent: frozenset[int] = frozenset()
    trial: Trial | None = None
    cells: int = CELLS

    def begin(self, claim: Claim) -> None:
        """The plan stands; no step is taken yet."""

    def drawn(self, part: Part, call: StepCall) -> StepCall:
        """A loader batch is about to be trained on; returns the call to make, e.g. with ``revise`` set."""
        return call

    def released(self, values: Tensor) -> None:
        """One release as the optimizer gets it: ``(clipped sum + noise) / normaliser``, flat ``[n]``. Not to be
        changed."""
