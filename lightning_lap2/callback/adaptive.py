r"""Adaptive clipping: the threshold C follows a quantile of the gradients' norms through a noisy count.

Each release carries, beside the gradient, the count of :func:`~lightning_lap2.gradients.clipping.centred_count` with
noise of its own. With E the expected batch size, :math:`\beta = \text{count} / E + 1/2` estimates the fraction of
examples whose norm is at most C, and

.. math:: C \leftarrow C \exp(-\eta (\beta - \gamma))

(Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping"; the paper's
section V-D). C is computed from released values only and the noise multiplier does not change with it, so every release
costs the same, fixed in advance, whatever C is: ordinary adaptive composition.

That is also why a resumed run may take C from its checkpoint although a killed run had moved on: any C that is a
function of released values is as good as any other. What must hold is that clipping and noise of one release use the
same C, and both come from one :class:`~lightning_lap2.mechanism.Mechanism`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting import Release
from lightning_lap2.callback.settings import CLIP_LEARNING_RATE, TARGET_QUANTILE, Settings
from lightning_lap2.mechanism import COUNT_SENSITIVITY

RANGE = 1000.0
"""C stays within max_grad_norm / RANGE and max_grad_norm * RANGE: a public range, so that no run of unlucky noise takes
it out of what floats can hold."""
EXPENSIVE_COUNT = 0.25
"""The count's squared shift over the gradient's, both in noise scales, beyond which a warning says so."""


class AdaptiveThreshold:
    """C, from release to release.

    Args:
        settings: of the callback; ``max_grad_norm`` is where C starts.
        kept: what :meth:`state` gave before a checkpoint. Another ``max_grad_norm`` than then starts C anew.

    Attributes:
        value: C of the next release.

    Raises:
        ValueError: ``kept`` is damaged.
    """

    def __init__(self, settings: Settings, kept: Mapping[str, Any]) -> None:
        self._start = settings.max_grad_norm
        self._target = TARGET_QUANTILE if settings.target_quantile is None else settings.target_quantile
        self._rate = CLIP_LEARNING_RATE if settings.clip_learning_rate is None else settings.clip_learning_rate
        self.value = self._start
        if threshold_state(kept).get("start") == self._start:
            self.value = self._within_range(kept["threshold"])

    def follow(self, count: float, expected: float, part: float = 1.0) -> None:
        """Moves C by one released count.

        Args:
            count: noisy centred count, in examples.
            expected: E, examples expected in a whole draw.
            part: share of a whole draw that was released (a short last window), in (0, 1].
        """
        # count / E + 1/2 - target, where only a part of E was expected
        excess = count / expected + part * (0.5 - self._target)
        if math.isfinite(excess):
            most = 2 * math.log(RANGE)  # from one end to the other
            self.value = self._within_range(self.value * math.exp(min(max(-self._rate * excess, -most), most)))

    def _within_range(self, value: float) -> float:
        low, high = self.ends
        return min(max(value, low), high)

    @property
    def ends(self) -> tuple[float, float]:
        """The public range of C."""
        return self._start / RANGE, self._start * RANGE

    def state(self) -> dict[str, float]:
        """Plain numbers for the checkpoint."""
        return {"start": self._start, "threshold": self.value}


def threshold_state(kept: Mapping[str, Any]) -> dict[str, float]:
    """What a checkpoint holds of the threshold: nothing, or two positive numbers.

    Raises:
        TypeError, ValueError: it holds something else.
    """
    if kept and set(kept) != {"start", "threshold"}:
        raise ValueError(f"clipping state with {sorted(kept)}, expected start and threshold")
    return {name: _validate.positive(name, value, finite=True) for name, value in kept.items()}


def current_threshold(settings: Settings, kept: Mapping[str, Any]) -> float:
    """C of the next release under any clipping; ``kept`` as for :class:`AdaptiveThreshold`."""
    return AdaptiveThreshold(settings, kept).value if settings.clipping == "adaptive" else settings.max_grad_norm


def expensive_count(release: Release) -> str | None:
    """A warning where the count is not cheap beside the gradient; ``None`` where it is.

    Args:
        release: of adaptive clipping, whose count is its one extra block.
    """
    ((_, count),) = release.extra_blocks
    if not (count > 0 and release.noise_multiplier < math.inf):
        return None
    ratio = (release.noise_multiplier / count) ** 2  # of squared shifts, by which releases cost
    if ratio <= EXPENSIVE_COUNT:
        return None
    return (
        f"clipping='adaptive': the noisy count costs about {ratio / (1 + ratio):.0%} of what a release costs "
        f"(count_noise_scale={count * COUNT_SENSITIVITY:g} examples); give a larger count_noise_scale, or a larger "
        "batch"
    )
