"""The privacy ledger: what has been released, and what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting import _check
from lightning_lap2.accounting._search import last_affordable
from lightning_lap2.accounting.comparison import Comparison, compared_pair
from lightning_lap2.accounting.conversion import (
    MomentCurve,
    Objective,
    epsilon_objective,
    log_delta_objective,
    minimise,
    pure_delta,
    pure_epsilon,
    pure_step,
)
from lightning_lap2.accounting.domination import Composition, Pair, dominating_pair
from lightning_lap2.accounting.forecast import EpsilonForecast, build_forecast
from lightning_lap2.accounting.moments import (
    INFINITE,
    ORDER_LEVELS,
    level_count,
    level_log_moments,
    real_table,
    renyi_divergences,
)
from lightning_lap2.accounting.release import Release, check_pair, make_release, warn_if_unsound

Array = npt.NDArray[np.float64]

STATE_VERSION = 1


class MajorizedAccountant:
    """Privacy accountant for Laplace noise on sums of l2-clipped gradients under Poisson sampling.

    Adjacency is add or remove one example. Parameters must be fixed in advance or scale with each other; they
    may differ from step to step. Every number returned is an upper bound, except under ``bound="published"``.

    Args:
        bound: ``"tight"`` (the smallest of three valid routes: exact moments of the worst
            gradient, comparison with and domination by Gaussian steps), ``"joint"`` (the
            paper's majorization set with one coin; looser) or ``"published"`` (Theorem III.7 as printed, which is
            not a valid bound: it warns).
        mechanism: ``"laplace"`` (l2 clipping), ``"gaussian"`` (l2 clipping) or ``"laplace_l1"`` (l1 clipping);
            the last two with ``bound="tight"`` only.

    Attributes:
        bound, mechanism: as given.
        steps: releases so far.

    Raises:
        TypeError, ValueError: from every method, naming the argument, its value and the legal set.

    Edge cases: q = 0, m = inf, n = 0 and zero steps cost exactly nothing. m = 0 reveals a drawn example, so T
    such steps give epsilon = inf for delta < 1 - (1 - q)^T and nothing above.

    Example:
        >>> acc = MajorizedAccountant()
        >>> acc.step(noise_multiplier=1.5, sample_rate=0.0043, dimension=26_010, steps=5860)
        >>> round(acc.epsilon(delta=1e-5), 3) <= 1.020
        True
    """

    def __init__(self, bound: str = "tight", mechanism: str = "laplace") -> None:
        self.mechanism, self.bound = check_pair(mechanism, bound)
        self._ledger: dict[Release, int] = {}
        self._steps = 0
        warn_if_unsound(self.bound)

    @property
    def steps(self) -> int:
        """Releases so far, free ones included."""
        return self._steps

    def step(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        dimension: float,
        steps: int = 1,
        extra_blocks: Sequence[tuple[float, float]] = (),
        layers: Sequence[tuple[float, float, int]] = (),
    ) -> None:
        """Charge ``steps`` releases of the same parameters.

        Args:
            noise_multiplier: m = scale / C in [0, inf].
            sample_rate: q in [0, 1].
            dimension: n, number of noised coordinates (overcounting is safe, undercounting is not).
            steps: how many, >= 0.
            extra_blocks: (dimension, noise multiplier) of vectors released beside under the same coin.
            layers: (dimension, share, count) of the parts that are clipped separately, each to share * C; see
                :class:`~lightning_lap2.accounting.Release`.
        """
        release = make_release(noise_multiplier, sample_rate, dimension, extra_blocks, layers)
        self._charge(release, _check.steps(steps))

    def _charge(self, release: Release, steps: int) -> None:
        if self._steps + steps > _check.MAX_STEPS:
            raise ValueError(f"steps must be an integer in [0, 2**53] in total, got {self._steps + steps}")
        self._steps += steps
        if steps:
            self._ledger[release] = self._ledger.get(release, 0) + steps

    def epsilon(self, *, delta: float, orders_only: bool = False) -> float:
        """Smallest provable epsilon at ``delta``, in [0, inf].

        Args:
            delta: in [0, 1].
            orders_only: the plain minimum over integer orders, without sharpening: for comparison with
                reference values. Never smaller than the default.
        """
        remaining = self._after_bare(_check.delta(delta))
        if remaining is None:
            return math.inf
        if remaining >= 1.0 or not self._costly():
            return 0.0
        if orders_only or self.bound == "published":
            return self._epsilon_by_orders(remaining, plain=True)
        value = self._quick_epsilon(remaining)
        return min(value, self._epsilon_by_domination(remaining, value))

    def _epsilon_without_domination(self, delta: float) -> float:
        """The quick part of :meth:`epsilon`, milliseconds: never smaller."""
        remaining = self._after_bare(delta)
        if remaining is None:
            return math.inf
        if remaining >= 1.0 or not self._costly():
            return 0.0
        if self.bound == "published":
            return self._epsilon_by_orders(remaining, plain=True)
        return self._quick_epsilon(remaining)

    def _quick_epsilon(self, delta: float) -> float:
        value = min(self._epsilon_by_orders(delta), pure_epsilon(self._pure(), delta))
        comparison = self._comparison()
        if value > 0.0 and comparison is not None and comparison.usable(delta):
            value = min(value, comparison.epsilon(delta))
        return value

    def delta(self, *, eps: float) -> float:
        """Smallest provable delta at ``eps``, in [0, 1]."""
        eps = _check.eps(eps)
        bare = self._bare_mass()
        if not self._costly() or math.isinf(eps):
            return bare
        value = math.exp(min(0.0, self._minimise(log_delta_objective(min(eps, 1e100)))[0]))
        if self.bound != "published":
            value = min(value, pure_delta(self._pure(), eps))
            comparison, route = self._comparison(), self._domination()
            if comparison is not None:
                value = comparison.delta(eps, value)
            if route is not None and not self._outdone(route, value):
                value = min(value, route.delta(eps, value))
        return min(1.0, bare + (1.0 - bare) * value)

    def best_order(self, delta: float) -> float:
        """Order (lambda + 1 in the paper) that gives the smallest epsilon by moments; inf where none is finite."""
        remaining = self._after_bare(_check.delta(delta))
        if remaining is None or remaining == 0.0 or not self._costly():
            return math.inf
        return self._minimise(epsilon_objective(remaining))[1]

    def renyi_divergences(self, orders: Sequence[float]) -> Array:
        """Upper bounds on the Renyi divergences between the outputs of all releases under neighbouring data sets.

        Args:
            orders: real, > 1 and at most 2**20. Between integers the log-moment is taken from its chord (it is convex).

        Returns:
            shape [len(orders)]; ``inf`` where a drawn example is released without noise.
        """
        return renyi_divergences(self._ledger.items(), self.mechanism, self.bound, orders)

    def steps_within(
        self,
        *,
        eps: float,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        dimension: float,
        extra_blocks: Sequence[tuple[float, float]] = (),
        layers: Sequence[tuple[float, float, int]] = (),
    ) -> int | float:
        """Largest number k of further steps with ``epsilon(delta=delta) <= eps`` after them.

        0 where nothing is left, also where more than ``eps`` is spent already. ``math.inf`` where no number of
        steps up to 2**53 overspends (the steps are free, or eps is infinite).
        """
        release = make_release(noise_multiplier, sample_rate, dimension, extra_blocks, layers)
        eps, delta = _check.eps(eps), _check.delta(delta)

        def cost(further: int) -> float:
            return self._with(release, further).epsilon(delta=delta)

        if math.isinf(eps) or (release.is_free and cost(0) <= eps):
            return math.inf
        return last_affordable(cost, eps, _check.MAX_STEPS - self.steps)

    def forecast(
        self,
        *,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        dimension: float,
        steps: int,
        extra_blocks: Sequence[tuple[float, float]] = (),
        layers: Sequence[tuple[float, float, int]] = (),
    ) -> EpsilonForecast:
        """Epsilon after each of ``steps`` further releases, cheap enough to log at every one.

        See :class:`~lightning_lap2.accounting.forecast.EpsilonForecast`. It does not charge anything and does not
        follow later calls of :meth:`step`.
        """
        release = make_release(noise_multiplier, sample_rate, dimension, extra_blocks, layers)
        return _forecast(
            self.bound, self.mechanism, tuple(self._ledger.items()), release, _check.steps(steps), _check.delta(delta)
        )

    def copy(self) -> MajorizedAccountant:
        """An independent accountant with the same ledger."""
        return self._with(None, 0)

    def without_extra_blocks(self) -> MajorizedAccountant:
        """A copy whose releases leave out their extra blocks: to see what these cost, not to state a guarantee."""
        clone = self._with(None, 0)
        clone._ledger = {}
        for release, steps in self._ledger.items():
            alone = replace(release, extra_blocks=())
            clone._ledger[alone] = clone._ledger.get(alone, 0) + steps
        return clone

    def state_dict(self) -> dict[str, Any]:
        """The ledger as plain Python numbers and strings: strict JSON, infinities written ``"inf"``."""
        return {
            "version": STATE_VERSION,
            "bound": self.bound,
            "mechanism": self.mechanism,
            "releases": [
                {
                    "noise_multiplier": _encode(r.noise_multiplier),
                    "sample_rate": r.sample_rate,
                    "dimension": _encode(r.dimension),
                    "extra_blocks": [[_encode(n), _encode(m)] for n, m in r.extra_blocks],
                    **({"layers": [[_encode(n), share, count] for n, share, count in r.layers]} if r.layers else {}),
                    "steps": steps,
                }
                for r, steps in self._ledger.items()
            ],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MajorizedAccountant:
        """Rebuild an accountant; everything is validated before anything is charged.

        Raises:
            ValueError: where the state is corrupted or of another version, saying which part.
        """
        try:
            _expect_keys(state, {"version", "bound", "mechanism", "releases"})
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version must be {STATE_VERSION}, got {state['version']!r}")
            accountant = cls(bound=state["bound"], mechanism=state["mechanism"])
            for entry in state["releases"]:
                layered = {"layers"} if "layers" in entry else set()
                _expect_keys(entry, {"noise_multiplier", "sample_rate", "dimension", "extra_blocks", "steps"} | layered)
                release = make_release(
                    _decode(entry["noise_multiplier"]),
                    entry["sample_rate"],
                    _decode(entry["dimension"]),
                    [(_decode(n), _decode(m)) for n, m in entry["extra_blocks"]],
                    [(_decode(n), share, count) for n, share, count in entry.get("layers", ())],
                )
                accountant._charge(release, _check.steps(entry["steps"]))
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"state is not a valid accountant state: {error}") from error
        return accountant

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MajorizedAccountant):
            return NotImplemented
        mine, theirs = (self.mechanism, self.bound), (other.mechanism, other.bound)
        return mine == theirs and self._ledger == other._ledger

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MajorizedAccountant(bound={self.bound!r}, mechanism={self.mechanism!r}, steps={self.steps})"

    # ------------------------------------------------------------------ composition

    def _with(self, release: Release | None, steps: int) -> MajorizedAccountant:
        clone = object.__new__(type(self))
        clone.mechanism, clone.bound, clone._ledger = self.mechanism, self.bound, dict(self._ledger)
        clone._steps = self._steps
        if release is not None:
            clone._charge(release, steps)
        return clone

    def _costly(self) -> list[tuple[Release, int]]:
        """Releases that cost something and carry noise."""
        return [(r, t) for r, t in self._ledger.items() if not (r.is_free or r.is_bare)]

    def _bare_mass(self) -> float:
        """1 - prod (1 - q)^T over releases without noise: the chance that one of them reveals the example."""
        log_kept = 0.0
        for release, steps in self._ledger.items():
            if release.is_bare:
                if release.sample_rate == 1.0:
                    return 1.0
                log_kept += steps * math.log1p(-release.sample_rate)
        return -math.expm1(log_kept)

    def _after_bare(self, delta: float) -> float | None:
        """Delta left for the noisy releases, or None where the bare ones exceed it.

        A release without noise is (0, p)-DP; it composes to delta_total = p + (1 - p) delta_rest.
        """
        bare = self._bare_mass()
        if bare == 0.0 or delta == 1.0:
            return delta
        return None if delta < bare else (delta - bare) / (1.0 - bare)

    def _level(self, level: int, sampled_only: bool = False) -> Array:
        total = np.zeros(len(ORDER_LEVELS[level]))
        for release, steps in self._costly():
            if not (sampled_only and release.sample_rate == 1.0):
                total += steps * level_log_moments(release, self.mechanism, self.bound, level)
        return total

    def _unsampled(self, orders: Array) -> Array:
        total = np.zeros_like(orders)
        for release, steps in self._costly():
            if release.sample_rate == 1.0:
                total += steps * real_table(orders, release, self.mechanism, self.bound) * (1.0 + 4e-15)
        return total

    def _minimise(self, objective: Objective, plain: bool = False) -> tuple[float, float]:
        curve = MomentCurve(
            level=self._level,
            levels=level_count(self.bound),
            sampled=lambda level: self._level(level, sampled_only=True),
            unsampled=self._unsampled,
            interpolate=not plain and self.bound != "published",
        )
        return minimise(curve, objective)

    def _epsilon_by_orders(self, delta: float, plain: bool = False) -> float:
        if delta == 0.0:
            return math.inf
        value = max(0.0, self._minimise(epsilon_objective(delta), plain)[0])
        return value if value < INFINITE else math.inf

    def _pure(self) -> float:
        """Pure epsilon of the composition: an l2-clipped block has l1 norm at most sqrt(n) rho."""
        if self.mechanism == "gaussian":
            return math.inf
        total = 0.0
        for release, steps in self._costly():
            root = 1.0 if self.mechanism == "laplace_l1" else None
            loss = sum((root or math.sqrt(n)) * rho for n, rho in release.blocks)
            total += steps * pure_step(release.sample_rate, loss) * (1.0 + 4e-15)
        return total

    def _pairs(self, pair_of: Callable[[Release, str], Pair]) -> dict[Pair, int]:
        counts: dict[Pair, int] = {}
        for release, steps in self._costly():
            pair = pair_of(release, self.mechanism)
            counts[pair] = counts.get(pair, 0) + steps
        return counts

    def _comparison(self) -> Comparison | None:
        if self.bound != "tight" or self.mechanism == "gaussian":
            return None
        return Comparison(self._pairs(compared_pair))

    def _domination(self) -> Composition | None:
        return Composition(self._pairs(dominating_pair)) if self.bound == "tight" else None

    def _outdone(self, route: Composition, delta: float) -> bool:
        """Whether domination surely loses to the comparison, whose pairs are closer together: a screen that saves
        time, never validity. Measured: true where the parameters differ by 15 %, delta well below total variation."""
        if self.mechanism != "laplace" or delta > 0.1 * route.total_variation():
            return False
        comparison = self._comparison()
        if comparison is None or not comparison.usable(delta):
            return False
        releases = [release for release, _ in self._costly()]
        return all(
            dominating_pair(r, self.mechanism).parameter >= 1.15 * compared_pair(r, self.mechanism).parameter
            for r in releases
        )

    def _epsilon_by_domination(self, delta: float, rival: float) -> float:
        route = self._domination()
        if route is None or rival == 0.0 or not route.usable(delta):
            return math.inf
        if self._outdone(route, delta) or route.hopeless(delta, rival):
            return math.inf
        return route.epsilon(delta)


@lru_cache(maxsize=16)
def _forecast(
    bound: str, mechanism: str, ledger: tuple[tuple[Release, int], ...], release: Release, steps: int, delta: float
) -> EpsilonForecast:
    """Kept, since every fit of a series of equal ones (cross-validation, an audit) asks for the same."""
    accountant = MajorizedAccountant(bound=bound, mechanism=mechanism)
    for spent, count in ledger:
        accountant._charge(spent, count)
    return build_forecast(accountant, release, steps, delta)


def _encode(value: float) -> float | int | str:
    if math.isinf(value):
        return "inf"
    return int(value) if value == math.floor(value) and abs(value) < _check.MAX_STEPS else value


def _decode(value: object) -> Any:
    return math.inf if isinstance(value, str) and value == "inf" else value


def _expect_keys(entry: object, keys: set[str]) -> None:
    if not isinstance(entry, Mapping) or set(entry) != keys:
        found = sorted(entry) if isinstance(entry, Mapping) else entry
        raise ValueError(f"expected keys {sorted(keys)}, got {json.dumps(found, default=repr)}")
