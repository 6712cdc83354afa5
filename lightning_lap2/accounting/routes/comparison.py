r"""The third route: a Laplace step is compared with a Gaussian one through a class of test functions.

Domination at every (epsilon, delta) asks for Gaussian noise that is up to sqrt(pi/2) too small
(:mod:`~lightning_lap2.accounting.routes.domination`). Less suffices. Let R be the likelihood ratio of T steps, in
either direction, and R' that of T Poisson-subsampled Gaussian steps N(0, 1) against N(mu, 1) with

.. math::   \mu^2 = n (4 x - 8 \log(1 + x / 2)) \le \rho^2, \qquad x = \rho / \sqrt n,

the mu at which both pairs have the same Bhattacharyya coefficient. Theorem 6 of docs/guarantee.md: E[f(R)] <= E[f(R')]
for every f with f''(r) = h(r) >= 0, r^{3/2} h(r) nondecreasing, and 9/4 h(r) + 4 v h'(r) + v^2 h''(r) >= 0 for
0 <= v <= r. Such is, for every c > 0, with h(r) = log(r/c) / r for r > c and 0 below,

.. math::   f_c(r) = c\,G(\log(r/c)), \qquad G(x) = e^x (x^2/2 - x + 1) - 1 \quad (x \ge 0).

The tangent of f_c at r = c e^l, whose slope is l^2 / 2, meets zero at K = c kappa(l) with
kappa(l) = 2 (1 + e^l (l - 1)) / l^2, so (R - K)_+ <= (2 / l^2) f_c(R) and

.. math::   \delta(\log K) \le \frac{2}{l^2} E[f_c(R')], \qquad K = c\,\kappa(l), \quad c, l > 0 \text{ arbitrary}.

Given delta, each c of a grid has its l and its K in closed form; the smallest K is taken. With H the hockey sticks of
R' (:mod:`~lightning_lap2.accounting.routes.profile`), E[f_c(R')] is the integral of (y - log c) H(e^y) over y > log c.
Both directions of add or remove are bounded at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.routes.pairs import Pair, compared_pair
from lightning_lap2.accounting.routes.profile import FORWARD, TAIL_ORDER, Profile, profile
from lightning_lap2.accounting.routes.route import WIDTH_DELTA, GridRoute, Sides, least_delta

Array = npt.NDArray[np.float64]

_LOG_TAIL_CONSTANT = math.log(3.5)
"""G(x) <= 3.5 e^{5x/4}: the maximum of (x^2/2 - x + 1) e^{-x/4} is 3.43, at x = 8.87."""
_STRIDE = 16


class Comparison(GridRoute):
    """Upper bounds from the Gaussian steps of equal Bhattacharyya coefficient, for Laplace noise."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition, compared_pair)

    def _epsilon(self, counts: Mapping[Pair, int], delta: float) -> Sides:
        forward = profile(counts, delta, FORWARD)
        return Sides(*[_epsilon_of(*class_means(forward), delta) * (1.0 + 1e-12) + forward.drift] * 2)

    def _delta(self, counts: Mapping[Pair, int], eps: float, grid: float) -> Sides:
        forward = profile(counts, grid, FORWARD, WIDTH_DELTA)
        log_c, mean = class_means(forward)
        reduced = max(eps * (1.0 - 1e-12) - forward.drift, 0.0)
        return Sides(*[least_delta(lambda delta: _epsilon_of(log_c, mean, delta), reduced)] * 2)


def class_means(forward: Profile) -> tuple[Array, Array]:
    """log c at every sixteenth point of the grid, so that finer grids have the points of coarser ones, and upper bounds
    on E[f_c(R')] there, shape [points] each.

    H is linear in K = e^y between points, so its integrals over a cell are exact combinations of the two end values.
    """
    h, value = forward.width, forward.value
    right, first_right = _cell_shares(h)  # weights of the right end
    cell = (h - right) * value[:-1] + right * value[1:]
    first = (0.5 * h * h - first_right) * value[:-1] + first_right * value[1:]  # integral of (y - left end) H
    whole = np.cumsum(cell[::-1])[::-1]
    beyond = np.append(whole[1:], 0.0)
    mean = np.cumsum((h * beyond + first)[::-1])[::-1]  # integral of (y - log c) H from each point on
    start = -forward.bottom % _STRIDE
    log_c = (forward.bottom + np.arange(start, mean.size, _STRIDE, dtype=np.float64)) * h
    log_missing = forward.log_missing + _LOG_TAIL_CONSTANT + (1.0 - TAIL_ORDER) * log_c
    missing = np.where(log_missing < 0.0, np.exp(np.clip(log_missing, -745.0, 0.0)), np.inf)
    return log_c, mean[start::_STRIDE] * (1.0 + 1e-12) + missing


def _epsilon_of(log_c: Array, mean: Array, delta: float) -> float:
    """The smallest log K over c, at least 0."""
    finite = mean < 1e300 * delta
    if not finite.any():
        return math.inf
    return max(0.0, float(np.min(log_c[finite] + log_kappa(np.sqrt(2.0 * mean[finite] / delta)))))


def _cell_shares(h: float) -> tuple[float, float]:
    """Integrals over s in [0, h] of g and of s g, g = (e^s - 1) / (e^h - 1): sum_k h^{k+1} / ((k + 1) k!) and
    sum_k h^{k+2} / ((k + 2) k!), k >= 1, over e^h - 1."""
    terms = [math.exp(k * math.log(h) - math.lgamma(k + 1.0)) for k in range(1, 40 + math.ceil(6.0 * h))]
    zeroth = math.fsum(t * h / (k + 1.0) for k, t in enumerate(terms, 1))
    first = math.fsum(t * h * h / (k + 2.0) for k, t in enumerate(terms, 1))
    return zeroth / math.expm1(h), first / math.expm1(h)


def log_kappa(l: Array) -> Array:
    """log kappa(l), kappa(l) = 2 (1 + e^l (l - 1)) / l^2 = 2 sum_{k >= 0} l^k (k + 1) / (k + 2)!; increasing."""
    small = np.minimum(l, 0.5)
    series = np.zeros_like(small)
    for k in range(16, 0, -1):
        series = series * small + 2.0 * (k + 1) / math.factorial(k + 2)
    large = np.maximum(l, 0.5)
    far = large + np.log(2.0 * (np.exp(-large) + large - 1.0)) - 2.0 * np.log(large)
    return np.where(l < 0.5, np.log1p(series * small), far)
