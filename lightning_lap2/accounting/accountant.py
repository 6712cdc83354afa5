"""The privacy ledger: what has been released, and what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting.budget import most_steps
from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.forecast import EpsilonForecast, build_forecast
from lightning_lap2.accounting.release import Release, known_pair, warn_if_unsound
from lightning_lap2.accounting.routes.best import best_delta, best_epsilon, orders_epsilon
from lightning_lap2.accounting.routes.moments import Array, renyi_divergences
from lightning_lap2.accounting.routes.orders import Orders

STATE_VERSION = 1


class MajorizedAccountant:
    """Privacy accountant for Laplace noise on sums of l2-clipped gradients under Poisson sampling.

    Adjacency is add or remove one example. Parameters must be fixed in advance or scale with each other; they
    may differ from step to step. Every number returned is an upper bound, except under ``bound="published"``.

    Args:
        bound: ``"tight"`` (the smallest of several valid routes: exact moments of the worst gradient, comparison with
            Gaussian steps through two classes of test functions, domination by Gaussian steps), ``"joint"`` (the
            paper's majorization set with one coin; looser) or ``"published"`` (Theorem III.7 as printed, which is
            not a valid bound: it warns).
        mechanism: ``"laplace"`` (l2 clipping), ``"gaussian"`` (l2 clipping), ``"laplace_l1"`` (l1 clipping) or a
            registered one (:func:`register_mechanism`); all but the first with ``bound="tight"`` only.

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
        self.mechanism, self.bound = known_pair(mechanism, bound)
        self._ledger: dict[Release, int] = {}
        self._steps = 0
        warn_if_unsound(self.bound)

    @property
    def steps(self) -> int:
        """Releases so far, free ones included."""
        return self._steps

    @property
    def composition(self) -> Composition:
        """The ledger, frozen: what the routes account for."""
        return Composition(self.mechanism, self.bound, tuple(self._ledger.items()))

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
        self.charge(Release(noise_multiplier, sample_rate, dimension, extra_blocks, layers), steps)

    def charge(self, release: Release, steps: int = 1) -> None:
        """Charge ``steps`` times one release: :meth:`step` for an event that is at hand."""
        steps = _validate.steps("steps", steps)
        if self._steps + steps > _validate.MAX_STEPS:
            raise ValueError(f"steps must be an integer in [0, 2**53] in total, got {self._steps + steps}")
        self._steps += steps
        if steps:
            # the latest last, as in Composition.adding: what is forecast is then what is reported, to the last bit
            self._ledger[release] = self._ledger.pop(release, 0) + steps

    def epsilon(self, *, delta: float, orders_only: bool = False) -> float:
        """Smallest provable epsilon at ``delta``, in [0, inf].

        Args:
            delta: in [0, 1].
            orders_only: the plain minimum over integer orders, without sharpening: for comparison with
                reference values. Never smaller than the default.
        """
        delta = _validate.probability("delta", delta)
        return (orders_epsilon if orders_only else best_epsilon)(self.composition, delta)

    def delta(self, *, eps: float) -> float:
        """Smallest provable delta at ``eps``, in [0, 1]."""
        return best_delta(self.composition, _validate.non_negative("eps", eps))

    def best_order(self, delta: float) -> float:
        """Order (lambda + 1 in the paper) that gives the smallest epsilon by moments; inf where none is finite."""
        composition = self.composition
        remaining = composition.after_bare(_validate.probability("delta", delta))
        if remaining is None or remaining == 0.0 or not composition.noisy:
            return math.inf
        return Orders(composition).best_order(remaining)

    def renyi_divergences(self, orders: Sequence[float]) -> Array:
        """Upper bounds on the Renyi divergences between the outputs of all releases under neighbouring data sets.

        Args:
            orders: real, > 1 and at most 2**20. Between integers the log-moment is taken from its chord (it is convex).

        Returns:
            shape [len(orders)]; ``inf`` where a drawn example is released without noise.
        """
        return renyi_divergences(self.composition.counts, self.mechanism, self.bound, orders)

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

        Nothing is charged. Epsilon does not fall as steps are added, so k is found by bisection; each value looked at
        is :meth:`epsilon`'s own.

        Args:
            eps: budget for everything, what has been spent included, in nats, in [0, inf].
            delta: in [0, 1].
            noise_multiplier: m = scale / C of the further steps, in [0, inf].
            sample_rate: q in [0, 1].
            dimension: n, number of noised coordinates.
            extra_blocks: as in :meth:`step`.
            layers: as in :meth:`step`.

        Returns:
            k, an integer >= 0; 0 where nothing is left, also where more than ``eps`` is spent already. ``math.inf``
            where no number of steps up to 2**53 overspends (the steps are free, or eps is infinite).

        Raises:
            TypeError, ValueError: naming the argument, its value and the legal set.

        Example:
            >>> plan = {"noise_multiplier": 1.6, "sample_rate": 0.0043, "dimension": 26_010}
            >>> MajorizedAccountant().steps_within(eps=1.0, delta=1e-5, **plan)
            7468
        """
        release = Release(noise_multiplier, sample_rate, dimension, extra_blocks, layers)
        return most_steps(
            self.composition,
            release,
            eps=_validate.non_negative("eps", eps),
            delta=_validate.probability("delta", delta),
        )

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

        It does not charge anything and does not follow later calls of :meth:`step`. Making it costs up to 55
        evaluations of :meth:`epsilon`; asking it costs microseconds.

        Args:
            delta: of every value, in [0, 1].
            noise_multiplier: m = scale / C of the further releases, in [0, inf].
            sample_rate: q in [0, 1].
            dimension: n, number of noised coordinates.
            steps: the last k that will be asked for, an integer >= 0.
            extra_blocks: as in :meth:`step`.
            layers: as in :meth:`step`.

        Returns:
            An :class:`~lightning_lap2.accounting.EpsilonForecast`: in nats, never below :meth:`epsilon` after as many
            steps, and equal to it after ``steps``.

        Raises:
            TypeError, ValueError: naming the argument, its value and the legal set.

        Example:
            >>> accountant = MajorizedAccountant()
            >>> plan = {"noise_multiplier": 1.6, "sample_rate": 0.0043, "dimension": 26_010}
            >>> forecast = accountant.forecast(delta=1e-5, steps=1000, **plan)
            >>> accountant.step(steps=1000, **plan)
            >>> forecast.epsilon(1000) == accountant.epsilon(delta=1e-5)
            True
        """
        release = Release(noise_multiplier, sample_rate, dimension, extra_blocks, layers)
        return build_forecast(
            self.composition, release, _validate.steps("steps", steps), _validate.probability("delta", delta)
        )

    def copy(self) -> MajorizedAccountant:
        """An independent accountant with the same ledger."""
        return self._of(self._ledger)

    def without_extra_blocks(self) -> MajorizedAccountant:
        """A copy whose releases leave out their extra blocks: to see what these cost, not to state a guarantee."""
        clone = self._of({})
        for release, steps in self._ledger.items():
            clone.charge(release.without_extra_blocks(), steps)
        return clone

    def _of(self, ledger: Mapping[Release, int]) -> MajorizedAccountant:
        clone = object.__new__(type(self))  # no second warning of an unsound bound
        clone.mechanism, clone.bound, clone._ledger, clone._steps = (
            self.mechanism,
            self.bound,
            dict(ledger),
            sum(ledger.values()),
        )
        return clone

    def state_dict(self) -> dict[str, Any]:
        """The ledger as plain Python numbers and strings: strict JSON, infinities written ``"inf"``."""
        return {
            "version": STATE_VERSION,
            "bound": self.bound,
            "mechanism": self.mechanism,
            "releases": [{**release.to_dict(), "steps": steps} for release, steps in self._ledger.items()],
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
                release = Release.from_dict({name: value for name, value in entry.items() if name != "steps"})
                accountant.charge(release, entry["steps"])
        except (AttributeError, TypeError, ValueError, KeyError) as error:
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


def _expect_keys(entry: object, keys: set[str]) -> None:
    if not isinstance(entry, Mapping) or set(entry) != keys:
        found = sorted(entry) if isinstance(entry, Mapping) else entry
        raise ValueError(f"expected keys {sorted(keys)}, got {json.dumps(found, default=repr)}")
