r"""The price of releasing the best of a random number of runs (docs/private-search.md has the proofs).

Runs are independent and alike; their number K has the generating function f, mean f'(1), and does not depend on the
data. A run's output y has a rank: let t be the chance that another run does better, t' the same under the neighbouring
data set. The best of K runs has the density f'(1 - t) against one run, so its price is that of one run, and of how far
f'(1 - t) and f'(1 - t') can be apart: f'(1 - t) <= e^rho f'(1 - t') for a *spread* rho.

* Truncated negative binomial, f'(1 - t) = f'(1) (gamma / p)^(1 + eta), p = gamma + (1 - gamma) t: a run that is
  (eps_1, delta_1)-DP with delta_1 <= gamma (e^eps_1 - 1) / (1 - gamma) has the spread (1 + eta) eps_1; one with the
  Renyi divergence D at order l the spread (1 + eta) ((1 - 1/l) D + log(1/gamma) / l).
* Poisson, f'(1 - t) = mu e^(-mu t): the spread is mu times the total variation.

With a spread, the best is (eps_2 + rho, f'(1) delta_2)-DP where one run is (eps_2, delta_2)-DP, and its Renyi
divergence of order l is at most D_l + rho + log f'(1) / (l - 1). For Poisson mu delta^ may stand for rho there, where
one run is (eps^, delta^)-DP with e^eps^ <= l / (l - 1).

Source: Papernot and Steinke 2022 (arXiv 2110.03620), Theorems 2 and 6, and the same proofs for privacy profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq

from lightning_lap2 import _validate
from lightning_lap2.accounting._search import last_affordable, smallest_safe
from lightning_lap2.accounting.accountant import MajorizedAccountant
from lightning_lap2.accounting.budget import NoFiniteNoiseError, least_multiplier, most_steps
from lightning_lap2.accounting.calibration import calibrate_noise_multiplier
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.conversion import epsilon_objective

Distribution = Literal["negative_binomial", "poisson"]

DISTRIBUTIONS: tuple[str, ...] = ("negative_binomial", "poisson")
_ORDERS = (
    1.125,
    1.25,
    1.375,
    1.5,
    1.75,
    2.0,
    2.5,
    *map(float, range(3, 17)),
    20.0,
    24.0,
    32.0,
    48.0,
    64.0,
    128.0,
    256.0,
)
_RTOL = 5e-5
_DOWN = 1.0 - 1e-12
"""Rounds what a run is allowed."""


@dataclass(frozen=True)
class RunCount:
    r"""Distribution of the number of runs, which must stay secret.

    Args:
        mean: expected number of runs: finite, >= 1 (> 0 for ``"poisson"``).
        distribution: ``"negative_binomial"``, truncated so that there is at least one run, or ``"poisson"``, which can
            give none.
        shape: eta > -1 of the negative binomial: P[K = k] is proportional to (1 - gamma)^k Gamma(k + eta) / k!. 0 is
            the logarithmic distribution, 1 the geometric. No meaning for ``"poisson"``.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.

    Source: Papernot and Steinke 2022, Definition 1.
    """

    mean: float
    distribution: Distribution = "negative_binomial"
    shape: float = 0.0

    def __post_init__(self) -> None:
        _validate.choice("distribution", self.distribution, DISTRIBUTIONS)
        _validate.positive("mean_runs", self.mean, finite=True)
        if not _validate.real("shape", self.shape) > -1.0 or math.isinf(self.shape):
            raise ValueError(f"shape must be finite and above -1, got {self.shape!r}")
        if self.distribution == "poisson":
            if self.shape != 0.0:
                raise ValueError(f"shape={self.shape!r} has no meaning for distribution='poisson'; leave it 0")
        elif self.mean < 1.0:
            raise ValueError(
                f"mean_runs must be at least 1 for distribution='negative_binomial', got {self.mean!r}: there is "
                "always one run"
            )

    @cached_property
    def gamma(self) -> float:
        """Of the negative binomial, in (0, 1]: the root of its mean; 1 where there is always exactly one run."""
        if self.mean <= 1.0 + 1e-9:  # the root is within rounding of 1
            return 1.0

        def excess(log_gamma: float) -> float:
            return math.log(_negative_binomial_mean(math.exp(log_gamma), self.shape) / self.mean)

        low = -1.0
        while excess(low) < 0.0:
            low *= 2.0
        return math.exp(brentq(excess, low, -1e-15, xtol=1e-14, rtol=1e-14))

    @property
    def name(self) -> str:
        if self.distribution == "poisson":
            return "Poisson"
        return {0.0: "logarithmic", 1.0: "geometric"}.get(
            self.shape, f"truncated negative binomial, shape {self.shape:g}"
        )

    @property
    def log_none(self) -> float:
        """log P[K = 0]."""
        return -self.mean if self.distribution == "poisson" else -math.inf

    def draw(self, uniform: float) -> int:
        """The number of runs by inversion.

        Args:
            uniform: in [0, 1), of 53 secret bits: the law drawn from is the stated one up to 2**-53.
        """
        count, mass = self._first()
        reached = mass
        while uniform >= reached:
            count, mass = count + 1, mass * self._ratio(count)
            if reached + mass == reached and self._ratio(count) < 1.0:
                break
            reached += mass
        return count

    def chance_of(self, share: float) -> float:
        """Probability that a configuration which a draw gives with probability ``share`` is tried: 1 - f(1 - share)."""
        x = 1.0 - _validate.probability("share", share)
        if self.distribution == "poisson":
            return -math.expm1(-self.mean * share)
        if self.gamma == 1.0:
            return share
        log_rest = math.log1p(-(1.0 - self.gamma) * x)  # log(1 - (1 - gamma) x)
        if self.shape == 0.0:
            return 1.0 - log_rest / math.log(self.gamma)
        return 1.0 - math.expm1(-self.shape * log_rest) / math.expm1(-self.shape * math.log(self.gamma))

    def _first(self) -> tuple[int, float]:
        """The smallest number of runs and its probability."""
        if self.distribution == "poisson":
            return 0, math.exp(-self.mean)
        if self.gamma == 1.0:
            return 1, 1.0
        if self.shape == 0.0:
            return 1, (1.0 - self.gamma) / -math.log(self.gamma)
        return 1, self.shape * (1.0 - self.gamma) / math.expm1(-self.shape * math.log(self.gamma))

    def _ratio(self, count: int) -> float:
        """P[K = count + 1] / P[K = count]."""
        if self.distribution == "poisson":
            return self.mean / (count + 1)
        return (1.0 - self.gamma) * (count + self.shape) / (count + 1)

    # -- the spread -----------------------------------------------------------------------------------------------

    def admitted_delta(self, eps: float) -> float:
        """Largest delta_1 with which a run that is (``eps``, delta_1)-DP has the spread (1 + eta) ``eps``."""
        if self.gamma == 1.0:
            return 1.0
        return min(1.0, self.gamma / (1.0 - self.gamma) * math.expm1(min(eps, 700.0)) * _DOWN)

    def spread_of_point(self, eps: float, delta: float) -> float:
        """rho that follows from one run being (``eps``, ``delta``)-DP, ``inf`` where none does."""
        if self.distribution == "poisson":
            return self.mean * total_variation(eps, delta)
        if self.gamma == 1.0:
            return 0.0
        return (1.0 + self.shape) * eps if delta <= self.admitted_delta(eps) else math.inf

    def spread_of_divergence(self, order: float, divergence: float) -> float:
        """rho that follows from the Renyi divergence of one run at ``order``."""
        if self.distribution == "poisson":
            return math.inf
        return (1.0 + self.shape) * ((1.0 - 1.0 / order) * divergence - math.log(self.gamma) / order)


def _negative_binomial_mean(gamma: float, shape: float) -> float:
    """eta (1 - gamma) / (gamma (1 - gamma^eta)), for gamma in (0, 1)."""
    log_gamma = math.log(gamma)
    odds = -math.expm1(log_gamma) / gamma
    if shape == 0.0:
        return odds / -log_gamma
    return shape * odds / -math.expm1(shape * log_gamma)


def total_variation(eps: float, delta: float) -> float:
    """Largest total variation between two laws that are (``eps``, ``delta``)-close in both directions.

    From t' <= e^eps t + delta and 1 - t <= e^eps (1 - t') + delta.
    """
    half = math.tanh(0.5 * eps)  # (e^eps - 1) / (e^eps + 1)
    return min(1.0, half + delta * (1.0 - half))


@dataclass(frozen=True)
class RunLimit:
    """What each run of a search keeps, whatever its plan. The price of the search follows from it alone.

    Every statement is one that a mixture keeps if its parts do, so runs of different configurations, drawn at random,
    need not be alike.

    Args:
        points: (epsilon, delta): a run is (epsilon, delta)-DP for each of them.
        divergences: (order, value): its Renyi divergence of that order is at most the value.
    """

    points: tuple[tuple[float, float], ...]
    divergences: tuple[tuple[float, float], ...] = ()

    def met_by(self, accountant: MajorizedAccountant) -> bool:
        """Whether what ``accountant`` holds keeps the limit."""
        # epsilon and delta are bounds by themselves, and inverse to each other up to rounding only
        return all(
            accountant.epsilon(delta=delta) <= eps or accountant.delta(eps=eps) <= delta for eps, delta in self.points
        ) and all(float(accountant.renyi_divergences([order])[0]) <= value for order, value in self.divergences)

    def search_epsilon(self, runs: RunCount, delta: float) -> float:
        """Epsilon at ``delta`` of the best of ``runs`` runs that keep this limit; ``inf`` where none follows."""
        spreads = [runs.spread_of_point(*point) for point in self.points]
        spreads += [runs.spread_of_divergence(*found) for found in self.divergences]
        spread = min(spreads, default=math.inf)
        best = min((eps for eps, found in self.points if runs.mean * found <= delta), default=math.inf) + spread
        for order, value in self.divergences:
            moment = (order - 1.0) * (value + min(spread, self._cancelled(runs, order))) + math.log(runs.mean)
            moment = float(np.logaddexp(runs.log_none, moment))  # no run: the same under both data sets
            best = min(best, float(epsilon_objective(delta)(np.array([order]), np.array([moment]))[0]))
        return max(0.0, best)

    def _cancelled(self, runs: RunCount, order: float) -> float:
        """Theorem 6: mu delta^ of the points with e^eps^ <= l / (l - 1), which may stand for the spread."""
        if runs.distribution != "poisson":
            return math.inf
        return min((runs.mean * delta for eps, delta in self.points if eps <= _reach(order)), default=math.inf)

    def least_multiplier(self, spent: MajorizedAccountant, release: Release, steps: int) -> float:
        """Smallest noise multiplier with which ``steps`` further releases keep the limit; arguments, result and errors
        as those of ``budget.least_multiplier``."""

        def composed(multiplier: float) -> MajorizedAccountant:
            total = spent.copy()
            total.charge(release.with_multiplier(multiplier), steps)
            return total

        before = spent.composition
        needed = [least_multiplier(before, release, steps, eps=eps, delta=delta) for eps, delta in self.points]
        least = max(needed, default=0.0)
        for order, value in self.divergences:
            least = max(least, _multiplier_within(composed, order, value, start=max(least, 0.1)))
        while not self.met_by(composed(least)):  # a larger multiplier than a point's own: up to rounding it serves
            least *= 1.0 + 2.0 * _RTOL
        return least

    def most_steps(self, spent: MajorizedAccountant, release: Release) -> int | float:
        """Largest number of further releases that keep the limit; arguments and result as those of
        ``budget.most_steps``."""
        before = spent.composition
        found = [most_steps(before, release, eps=eps, delta=delta) for eps, delta in self.points]
        for order, value in self.divergences:

            def cost(further: int, order: float = order) -> float:
                total = spent.copy()
                total.charge(release, further)
                return float(total.renyi_divergences([order])[0])

            found.append(last_affordable(cost, value, _validate.MAX_STEPS - spent.steps))
        return min(found)


def _multiplier_within(
    composed: Callable[[float], MajorizedAccountant], order: float, value: float, start: float
) -> float:
    """Smallest noise multiplier whose composition keeps one Renyi divergence."""

    def cost(multiplier: float) -> float:
        return float(composed(multiplier).renyi_divergences([order])[0])

    if cost(0.0) <= value:
        return 0.0
    least = smallest_safe(cost, value, start, _RTOL)
    if math.isinf(least):
        raise NoFiniteNoiseError(
            f"no finite noise multiplier keeps the Renyi divergence of order {order:g} within {value:g}: what was "
            "released before or beside costs more"
        )
    return least


# -- from one run to the search, and back -------------------------------------------------------------------------


def search_epsilon(accountant: MajorizedAccountant, runs: RunCount, *, delta: float) -> float:
    """Epsilon at ``delta`` of a search each of whose runs releases what ``accountant`` holds.

    Args:
        accountant: one run.
        runs: how many.
        delta: of the search, in (0, 1).
    """
    return _cheapest(accountant, runs, _validate.open_unit("delta", delta))[0]


@dataclass(frozen=True)
class SearchPlan:
    """The noise of a search's runs.

    Attributes:
        noise_multiplier: of a run with the plan that was given.
        limit: what every run keeps, of whatever plan, for the search to stay within its budget.
        epsilon: of the search, at most the budget.
    """

    noise_multiplier: float
    limit: RunLimit
    epsilon: float


def plan_search(
    *, eps: float, delta: float, runs: RunCount, bound: str = "tight", mechanism: str = "laplace", **plan: Any
) -> SearchPlan:
    """Smallest noise multiplier of one run with which the search costs at most ``eps`` at ``delta``.

    The limit is made of what that run keeps. Runs with another plan can be held to it too: the price is the same, and
    their noise somewhat more than they would need if all runs were like them.

    Args:
        eps: of the search, positive and finite.
        delta: of the search, in (0, 1).
        runs: how many runs.
        bound, mechanism, plan: of one run, as for :func:`~lightning_lap2.accounting.calibrate_noise_multiplier`.

    Raises:
        NoFiniteNoiseError: where no finite noise serves.
        ValueError: an argument is illegal.
    """
    _validate.positive("eps", eps, finite=True)
    _validate.open_unit("delta", delta)
    if bound == "published":
        raise ValueError("bound='published' is not a valid bound, so a search has no price under it; use bound='tight'")

    def cheapest(multiplier: float) -> tuple[float, RunLimit]:
        accountant = MajorizedAccountant(bound=bound, mechanism=mechanism)
        accountant.step(noise_multiplier=multiplier, **plan)
        return _cheapest(accountant, runs, delta)

    least = calibrate_noise_multiplier(eps=eps, delta=delta, bound=bound, mechanism=mechanism, **plan)
    if least > 0.0:  # else the runs are free, and so is the search
        least = smallest_safe(lambda multiplier: cheapest(multiplier)[0], eps, 1.5 * least, 10.0 * _RTOL, growth=1.2)
    if math.isinf(least):
        raise NoFiniteNoiseError(f"eps={eps!r} at delta={delta!r} is met by no finite noise multiplier of one run")
    price, limit = cheapest(least)
    return SearchPlan(least, limit, price)


def _cheapest(accountant: MajorizedAccountant, runs: RunCount, delta: float) -> tuple[float, RunLimit]:
    """The price of a search, and the few statements about a run that it follows from."""
    priced = [(limit.search_epsilon(runs, delta), limit) for limit in _limits(accountant, runs, delta)]
    return min(priced, key=lambda pair: pair[0])


def _limits(accountant: MajorizedAccountant, runs: RunCount, delta: float) -> list[RunLimit]:
    """What one run keeps, in the combinations from which a price follows."""
    each = delta / runs.mean * _DOWN
    main = (accountant.epsilon(delta=each), each)
    if runs.distribution == "negative_binomial" and runs.gamma == 1.0:  # always one run
        return [RunLimit((main,))]
    values = accountant.renyi_divergences(_ORDERS)
    divergences = [(order, float(value)) for order, value in zip(_ORDERS, values, strict=True) if math.isfinite(value)]

    def at(eps: float) -> tuple[float, float]:
        return eps, accountant.delta(eps=eps)

    if runs.distribution == "poisson":
        # total variation is read off at an epsilon that costs nothing; at 0 rounding keeps it out of reach
        return [RunLimit((main, at(1e-4)))] + [RunLimit((at(_reach(found[0])),), (found,)) for found in divergences]
    spread = _spread_point(accountant, runs, main[0])
    found = [RunLimit((main, spread)), *(RunLimit((spread,), (one,)) for one in divergences)]
    if divergences:  # Theorem 2 as it stands
        second = min(divergences, key=lambda one: runs.spread_of_divergence(*one))
        found += [RunLimit((), tuple({one, second})) for one in divergences]
    return found


def _reach(order: float) -> float:
    """The largest eps^ with e^eps^ <= l / (l - 1)."""
    return -math.log1p(-1.0 / order)


def _spread_point(accountant: MajorizedAccountant, runs: RunCount, top: float) -> tuple[float, float]:
    """A point that gives the smallest spread, up to 1e-5.

    Args:
        top: where to look up to, if that is enough.
    """

    def serves(eps: float) -> bool:
        return accountant.delta(eps=eps) <= runs.admitted_delta(eps)

    low, high = 0.0, max(top, 1e-6)
    while not serves(high):
        if high > 700.0:
            return math.inf, 1.0
        low, high = high, 2.0 * high
    while high - low > 1e-5 * high and high > 1e-9:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high, runs.admitted_delta(high)
