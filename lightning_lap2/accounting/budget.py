"""What a budget affords beside what has been spent: the least noise for given steps, the most steps for given noise."""

from __future__ import annotations

import math

from lightning_lap2 import _validate
from lightning_lap2.accounting._search import last_affordable, smallest_safe
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.best import best_epsilon

_RTOL = 5e-5


class NoFiniteNoiseError(ValueError):
    """No finite noise multiplier meets the budget."""


def least_multiplier(spent: Composition, release: Release, steps: int, *, eps: float, delta: float) -> float:
    """Smallest m with which ``steps`` further ``release.with_multiplier(m)`` bring the whole to at most ``eps``.

    Args:
        spent: what has been released before.
        release: what each step releases; its own multiplier does not matter.
        steps: planned releases.
        eps: budget for everything, in nats, in [0, inf].
        delta: in [0, 1].

    Returns:
        m in [0, inf), on the safe side and within a relative 1e-4 of the smallest that is; 0.0 where no noise is
        needed.

    Raises:
        NoFiniteNoiseError: where no finite noise serves.
    """

    def cost(m: float) -> float:
        return best_epsilon(spent.adding(release.with_multiplier(m), steps), delta, enough=eps)

    if cost(0.0) <= eps:
        return 0.0
    if not cost(math.inf) <= eps:
        beside = " with what is released beside (extra_blocks)" if release.extra_blocks else ""
        raise _no_noise_serves(eps, delta, f"what was released before costs more{beside}")
    best = smallest_safe(cost, eps, _first_guess(eps, delta, release.sample_rate, steps), _RTOL)
    if math.isinf(best):
        raise _no_noise_serves(eps, delta, f"the cost stays above eps up to m = 1e120 at delta={delta!r}")
    return best


def most_steps(spent: Composition, release: Release, *, eps: float, delta: float) -> int | float:
    """Largest number of further releases that keep the whole within ``eps`` at ``delta``.

    Epsilon does not fall as steps are added, so it is found by bisection.

    Args:
        spent: what has been released before.
        release: what each step releases.
        eps: budget for everything, in nats, in [0, inf].
        delta: in [0, 1].

    Returns:
        An integer >= 0; ``inf`` where no number of steps up to 2**53 overspends.
    """

    def cost(further: int) -> float:
        return best_epsilon(spent.adding(release, further), delta, enough=eps)

    if math.isinf(eps) or (release.is_free and cost(0) <= eps):
        return math.inf
    return last_affordable(cost, eps, _validate.MAX_STEPS - spent.steps)


def _no_noise_serves(eps: float, delta: float, why: str) -> NoFiniteNoiseError:
    return NoFiniteNoiseError(
        f"eps must be one that a finite noise multiplier can meet, got eps={eps!r} at delta={delta!r}: {why}"
    )


def _first_guess(eps: float, delta: float, rate: float, steps: int) -> float:
    """The paper's closed form b* / C = (2 q / eps) sqrt(T log(1/delta)), kept within reason."""
    log_inverse = -math.log(delta) if 0.0 < delta < 1.0 else 50.0
    guess = 2.0 * rate * math.sqrt(steps * log_inverse) / max(eps, 1e-6)
    return min(max(guess, 0.3), 1e6)
