r"""Moments of the likelihood ratio of one step.

With p the density of Laplace(0, 1) and a shift x >= 0 in units of the noise scale, one coordinate has

.. math::
    F(x, k) = E_{z \sim p}[(p(z - x) / p(z))^k] = \frac{k e^{(k-1)x} + (k-1) e^{-kx}}{2k - 1}

(the paper's Theorem III.2; real k >= 1). Coordinates share one subsampling coin, so the k-th moment of a step
that shifts coordinate i by x_i is

.. math::
    M_k = \sum_{j=0}^{k} \binom{k}{j} (1-q)^{k-j} q^j e^{S_j}, \qquad S_j = \sum_i \log F(x_i, j).

The bounds differ in S_j only, except ``"published"``, which gives every coordinate a coin of its own
(Theorem III.7 as printed, not a valid bound). See docs/guarantee.md for the proofs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln
from typing_extensions import assert_never

from lightning_lap2.accounting.family import family_of
from lightning_lap2.accounting.release import Release, known_pair, warn_if_unsound
from lightning_lap2.accounting.routes.kernel import log_kernel, majorant_nodes
from lightning_lap2.choices import Bound

Array = npt.NDArray[np.float64]

HUGE = 1e250
"""Stands for an infinite log-moment in sums; whatever exceeds ``INFINITE`` is taken as infinite."""
INFINITE = 1e200
_TINY = float(np.finfo(np.float64).tiny)
_ULP = float(np.finfo(np.float64).eps)
_CHUNK = 1 << 18


def _geometric(first: int, last: int, ratio: float) -> tuple[int, ...]:
    orders = [first]
    while orders[-1] < last:
        orders.append(min(last, max(orders[-1] + 1, int(orders[-1] * ratio))))
    return tuple(orders)


ORDER_LEVELS: tuple[tuple[int, ...], ...] = (
    tuple(range(1, 65)),
    tuple(range(65, 400)),
    _geometric(400, 4096, 1.05),
    _geometric(4300, 16384, 1.1),
    _geometric(18000, 65536, 1.1),
)
"""Integer orders, split so that a query looks only as high as its best order. Order 1 has log-moment 0."""


def level_count(bound: Bound) -> int:
    """Number of :data:`ORDER_LEVELS` that ``bound`` uses."""
    match bound:
        case "published":
            return 3
        case "tight" | "joint":
            return len(ORDER_LEVELS)
        case _:
            assert_never(bound)


def even_spread_table(orders: Array, blocks: Sequence[tuple[float, float]]) -> Array:
    r"""S_k of the evenly spread gradient, :math:`\sum_l n_l \log F(\rho_l / \sqrt{n_l}, k)`: the supremum over
    every gradient of norm <= C, for each order at once.

    Args:
        orders: real orders k >= 1, shape [K].
        blocks: (n_l, rho_l) with n_l >= 1 or infinite, rho_l > 0.

    Returns:
        S, shape [K], capped at ``HUGE``; zero at order 1.
    """
    total = np.zeros_like(orders)
    for (n, rho), count in Counter(blocks).items():  # layers of one size are summed once
        shift = rho / math.sqrt(n)
        if rho > 1e100:
            total += HUGE
        elif n > 1e30 or shift < 1e-150:  # n = inf, or F - 1 would underflow: log F(x, k) <= k (k - 1) x^2 / 2
            total += orders * (orders - 1.0) * (count * 0.5 * rho * rho)
        else:
            total += count * n * log_kernel(shift, orders)
    return _positive(orders, np.minimum(total, HUGE))


def majorant_table(orders: Array, blocks: Sequence[tuple[float, float]]) -> Array:
    r"""S_k over the paper's majorization set (Lemma III.6): :math:`\sum_i \log F(\rho x_i, k)` with
    :math:`x_i = \sqrt i - \sqrt{i - 1}`; an upper bound, relative error below 1e-8.

    Args and returns as :func:`even_spread_table`.
    """
    total = np.zeros_like(orders)
    for (n, rho), count in Counter(blocks).items():
        if n > 1e30 or rho > 1e100:
            return _positive(orders, np.full_like(orders, HUGE))
        nodes, weights = majorant_nodes(n)
        weights = count * weights
        rows = max(1, _CHUNK // nodes.size)
        for start in range(0, orders.size, rows):
            part = slice(start, start + rows)
            total[part] += log_kernel(rho * nodes[None, :], orders[part, None]) @ weights
    return _positive(orders, np.minimum(total, HUGE))


def _positive(orders: Array, table: Array) -> Array:
    """A cost that underflows is still a cost: never let log E[ratio^k], k > 1, come out as zero."""
    return np.where(orders > 1.0, np.maximum(table, _TINY), 0.0)


def gaussian_table(orders: Array, blocks: Sequence[tuple[float, float]]) -> Array:
    """S_k = k (k - 1) sum_l rho_l^2 / 2 of Gaussian noise with standard deviation C_l / rho_l, any dimension."""
    return even_spread_table(orders, [(math.inf, rho) for _, rho in blocks])


def single_coordinate_table(orders: Array, blocks: Sequence[tuple[float, float]]) -> Array:
    """S_k = sum_l log F(rho_l, k): l1 clipping, where one coordinate is the worst (log F is convex in x)."""
    return even_spread_table(orders, [(1.0, rho) for _, rho in blocks])


def integer_table(last: int, release: Release, mechanism: str, bound: Bound) -> Array:
    """S_j for j = 0..last, shape [last + 1].

    j -> S_j is convex (the log of a moment), so interpolating ``"joint"`` beyond order 400 errs upwards.
    """
    orders = np.arange(1.0, last + 1.0)
    match bound:
        case "joint":
            knots = orders if last < 400 else np.concatenate([orders[:400], _knots(last)])
            table = np.interp(orders, knots, majorant_table(knots, release.blocks))
        case "tight" | "published":
            table = real_table(orders, release, mechanism, bound)
        case _:
            assert_never(bound)
    return np.concatenate([[0.0], table])


def _knots(last: int) -> Array:
    return np.asarray(_geometric(401, last, 1.02), dtype=np.float64)


def real_table(orders: Array, release: Release, mechanism: str, bound: Bound) -> Array:
    """S_k at real orders k >= 1, shape [K]: the log-moments of a release without sampling."""
    match bound:
        case "tight":
            return family_of(mechanism).moments(orders, release.blocks)
        case "joint" | "published":
            return majorant_table(orders, release.blocks)
        case _:
            assert_never(bound)


def subsampled_log_moments(orders: Sequence[int], table: Array, rate: float) -> Array:
    r"""log M_k from S_j and one coin, :math:`M_k - 1 = \sum_{j \ge 2} \binom{k}{j}(1-q)^{k-j}q^j(e^{S_j} - 1)`.

    Every term is positive, so nothing cancels. Each exponent is a sum of parts no larger than about
    k (1 + |log q|), which bounds the rounding error; it is added on the safe side.

    Args:
        orders: increasing integers >= 1, length K.
        table: S_j, shape [max(orders) + 1].
        rate: q in (0, 1).

    Returns:
        log M_k, shape [K].
    """
    log_q, log_p = math.log(rate), math.log1p(-rate)
    growth = _log_expm1(table[2:])
    log_factorial = gammaln(np.arange(1.0, table.size + 1.0))
    result = np.zeros(len(orders))
    start = 0
    while start < len(orders):
        stop = start + 1
        while stop < len(orders) and (stop + 1 - start) * orders[stop] <= _CHUNK:
            stop += 1
        k = np.asarray(orders[start:stop])[:, None]
        j = np.arange(2, int(k[-1, 0]) + 1)[None, :]
        if j.size:
            rest = np.maximum(k - j, 0)
            terms = log_factorial[k] - log_factorial[j] - log_factorial[rest]
            terms += rest * log_p + j * log_q + growth[None, : j.size]
            terms[j > k] = -np.inf
            result[start:stop] = _log_one_plus_sum(terms)
        start = stop
    k_all = np.asarray(orders, dtype=np.float64)
    slack = 1.0 + 4.0 * _ULP * k_all * (1.0 + abs(log_q))
    return np.where(k_all > 1.0, np.maximum(result * slack, _TINY), 0.0)


def _log_expm1(value: Array) -> Array:
    safe = np.maximum(value, _TINY)
    near = np.log(np.expm1(np.minimum(safe, 1.0)))
    far = safe + np.log1p(-np.exp(-np.maximum(safe, 0.5)))
    return np.where(safe < 1.0, near, far)


def _log_one_plus_sum(terms: Array) -> Array:
    """log(1 + sum_j exp(terms[k, j])) over the last axis."""
    top = terms.max(axis=1)
    floor = np.where(np.isfinite(top), top, 0.0)
    log_sum = floor + np.log(np.maximum(np.exp(terms - floor[:, None]).sum(axis=1), _TINY))
    result: Array = np.logaddexp(0.0, log_sum)
    return result


def published_log_moments(orders: Sequence[int], release: Release) -> Array:
    """Theorem III.7 as printed, sum_i log sum_j C(k, j) (1-q)^{k-j} q^j F(rho x_i, j): NOT a bound.

    Args and returns as :func:`subsampled_log_moments`; the sum over i by blocks, relative error below 1e-6.
    """
    rate, last = release.sample_rate, max(orders)
    total = np.zeros(len(orders))
    for n, rho in release.blocks:
        if n > 1e30 or rho > 1e100:
            return np.where(np.asarray(orders) > 1, HUGE, 0.0)
        nodes, weights = majorant_nodes(n)
        shifts, j = rho * nodes, np.arange(1.0, last + 1.0)
        moderate = shifts * last <= 300.0
        for shift, weight in zip(shifts[~moderate], weights[~moderate], strict=True):
            table = np.concatenate([[0.0], log_kernel(shift, j)])
            total += weight * subsampled_log_moments(orders, _positive(np.arange(last + 1.0), table), rate)
        if moderate.any():
            excess = np.expm1(log_kernel(shifts[None, moderate], j[1:, None]))  # F(rho x_i, j) - 1, [J, I]
            total += np.log1p(_binomial_weights(tuple(orders), rate) @ excess) @ weights[moderate]
    return np.where(np.asarray(orders) > 1, np.clip(total, _TINY, HUGE), 0.0)


@lru_cache(maxsize=8)
def _binomial_weights(orders: tuple[int, ...], rate: float) -> Array:
    """C(k, j) (1-q)^{k-j} q^j for j = 2..max(orders), shape [K, J]; zero where j > k."""
    k, j = np.asarray(orders)[:, None], np.arange(2, max(orders) + 1)[None, :]
    rest = np.maximum(k - j, 0)
    log_weight = gammaln(k + 1.0) - gammaln(j + 1.0) - gammaln(rest + 1.0)
    log_weight += rest * math.log1p(-rate) + j * math.log(rate)
    return np.where(j <= k, np.exp(np.minimum(log_weight, 0.0)), 0.0)


@lru_cache(maxsize=4096)
def level_log_moments(release: Release, mechanism: str, bound: Bound, level: int) -> Array:
    """log M_k of one step at every order of ``ORDER_LEVELS[level]``; read-only, cached.

    ``release`` must cost something and carry noise (neither free nor bare).
    """
    values = integer_log_moments(ORDER_LEVELS[level], release, mechanism, bound)
    values.setflags(write=False)
    return values


def integer_log_moments(orders: Sequence[int], release: Release, mechanism: str, bound: Bound) -> Array:
    """log M_k of one step that costs something and carries noise, at increasing integers k >= 1, shape [K]."""
    if release.sample_rate == 1.0:
        return _unsampled(np.asarray(orders, dtype=np.float64), release, mechanism, bound)
    if bound == "published":
        return published_log_moments(orders, release)
    table = integer_table(max(orders), release, mechanism, bound)
    return np.minimum(subsampled_log_moments(orders, table, release.sample_rate), HUGE)


def _unsampled(orders: Array, release: Release, mechanism: str, bound: Bound) -> Array:
    return np.minimum(real_table(orders, release, mechanism, bound) * (1.0 + 16.0 * _ULP), HUGE)


def renyi_divergences(
    counts: Iterable[tuple[Release, int]], mechanism: str, bound: Bound, orders: Sequence[float]
) -> Array:
    """Renyi divergences of a composition, see
    :meth:`~lightning_lap2.accounting.MajorizedAccountant.renyi_divergences`.

    Args:
        counts: releases, with the number of times each was made.
        orders: real, in (1, 2**20].
    """
    wanted = np.asarray(orders, dtype=np.float64)
    if wanted.ndim != 1 or not wanted.size or not np.all((wanted > 1.0) & (wanted <= 1 << 20)):
        raise ValueError(f"orders must hold numbers in (1, 2**20], at least one, got {orders!r}")
    whole = np.unique(np.concatenate([np.floor(wanted), np.ceil(wanted)])).astype(int)
    total = np.zeros(whole.size)
    for release, steps in counts:
        if release.is_bare:
            return np.full(wanted.shape, math.inf)
        if not release.is_free:
            total += steps * integer_log_moments(whole.tolist(), release, mechanism, bound)
    divergences = np.interp(wanted, whole, total) / (wanted - 1.0)
    return np.where(divergences < INFINITE, divergences, math.inf)


def log_moments(
    noise_multiplier: float,
    sample_rate: float,
    dimension: float,
    orders: Sequence[float],
    bound: str = "tight",
    mechanism: str = "laplace",
) -> Array:
    r"""log M_k of one step: the log of the k-th moment of the likelihood ratio of neighbouring outputs.

    The Renyi divergence of order k is ``log M_k / (k - 1)``; the paper's lambda is k - 1.

    Args:
        noise_multiplier: m = scale / C, in [0, inf].
        sample_rate: q in [0, 1].
        dimension: n, the number of noised coordinates, a non-negative integer or ``math.inf``.
        orders: integers k >= 1, in any order; real k >= 1 too where ``sample_rate`` is 0 or 1.
        bound: ``"tight"`` (exact supremum over gradients), ``"joint"`` (the paper's majorization set with one
            coin) or ``"published"`` (Theorem III.7 as printed; warns, since it is not a valid bound).
        mechanism: ``"laplace"``, ``"gaussian"``, ``"laplace_l1"`` or a registered one.

    Returns:
        float64 array, shape [len(orders)]; ``inf`` where a drawn example is released without noise.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.

    Source: Lap2 (arXiv 2602.23516) Theorem III.2 for the kernel; docs/guarantee.md for the bounds.
    """
    mechanism, kind = known_pair(mechanism, bound)
    release = Release(noise_multiplier, sample_rate, dimension)
    wanted = _orders(orders, integer=0.0 < release.sample_rate < 1.0)
    warn_if_unsound(kind)
    if release.is_free:
        return np.zeros(wanted.size)
    if release.is_bare:
        return np.where(wanted > 1.0, np.inf, 0.0)
    if release.sample_rate == 1.0:
        values = _unsampled(wanted, release, mechanism, kind)
    else:
        ordered = sorted({int(k) for k in wanted})
        index = {k: i for i, k in enumerate(ordered)}
        values = integer_log_moments(ordered, release, mechanism, kind)[[index[int(k)] for k in wanted]]
    return np.where(values >= INFINITE, np.inf, values)


def _orders(orders: Any, *, integer: bool) -> Array:
    legal = "an integer >= 1" if integer else "a real number >= 1"
    values = []
    for order in orders:
        if isinstance(order, bool) or not isinstance(order, Real):
            raise TypeError(f"orders must hold {legal} each, got {order!r} of type {type(order).__name__}")
        number = float(order)
        whole = isinstance(order, Integral) or number == math.floor(number) if math.isfinite(number) else False
        if not (math.isfinite(number) and number >= 1.0) or (integer and not whole):
            raise ValueError(f"orders must hold {legal} each where sample_rate is as given, got {order!r}")
        if integer and number > 1 << 20:
            raise ValueError(f"orders must be at most 2**20 where 0 < sample_rate < 1, got {order!r}")
        values.append(number)
    if not values:
        raise ValueError("orders must hold at least one order, got an empty sequence")
    return np.asarray(values)
