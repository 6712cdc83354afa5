"""The probes of an audit: one that places gradient canaries and scores every release, one that only leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_lap2.accounting import GAUSSIAN, Noise
from lightning_lap2.audit.canaries import RAW_LENGTH, Directions
from lightning_lap2.audit.scores import log_mixture, log_ratio
from lightning_lap2.callback.probe import Claim, Probe
from lightning_lap2.choices import Norm, order
from lightning_lap2.gradients import StepCall
from lightning_lap2.sampling import Part

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# per canary what is seen [K, d] and what the canary adds [K, d], in units of the noise scale; and the noise
View = tuple[Array, Array, Noise]

Tick = Callable[[int, float], None]

# Under Laplace noise many log ratios are equal, at their largest value. Honest noise tells no more there, faulty noise
# may: equal ratios are ordered by the projection on the canary. Small enough to leave all others as they are.
TIE = 1e-4


class LeaveOut(Probe):
    """The data set without some canaries.

    Args:
        slots: ``[K]``, index in the data set of each canary.
        included: ``[K]``, its coin.
        tick: called after each release with its number (from 1) and the planned number.
    """

    def __init__(self, slots: Sequence[int], included: Bools, *, tick: Tick | None = None) -> None:
        self._tick, self._releases = tick, 0
        self.slots = {int(slot): k for k, slot in enumerate(slots)}
        self.included = included
        self.absent = frozenset(slot for slot, k in self.slots.items() if not included[k])

    def begin(self, claim: Claim) -> None:
        if not claim.mechanism.noise_multiplier:
            raise ValueError("noise_multiplier=0.0 claims an infinite epsilon: there is nothing to audit; give noise")
        self.claim = claim

    def released(self, values: Tensor) -> None:
        self._releases += 1
        if self._tick is not None:
            self._tick(self._releases, max(self.claim.steps, self._releases))


class GradientProbe(LeaveOut):
    r"""Gives the records at ``slots`` the gradients of canaries, and scores what is released.

    The attacker knows the other records' gradients at every step and which of them were drawn: the probe clips and
    adds them up itself, in fp64 and by code of its own, so that a fault in the library's clipping or summing does not
    cancel. What is left of a release is ``canary + noise`` for :mod:`~lightning_lap2.audit.scores`.

    Args:
        directions: ``[K]``, of as many coordinates as the module has trainable scalars.
        reveal: whether the attacker on one canary also knows the other canaries' coins and draws. True where every
            canary is judged alone (many runs). False where all coins are guessed from one output (one run); an even
            spread is then scored by its inner product with the release, in which the other canaries are more noise.

    Attributes:
        scores: ``[K]``, the log likelihood ratio of each canary so far.
    """

    def __init__(
        self,
        slots: Sequence[int],
        included: Bools,
        directions: Directions,
        *,
        reveal: bool,
        tick: Tick | None = None,
    ) -> None:
        super().__init__(slots, included, tick=tick)
        self.directions, self._reveal = directions, reveal

    def begin(self, claim: Claim) -> None:
        super().begin(claim)
        self._n, mechanism = claim.layout.numel, claim.mechanism
        if self._n != self.directions.n:
            raise ValueError(
                f"the module has {self._n} trainable scalars in the fit, {self.directions.n} when it was made: make "
                "all layers in __init__ or configure_model to audit with gradient canaries"
            )
        # as claimed: not mechanism.scale, which is what the fit takes its noise from
        self._scale = mechanism.noise_multiplier * mechanism.max_grad_norm
        self.scores = np.zeros(len(self.directions))
        self._clear()

    def _clear(self) -> None:
        """No example has entered the next release yet."""
        self._others = torch.zeros(self._n, dtype=torch.float64)
        self._times = np.zeros(len(self.directions))
        self._scheduled = np.zeros(len(self.directions), dtype=bool)

    def drawn(self, part: Part, call: StepCall) -> StepCall:
        for index in (*part.records, *part.left_out):
            if index in self.slots:
                self._scheduled[self.slots[index]] = True
        self._part = part
        return replace(call, revise=self._revise)

    def _revise(self, places: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Canaries take the places of their records' gradients; the others are remembered."""
        canaries = [self.slots.get(self._part.records[place], -1) for place in places]
        real = torch.tensor([k < 0 for k in canaries])
        if bool(real.any()):
            rows = torch.cat([g.detach()[real].reshape(int(real.sum()), -1).double().cpu() for g in gradients], dim=1)
            mechanism = self.claim.mechanism
            self._others += clipped_sum(rows, mechanism.clip_norm, mechanism.norm)
        if bool(real.all()):
            return gradients
        revised = [g.clone() for g in gradients]
        like = self.claim.layout.zeros()
        for row, k in enumerate(canaries):
            if k >= 0:
                raw = RAW_LENGTH * self.claim.mechanism.max_grad_norm * self.directions.flat(k, like)
                for g, part in zip(revised, self.claim.layout.views(raw), strict=True):
                    g[row] = part.to(g)
                self._times[k] += 1
        return revised

    def released(self, values: Tensor) -> None:
        """Adds the release to every canary's score."""
        y = values.detach().double().cpu().numpy() * self.claim.normaliser - self._others.numpy()
        views = self._views_revealed(y) if self._reveal else self._views(y)
        ratio = np.concatenate([log_ratio(seen, shift, noise) for seen, shift, noise in views])
        along = np.concatenate([(seen * shift).sum(-1) for seen, shift, _ in views])
        q = self.claim.sample_rate
        # without sampling the order of the data is known to the attacker, and with it the release of each record
        gained = log_mixture(ratio, q) if q < 1 else np.where(self._scheduled, ratio, 0.0)
        self.scores += gained + TIE * along
        self._clear()
        super().released(values)

    def _views_revealed(self, y: Array) -> list[View]:
        """What is seen of each canary by who knows all the others: noise, and this canary if it was drawn."""
        c, b = self.claim.mechanism.clip_norm, self._scale
        law = self.claim.mechanism.noise
        noise = y - self.directions.combine(c * self._times)
        places, spread = self.directions.coordinates, self.directions.spread
        times = self._times[:, None]
        first = len(places)
        return [
            ((noise[places, None] + c * times[:first]) / b, np.full((first, 1), c / b), law),
            ((noise + c * times[first:] * spread) / b, c * spread / b, law),
        ]

    def _views(self, y: Array) -> list[View]:
        """What is seen of each canary in the release alone."""
        c, b = self.claim.mechanism.clip_norm, self._scale
        law = self.claim.mechanism.noise
        places, spread = self.directions.coordinates, self.directions.spread
        std = law.standard_deviation * b
        lengths = np.linalg.norm(spread, axis=1)[:, None]  # below 1 where the norm is l1
        return [
            (y[places, None] / b, np.full((len(places), 1), c / b), law),
            ((spread @ y)[:, None] / lengths / std, c * lengths / std, GAUSSIAN.noise),
        ]


def clipped_sum(rows: Tensor, max_grad_norm: float, norm: Norm) -> Tensor:
    """``[n]``: the sum of the rows of ``[B, n]`` (fp64), each scaled to norm at most C; rows that are not finite left
    out. The audit's own reading of what the library promises."""
    lengths = torch.linalg.vector_norm(rows, ord=order(norm), dim=1)
    usable = torch.isfinite(lengths)
    weights = torch.where(usable, (max_grad_norm / lengths).clamp(max=1.0), 0.0)
    return weights @ torch.where(usable[:, None], rows, 0.0)
