"""From a budget to the noise: calibration, and the paper's choice of clipping norm and scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting.accountant import MajorizedAccountant
from lightning_lap2.accounting.budget import least_multiplier
from lightning_lap2.accounting.release import Release, known_pair


def calibrate_noise_multiplier(
    *,
    eps: float,
    delta: float,
    sample_rate: float,
    steps: int,
    dimension: float,
    bound: str = "tight",
    mechanism: str = "laplace",
    accountant: MajorizedAccountant | None = None,
    extra_blocks: Sequence[tuple[float, float]] = (),
    layers: Sequence[tuple[float, float, int]] = (),
) -> float:
    r"""Smallest noise multiplier m = scale / C whose ``steps`` steps cost at most ``eps`` at ``delta``.

    The answer is on the safe side, ``epsilon(m) <= eps`` as the accountant computes it, and within a relative
    1e-4 of the smallest that is.

    Args:
        eps: budget, in [0, inf].
        delta: in [0, 1].
        sample_rate: q in [0, 1].
        steps: planned releases.
        dimension: n, number of noised coordinates.
        bound, mechanism: as in :class:`~lightning_lap2.accounting.MajorizedAccountant`.
        accountant: what has been spent before (of a resumed run); its bound and mechanism must agree. It is not
            charged.
        extra_blocks: (dimension, noise multiplier) released beside at every step, with noise of their own that m
            does not change.
        layers: (dimension, share, count) of the parts that are clipped separately, each to share * C; their noise is
            that of the whole, so it scales with m.

    Returns:
        m in [0, inf); 0.0 where no noise is needed (steps = 0, q = 0, eps = inf, delta = 1).

    Raises:
        NoFiniteNoiseError: where no finite noise serves.
        ValueError: an argument is illegal.

    Example:
        >>> m = calibrate_noise_multiplier(eps=1.0, delta=1e-5, sample_rate=0.0043, steps=5860, dimension=26_010)
        >>> f"{m:.3f}"
        '1.456'
    """
    mechanism, bound = known_pair(mechanism, bound)
    eps, delta, steps = (
        _validate.non_negative("eps", eps),
        _validate.probability("delta", delta),
        _validate.steps("steps", steps),
    )
    release = Release(math.inf, sample_rate, dimension, extra_blocks, layers)
    spent = MajorizedAccountant(bound=bound, mechanism=mechanism) if accountant is None else accountant
    if (spent.bound, spent.mechanism) != (bound, mechanism):
        raise ValueError(
            f"accountant must have bound={bound!r} and mechanism={mechanism!r}, got bound={spent.bound!r} and "
            f"mechanism={spent.mechanism!r}"
        )

    return least_multiplier(spent.composition, release, steps, eps=eps, delta=delta)


@dataclass(frozen=True)
class ClipAndScale:
    """One row of the paper's Algorithm 1.

    Attributes:
        max_grad_norm: C, the l2 clipping norm.
        scale: b, the Laplace scale on the sum, in the units of C.
        noise_multiplier: b / C.
        snr: signal-to-noise ratio C / b.
        total_snr: q sqrt(T) C / b.
        epsilon: what T steps cost at the given delta, at most the budget.
    """

    max_grad_norm: float
    scale: float
    noise_multiplier: float
    snr: float
    total_snr: float
    epsilon: float

    def to_dict(self) -> dict[str, Any]:
        """Plain Python numbers."""
        return asdict(self)


def optimize_clip_and_scale(
    *,
    eps: float,
    delta: float,
    sample_rate: float,
    steps: int,
    dimension: float,
    max_grad_norms: Sequence[float],
    bound: str = "tight",
    mechanism: str = "laplace",
) -> list[ClipAndScale]:
    r"""The paper's Algorithm 1: for each clipping norm C of a grid, the smallest scale b that meets (eps, delta).

    The search is a bracketed bisection from :math:`b^* = (2q/\epsilon) \sqrt{T \log(1/\delta)}\, C`. What follows
    from the mathematics: clipping to C and adding noise of scale b is the same experiment as clipping to 1 and
    adding noise of scale b / C, so the accountant sees only C / b. The smallest b is therefore proportional to C,
    every C of the grid has the same best ratio C / b and the same q sqrt(T) C / b, one calibration serves the
    whole grid, and C is a choice of utility (how much signal clipping removes), not of privacy.

    Args:
        eps, delta, sample_rate, steps, dimension, bound, mechanism: as in :func:`calibrate_noise_multiplier`.
        max_grad_norms: the grid of C > 0, finite.

    Returns:
        One :class:`ClipAndScale` for each C, in the order given.

    Raises:
        TypeError, ValueError: naming the argument; also where no finite noise serves.

    Source: Lap2 (arXiv 2602.23516), Algorithm 1.
    """
    norms = [_validate.non_negative("max_grad_norms", c) for c in max_grad_norms]
    if not norms or not all(0.0 < c < math.inf for c in norms):
        raise ValueError(f"max_grad_norms must hold at least one value, each in (0, inf), got {max_grad_norms!r}")
    multiplier = calibrate_noise_multiplier(
        eps=eps,
        delta=delta,
        sample_rate=sample_rate,
        steps=steps,
        dimension=dimension,
        bound=bound,
        mechanism=mechanism,
    )
    accountant = MajorizedAccountant(bound=bound, mechanism=mechanism)
    accountant.step(noise_multiplier=multiplier, sample_rate=sample_rate, dimension=dimension, steps=steps)
    spent = accountant.epsilon(delta=delta)
    snr = math.inf if multiplier == 0.0 else 1.0 / multiplier
    total = snr * sample_rate * math.sqrt(steps) if sample_rate * steps > 0.0 else 0.0
    return [ClipAndScale(c, c * multiplier, multiplier, snr, total, spent) for c in norms]
