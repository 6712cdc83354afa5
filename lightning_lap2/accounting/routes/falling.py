r"""The fourth route: test functions whose second derivative may fall again, against Gaussian steps with mu = rho.

Notation of docs/guarantee.md, section 6. Theorem 7: let c0 = prod (1 - q_t), a lower bound on the ratio R of the
distribution with the example over the one without it, and B = 9/4 + lambda. If h = f'' >= 0 and B h(r) + 4 v h'(r) +
v^2 h''(r) >= 0 for 0 <= v <= r - c0, then E f(R) <= E f(R') under the distribution without the example, where R' is
that of Gaussian steps with sigma = b. With w = sqrt(lambda), u* = (pi - arctan(2 w / (B - 3))) / w, r* = e^{u*},
p = B / (B - 4) and r1 = r* (B - 2) / (B - 4), such is, of (r - c0) / sigma for every sigma > 0,

.. math::
    h(r) = r^{-3/2} \sin(w \log r) \ (1 \le r \le r^*), \qquad
    h(r^*) \Big(\frac{r_1 - r}{r_1 - r^*}\Big)^p \ (r^* \le r \le r_1), \qquad 0 \text{ elsewhere.}

F'' = h, F(1) = F'(1) = 0. A tangent of F at r_t with slope s meets zero at kappa = r_t - F(r_t) / s, so with
sigma = (e^eps - c0) / kappa

.. math::   \delta_{forward}(\epsilon) \le \frac{\sigma}{s} E F\Big(\frac{R' - c_0}{\sigma}\Big)
            = \frac1s \int h(t)\, E(R' - c_0 - \sigma t)_+\, dt,

and in the other direction, with sigma = (e^{-eps} - c0) / kappa at r_t = r1, since (K - R)_+ = (R - K)_+ - R + K,

.. math::   \delta_{reverse}(\epsilon) \le e^\epsilon \frac1s \int h(t)\, E(c_0 + \sigma t - R')_+\, dt.

In place of F stands the polygon through its values at :data:`_NODES` points, which lies above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.routes.pairs import Pair, equal_pair
from lightning_lap2.accounting.routes.profile import Profile
from lightning_lap2.accounting.routes.route import WIDTH_DELTA, GridRoute, Sides, profiles

Array = npt.NDArray[np.float64]

LEAST_CURVATURE, MAX_CURVATURE = 3.3, 1e5
"""lambda that serves every shift; shifts up to rho allow 1.9 / rho, more than which loses digits and gains nothing."""
_NODES = 192
_TOUCHING = 48
_SAFE = 1.0 + 1e-9
_MAX_EPS = 1e5


def curvature(rho: float) -> float:
    """The largest lambda proved for shifts up to ``rho`` (docs/guarantee.md, Lemma 5')."""
    return min(max(LEAST_CURVATURE, 1.9 / rho), MAX_CURVATURE)


@dataclass(frozen=True)
class FallingFunction:
    """The polygon sum_k weight_k (r - node_k)_+ above F, and lines below it.

    Attributes:
        nodes: from 1 to r1, shape [_NODES + 1].
        weights: positive, the jumps of the polygon's slope.
        slopes, zeros: s and kappa of lines s (r - kappa) that touch the polygon from below.
    """

    nodes: Array
    weights: Array
    slopes: Array
    zeros: Array


@lru_cache(maxsize=32)
def falling_function(lam: float) -> FallingFunction:
    """The polygon for ``lam``, and touching lines at every fourth node."""
    w, b = math.sqrt(lam), 2.25 + lam
    top = (math.pi - math.atan(2.0 * w / (b - 3.0))) / w
    turn, end = math.exp(top), math.exp(top) * (b - 2.0) / (b - 4.0)
    power = b / (b - 4.0)
    share = np.arange(_NODES + 1) / _NODES
    rise, fall = np.exp(top * np.minimum(share / 0.75, 1.0)), turn + (end - turn) * (4.0 * share - 3.0)
    nodes = np.where(share < 0.75, rise, fall)
    u = np.log(np.minimum(nodes, turn))
    rising = (w * np.expm1(u) - np.exp(0.5 * u) * np.sin(w * u)) / (lam + 0.25)
    slope = (w - math.exp(-0.5 * top) * (w * math.cos(w * top) + 0.5 * math.sin(w * top))) / (lam + 0.25)
    height, span = math.exp(-1.5 * top) * math.sin(w * top), end - turn
    left = np.clip((end - nodes) / span, 0.0, 1.0)
    beyond = np.maximum(nodes - turn, 0.0)
    tail = height * span / (power + 1.0)
    falling = slope * beyond + tail * (beyond - span / (power + 2.0) * (1.0 - left ** (power + 2.0)))
    values = rising + np.where(nodes > turn, falling, 0.0)
    chords = np.append(np.diff(values) / np.diff(nodes), slope + tail)
    weights = np.diff(chords, prepend=0.0)
    at = np.arange(_NODES, 8, -(_NODES // _TOUCHING))
    slopes = 0.5 * (chords[at] + chords[at - 1])
    slopes[0] = chords[-1]  # at r1: the last slope, for the reverse direction
    return FallingFunction(nodes, weights, slopes, nodes[at] - values[at] / slopes)


class Falling(GridRoute):
    """Upper bounds from Gaussian steps with mu = rho, for Laplace noise."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition, equal_pair)
        largest = max(rho for release, _ in composition.noisy for _, rho in release.blocks)
        self._function = falling_function(curvature(largest))
        self._log_floor = sum(t * _log_kept(r.sample_rate) for r, t in composition.noisy)  # log c0

    def _epsilon(self, counts: Mapping[Pair, int], delta: float) -> Sides:
        forward, reverse = profiles(counts, delta)
        found = Sides(
            _least_epsilon(lambda eps: self._forward(forward, eps, self._log_floor), delta) + forward.drift,
            _least_epsilon(lambda eps: self._reverse(reverse, eps), delta) + reverse.drift,
        )
        if forward is not reverse:
            return found
        # every rate is taken as 1, where c0 = 0: there the two directions are each other's reflection
        whole = _least_epsilon(lambda eps: self._forward(forward, eps, -math.inf), delta) + forward.drift
        return found.least(Sides(whole, whole))

    def _delta(self, counts: Mapping[Pair, int], eps: float, grid: float) -> Sides:
        forward, reverse = profiles(counts, grid, WIDTH_DELTA)
        reduced = max(eps - forward.drift, 0.0)
        found = Sides(self._forward(forward, reduced, self._log_floor), self._reverse(reverse, reduced))
        if forward is not reverse:
            return found
        whole = self._forward(forward, reduced, -math.inf)
        return found.least(Sides(whole, whole))

    def _forward(self, hockey: Profile, eps: float, log_floor: float) -> float:
        """The smallest bound over touching lines: (1/s) sum_k weight_k E(R' - c0 - sigma node_k)_+."""
        f = self._function
        if eps > _MAX_EPS:
            return 1.0
        sigma = -np.expm1(log_floor - eps) / f.zeros  # over e^eps
        log_k = eps + np.log(math.exp(log_floor - eps) + sigma[:, None] * f.nodes)
        return min(1.0, float(np.min(hockey(log_k) @ f.weights / f.slopes)) * _SAFE)

    def _reverse(self, hockey: Profile, eps: float) -> float:
        """(e^eps / s) sum_k weight_k E(K_k - R')_+, K_k = c0 + sigma node_k, where E(K - R')_+ = K H(1 / K)."""
        f = self._function
        if self._log_floor + eps >= 0.0:  # R >= c0 >= e^-eps
            return 0.0
        sigma = -math.expm1(self._log_floor + eps) / f.zeros[0]  # times e^eps
        scaled = math.exp(self._log_floor + eps) + sigma * f.nodes  # e^eps K_k
        puts = scaled * hockey(eps - np.log(scaled))
        return min(1.0, float(puts @ f.weights / f.slopes[0]) * _SAFE)


def _log_kept(rate: float) -> float:
    """log(1 - q), rounded down."""
    return math.log1p(-rate) * (1.0 + 1e-15) if rate < 1.0 else -math.inf


def _least_epsilon(bound: Callable[[float], float], delta: float) -> float:
    """Smallest eps >= 0 with ``bound(eps) <= delta`` for nonincreasing ``bound``, rounded up; inf beyond _MAX_EPS."""
    if bound(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while not bound(high) <= delta:
        low, high = high, 2.0 * high
        if high > _MAX_EPS:
            return math.inf

    def gap(eps: float) -> float:
        return math.log(max(bound(eps), 1e-320)) - math.log(delta)

    root = float(brentq(gap, low, high, xtol=1e-300, rtol=4e-15, maxiter=200)) if gap(high) < 0.0 else high
    return root * (1.0 + 1e-12)
