r"""The hockey sticks of composed, Poisson-subsampled steps, on a grid of losses, rounded upwards.

One step has the ratio A = 1 - q + q r of the distribution with the example (P1) over the one without it (P0). Its law
is moved to a grid of losses log A so that every cell keeps its mass and its mean of A (connecting the dots: Doroshenko,
Ghazi, Kamath, Kumar, Manurangsi 2022). The composition R = prod A is found by one fast Fourier transform of the masses
under P1 (:data:`FORWARD`) or under P0 with the loss negated (:data:`REVERSE`), tilted by exp(theta loss) so that
rounding is small relative to delta, however small delta is. From them, with loss the log ratio of the two,

.. math::   H(K) = \sum_{loss > \log K} mass (1 - K e^{-loss}),

which is E_{P0}(R - K)_+ forward and E_{P0}(1 - K R)_+ in reverse.

**Why epsilon is monotone.** Moving the mass of a cell to its ends replaces a convex function by its chords, which are
convex again. So for one grid E f(R) grows with every step in the convex order: with mu, with q, with each step that is
added. Grids are nested, their widths powers of two, and chords of a coarser grid lie higher. The width is a
nondecreasing function of the ledger (:func:`_width`). Hence a larger ledger has the larger value, its grid included.
What is left out, and the rounding of the transforms, are bounded and added: they are what may differ, at most
1.6e-7 of epsilon where it was looked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.signal import lfilter
from scipy.special import log_ndtr, ndtr

from lightning_lap2.accounting.routes.pairs import Pair

Array = npt.NDArray[np.float64]
_Items = tuple[tuple[Pair, int], ...]

FORWARD, REVERSE = 1, -1
TAIL_ORDER = 1.25
"""Order of the moment through which a test function that grows like R log^2 R is bounded off the grid."""
MAX_PARAMETER = 24.0
"""Pairs further apart underflow; they cost an epsilon in the hundreds a step and are left to the moments."""
MAX_STEPS = 10**8
MAX_KINDS = 32
MIN_DELTA = 1e-200
_POINTS = 2.0**17
_DEEP = 36.0
"""-log of the share of delta that may be left out at each end."""
_ULP = float(np.finfo(np.float64).eps)
_NEGLIGIBLE = 1e-40
_LOWEST, _HIGHEST = -37.0, 37.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)
_ORDERS = 2.0 ** np.arange(-14.0, 26.0, 0.5)
"""Distances of the orders of moments from 1 upwards and from 0 downwards."""


def resolvable(counts: Mapping[Pair, int], delta: float) -> bool:
    """Whether the composition can be put on a grid. True for whatever is smaller than what is accepted."""
    return (
        MIN_DELTA < delta < 1.0
        and len(counts) <= MAX_KINDS
        and sum(counts.values()) <= MAX_STEPS
        and all(p.parameter <= MAX_PARAMETER for p in counts)
    )


@dataclass(frozen=True)
class Profile:
    """H at the points log K = (bottom + i) width, not below its exact value, piecewise linear in K.

    Attributes:
        value: H, nonincreasing, shape [points].
        log_missing: log of a bound on E[R^TAIL_ORDER] over what is not on the grid (forward only).
        drift: bound on the rounding of the mean loss.
    """

    bottom: int
    width: float
    value: Array
    log_missing: float
    drift: float

    def __call__(self, log_k: Array) -> Array:
        """H at any log K: exact between points, H(K) <= H(K_0) + K_0 - K below them, constant above."""
        at = np.clip(log_k / self.width - self.bottom, 0.0, self.value.size - 1.0)
        index = np.minimum(at.astype(np.int64), self.value.size - 2)
        share = np.expm1((at - index) * self.width) / math.expm1(self.width)
        inside = self.value[index] + (self.value[index + 1] - self.value[index]) * share
        lowest = self.bottom * self.width
        below = math.exp(lowest) * -np.expm1(np.minimum(log_k - lowest, 0.0)) if lowest < 700.0 else 0.0
        result: Array = inside + below
        return result

    def reaches(self, delta: float) -> float:
        """Smallest log K >= 0 with H(K) <= delta; inf where there is none on the grid."""
        below = np.flatnonzero(self.value <= delta)
        if not below.size:
            return math.inf
        i = int(below[0])
        if i == 0:
            return max(0.0, self.bottom * self.width)
        high, low = float(self.value[i - 1]), float(self.value[i])
        share = (high - delta) / (high - low)
        return max(0.0, (self.bottom + i - 1) * self.width + math.log1p(share * math.expm1(self.width)))


def profile(counts: Mapping[Pair, int], delta: float, side: int, width_delta: float | None = None) -> Profile:
    """H of the composition where it is about ``delta``.

    Args:
        counts: steps of each pair, as :func:`~lightning_lap2.accounting.routes.pairs.merged` gives them.
        delta: in (MIN_DELTA, 1).
        side: :data:`FORWARD` or :data:`REVERSE`.
        width_delta: the delta by which the width of the grid is chosen; by default ``delta``.
    """
    return _profile(tuple(counts.items()), delta, side, delta if width_delta is None else width_delta)


@lru_cache(maxsize=16)
def _profile(items: _Items, delta: float, side: int, width_delta: float) -> Profile:
    plan = _plan(items, delta, side, width_delta)
    steps = [_step(p, plan.width, _reach(t, delta), side) for p, t in items]
    total = sum(t for _, t in items)
    if total == 1:
        bottom, mass, doubt = steps[0].first, np.append(steps[0].mass, 0.0), np.zeros(1)
    else:
        bottom, mass, doubt = _composed(items, steps, plan, side, delta)
    log_top = sum(t * s.log_moment(plan.top_order) for s, (_, t) in zip(steps, items, strict=True))
    top = (bottom + mass.size - 1) * plan.width
    outside = sum(t * s.outside for s, (_, t) in zip(steps, items, strict=True))
    outside += math.exp(min(log_top - plan.top_order * top, 0.0)) if total > 1 else 0.0
    value = np.minimum(_hockey(mass, plan.width) * (1.0 + 1e-12) + doubt + outside, 1.0)
    drift = 4e-15 * sum(t * p.rate for p, t in items) + 1e-14
    log_missing = _log_missing(items, steps, delta, log_top, plan) if side == FORWARD else math.inf
    return Profile(bottom, plan.width, value, log_missing, drift)


def _composed(items: _Items, steps: list[_Step], plan: _Plan, side: int, delta: float) -> tuple[int, Array, Array]:
    """Lowest index of the window, the masses from there on, and a bound on what their errors add to H there.

    The window lies on a circle: what is above it comes in at its bottom, where it only adds, and is accounted for as
    lost by the caller; what is below comes in at its top, where it adds no more than e^-36 of the tilted mass.
    """
    bottom = math.floor(plan.bottom / plan.width)
    longest = max(s.mass.size for s in steps)
    size = _round_up(max(math.ceil(plan.top / plan.width) - bottom + 2, longest, 16))
    first = sum(t * s.first for s, (_, t) in zip(steps, items, strict=True))
    log_mass = sum(t * s.log_moment(plan.tilt) for s, (_, t) in zip(steps, items, strict=True))
    tilted, error = _compose(items, plan, side, delta, size)
    losses = (bottom + np.arange(size)) * plan.width
    untilt = np.exp(np.clip(log_mass - plan.tilt * losses, -745.0, 700.0))
    mass = np.minimum(np.roll(tilted, (first - bottom) % size) * untilt, 1.0)
    return bottom, mass, error * _weight_norm(plan) * untilt


def _weight_norm(plan: _Plan) -> float:
    """Upper bound on the 2-norm of e^{-k tilt width} (1 - e^{-k width}), k >= 1: of the weights with which H takes the
    tilted masses above a point, over e^{-tilt loss} there. 1 - e^{-y} is at most y and at most 1."""
    decay = math.exp(-2.0 * plan.tilt * plan.width)
    rest = -math.expm1(-2.0 * plan.tilt * plan.width)
    return math.sqrt(min(plan.width**2 * decay * (1.0 + decay) / rest**3, decay / rest))


def _hockey(mass: Array, width: float) -> Array:
    """H_i = sum_{j > i} mass_j (1 - e^{-(j - i) width}), by two recurrences of positive terms."""
    fall = math.exp(-width)
    above = lfilter([1.0], [1.0, -fall], mass[::-1])  # sum_{j >= i} mass_j e^{-(j - i) width}, from the top down
    return np.concatenate([[0.0], np.cumsum(above[:-1])])[::-1] * -math.expm1(-width)


def _round_up(size: int) -> int:
    """To a quarter of a power of two: quick to transform, and neighbouring queries share their transforms."""
    quarter = 1 << max(size.bit_length() - 3, 0)
    return -(-size // quarter) * quarter


@dataclass(frozen=True)
class _Plan:
    """Where the grid lies, and the tilt of the masses (which are those of P1 forward, of P0 in reverse)."""

    width: float
    bottom: float
    top: float
    tilt: float
    top_order: float


def _plan(items: _Items, delta: float, side: int, width_delta: float) -> _Plan:
    """Chernoff's bounds over the orders of :data:`_ORDERS`."""
    up: Array = np.sum([t * _moments(p)[0] for p, t in items], axis=0)  # log E_{P0}[R^{1 + a}] = log E_{P1}[R^a]
    down: Array = np.sum([t * _moments(p)[1] for p, t in items], axis=0)  # log E_{P0}[R^{-a}]
    deep = _DEEP - math.log(delta)
    width = _width(up, down, _DEEP - math.log(width_delta))
    rising, falling = (up, down) if side == FORWARD else (down, up)
    # Orders that the grid resolves, as its own moments are near these up to there; e^{order width} stays a double.
    last = max(int(np.searchsorted(_ORDERS, 0.25 / width)), 2)
    orders, rising, falling = _ORDERS[: last + 1], rising[: last + 1], falling[: last + 1]
    # the tilted law is E[e^{tilt loss}; loss]: near 0.7 of the order of the smallest epsilon, so that single losses at
    # the top of the grid do not carry it
    best = int(np.argmin((rising - math.log(delta) - np.log1p(orders)) / orders - np.log1p(1.0 / orders)))
    chosen = max(min(best, last) - 1, 0)
    tilt, here = float(orders[chosen]), float(rising[chosen])
    tops = (rising + deep) / orders
    top_at = int(np.argmin(tops))
    higher, lower = slice(chosen + 1, None), slice(None, chosen)
    tilted_top = float(np.min((rising[higher] - here + _DEEP) / (orders[higher] - tilt)))
    # what the tilted law has below, and, since log-moments are nonnegative, what the law itself has
    bottom = -float(np.min((falling + deep) / (orders if side == FORWARD else 1.0 + orders)))
    if chosen:
        bottom = max(bottom, float(np.max((here - rising[lower] - _DEEP) / (tilt - orders[lower]))))
    top = max(float(tops[top_at]), tilted_top) + 2.0 * width
    return _Plan(width, bottom - 2.0 * width, top, tilt, float(orders[top_at]))


def _width(up: Array, down: Array, deep: float) -> float:
    """A power of two, about 1 / _POINTS of the window: nondecreasing in the log-moments and in ``deep``.

    The range of losses is mu^2 + 17 mu where they are normal, of which the window holds about 20 mu. Far out it is
    wider, in case rare large losses make up the range.
    """
    reach = float(np.min((up + deep) / _ORDERS)) + float(np.min((down + deep) / _ORDERS))
    normal = 10.0 * (math.sqrt(289.0 + 4.0 * min(reach, 1e3)) - 17.0)
    window = normal * (min(max(reach, 1e3), 1e6) / 1e3) ** 0.8 * (max(reach, 1e6) / 1e6)
    return 2.0 ** math.floor(math.log2(window / _POINTS))


@lru_cache(maxsize=256)
def _moments(pair: Pair) -> tuple[Array, Array]:
    """log E_{P1}[A^a] and log E_{P0}[A^{-a}] at the orders a of :data:`_ORDERS`, by quadrature: they choose the grid
    and prove nothing. inf beyond what double precision holds."""
    if pair.laplace:
        loss, log_mass = _laplace_nodes(pair.parameter)
        log_a = _log_sampled(loss, pair.rate)
        up = _log_sum(log_mass + (1.0 + _ORDERS[:, None]) * log_a)
        return np.maximum(up, 0.0), np.maximum(_log_sum(log_mass - _ORDERS[:, None] * log_a), 0.0)
    mu = pair.parameter
    known = 60.0 / mu - 1.0 > _ORDERS
    up, down = np.full(_ORDERS.size, np.inf), np.full(_ORDERS.size, np.inf)
    if pair.rate == 1.0:  # log E[r^{1 + a}] = log E[r^{-a}]
        up[known] = down[known] = _ORDERS[known] * (_ORDERS[known] + 1.0) * 0.5 * mu * mu
        return up, down
    spacing = 0.1 if mu < 4.0 else 0.05
    z = np.arange(-40.0, 72.0, spacing)
    log_mass = -0.5 * z * z + math.log(spacing / math.sqrt(2.0 * math.pi))
    log_a = _log_sampled(mu * z - 0.5 * mu * mu, pair.rate)
    low, high = z < 12.0, z > -12.0  # where negative powers have their weight, and positive ones
    up[known] = _log_sum(log_mass[high] + (1.0 + _ORDERS[known, None]) * log_a[high])
    down = _log_sum(log_mass[low] - _ORDERS[:, None] * log_a[low])
    return np.maximum(up, 0.0), np.maximum(down, 0.0)


def _laplace_nodes(x: float) -> tuple[Array, Array]:
    """Log ratios of one Laplace coordinate and the logs of their masses under the unshifted distribution."""
    inner = np.log(0.25 * x * _WEIGHTS) - 0.5 * x * (_NODES + 1.0)
    return np.concatenate([[-x], x * _NODES, [x]]), np.concatenate([[-math.log(2.0)], inner, [-math.log(2.0) - x]])


def _log_sum(exponents: Array) -> Array:
    """log of the sum of e^exponents over the last axis."""
    highest = exponents.max(axis=1)
    result: Array = highest + np.log(np.exp(np.maximum(exponents - highest[:, None], -745.0)).sum(axis=1))
    return result


def _log_sampled(loss: Array, rate: float) -> Array:
    """log(1 - q + q e^loss), elementwise."""
    if rate == 1.0:
        return loss
    near = np.log1p(rate * np.expm1(np.minimum(loss, 1.0)))
    far = loss + np.log(rate + (1.0 - rate) * np.exp(-np.maximum(loss, 1.0)))
    return np.where(loss < 1.0, near, far)


def _reach(steps: int, delta: float) -> float:
    """How many standard deviations of a step are kept: beyond lies no more than e^-deep / ``steps``. In quarters."""
    return math.ceil(4.0 * math.sqrt(2.0 * (_DEEP - math.log(delta) + math.log(steps)))) / 4.0


@dataclass(frozen=True)
class _Step:
    """Masses of one step under P1 (P0 in reverse) at the losses (first + i) width, negated in reverse.

    Attributes:
        outside: bound on the mass that is left out.
    """

    first: int
    width: float
    mass: Array
    outside: float

    def losses(self) -> Array:
        return np.arange(self.first, self.first + self.mass.size, dtype=np.float64) * self.width

    def log_moment(self, order: float) -> float:
        """log of the sum of mass e^{order loss}."""
        exponent = order * self.losses()
        highest = float(max(exponent[0], exponent[-1]))
        if highest < 300.0:
            return math.log(float(self.mass @ np.exp(exponent)))
        with np.errstate(divide="ignore"):
            return float(np.logaddexp.reduce(np.log(self.mass) + exponent))


@lru_cache(maxsize=192)
def _step(pair: Pair, width: float, reach: float, side: int) -> _Step:
    """One step on the grid. What lies beyond ``reach`` deviations on either side of both distributions is left out."""
    q = pair.rate
    first, last, outside = _ends(pair, width, reach, side)
    losses: Array = np.arange(first, last + 1, dtype=np.float64) * width
    mass, shifted = _cells(pair, losses)  # of each cell, under P0 and under the shifted distribution
    # the upper end of a cell gets the mass that keeps the mean: (E[A; cell] e^-low - mass) / (e^width - 1)
    low = losses[:-1]
    near = (q * (shifted - mass) - mass * np.expm1(np.minimum(low, 1.0))) * np.exp(-np.minimum(low, 1.0))
    far = ((1.0 - q) * mass + q * shifted) * np.exp(-np.maximum(low, 0.0)) - mass
    upper = np.clip(np.where(low < 1.0, near, far) / math.expm1(width), 0.0, mass)
    points = np.zeros(losses.size)
    points[1:] += upper
    points[:-1] += mass - upper
    if side == FORWARD:
        points *= np.exp(losses)
    else:
        points, first = points[::-1], -last
    points = np.ascontiguousarray(points)
    points.setflags(write=False)
    return _Step(first, width, points, outside)


def _ends(pair: Pair, width: float, reach: float, side: int) -> tuple[int, int, float]:
    """First and last point of the grid of a step, and a bound on the mass outside them."""
    x, q = pair.parameter, pair.rate
    if pair.laplace:
        low, high = (float(v) for v in _log_sampled(np.array([-x, x]), q))
        return math.floor(low / width) - 1, math.ceil(high / width) + 1, 0.0
    bounds = np.array([max(-reach, _LOWEST), min(x + reach, _HIGHEST)])
    low, high = (float(v) for v in _log_sampled(x * bounds - 0.5 * x * x, q))
    above = (
        float(q * ndtr(x - bounds[1]) + (1.0 - q) * ndtr(-bounds[1])) if side == FORWARD else float(ndtr(-bounds[1]))
    )
    if q < 1.0:  # all of the losses above log(1 - q)
        return math.floor(math.log1p(-q) / width) - 1, math.ceil(high / width), above
    below = float(ndtr(bounds[0] - x)) if side == FORWARD else float(ndtr(bounds[0]))
    return math.floor(low / width), math.ceil(high / width), above + below


def _cells(pair: Pair, losses: Array) -> tuple[Array, Array]:
    """Probabilities between neighbouring losses log A, under the unshifted and the shifted distribution."""
    q, x = pair.rate, pair.parameter
    if q == 1.0:
        r = losses
    else:
        with np.errstate(divide="ignore"):
            near = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / q, -1.0))
        r = np.where(losses < 1.0, near, losses - math.log(q) + np.log1p(-(1.0 - q) * np.exp(-np.maximum(losses, 1.0))))
    if pair.laplace:
        return _laplace_cells(r, x)
    z = (r + 0.5 * x * x) / x
    return _normal_cells(z), _normal_cells(z - x)


def _normal_cells(z: Array) -> Array:
    """Normal probabilities between neighbouring points, each difference taken in its smaller tail."""
    tail = ndtr(-np.abs(z))
    left = np.where(z > 0.0, 1.0 - tail, tail)
    inner = np.where(z[:-1] > 0.0, tail[:-1] - tail[1:], left[1:] - left[:-1])
    return np.maximum(inner, 0.0)


def _laplace_cells(r: Array, x: float) -> tuple[Array, Array]:
    """Log ratio of Lap(x, 1) over Lap(0, 1): atoms at -x and x, between them the distribution function is exponential.
    Under the second 1 - e^{-(r + x)/2} / 2, under the first e^{(r - x)/2} / 2."""
    inside = np.clip(r, -x, x)
    survival = np.where(r < -x, 1.0, np.where(r >= x, 0.0, 0.5 * np.exp(-0.5 * (inside + x))))
    below = np.where(r < -x, 0.0, np.where(r >= x, 1.0, 0.5 * np.exp(0.5 * (inside - x))))
    return survival[:-1] - survival[1:], below[1:] - below[:-1]


@dataclass(frozen=True)
class _Product:
    """The transform of composed steps at the frequencies where it is not negligible: few, where there are many steps.

    Attributes:
        relative: sum(T / |phi|) over steps, by which an error of each phi enters, at the same frequencies.
        norms: sum(T |x|_2) over the tilted masses x of the steps.
    """

    alive: npt.NDArray[np.int64]
    spectrum: npt.NDArray[np.complex128]
    relative: Array
    norms: float


def _compose(items: _Items, plan: _Plan, side: int, delta: float, size: int) -> tuple[Array, float]:
    """Tilted masses of the composition at ``size`` points round a circle from the sum of the first losses on, and a
    bound on the 2-norm of their errors.

    A transform of x is off by at most eta |x|_1 at a point and by eta |x|_2 in 2-norm, if Parseval's factor is taken
    out (Higham 2002, Theorem 24.2); the product by |product| sum(T / |phi|) times the first, or by sum(T) times the
    second.
    """
    total = sum(t for _, t in items)
    before = _product(items[:-1], plan.tilt, plan.width, side, delta, size)  # kept while the last kind varies
    product = _times(before, items[-1], plan.tilt, plan.width, side, delta, size)
    whole = np.zeros(size // 2 + 1, dtype=np.complex128)
    whole[product.alive] = product.spectrum
    result = fft.irfft(whole, size)
    eta = _ULP * (8.0 + 4.0 * math.log2(size))
    pointwise = np.minimum(np.abs(product.spectrum) * product.relative, total)
    forth = eta * min(math.sqrt(2.0 * float(pointwise @ pointwise) / size), product.norms)
    back = (eta + 8.0 * _ULP * total) * float(np.linalg.norm(result))
    rounding = 1.0 + 1e-11 + 4e-15 * total  # of the tilted masses of the steps, and of the tilt taken back
    return np.maximum(result, 0.0) * rounding, forth + back + size * _NEGLIGIBLE


@lru_cache(maxsize=8)
def _product(items: _Items, tilt: float, width: float, side: int, delta: float, size: int) -> _Product:
    count = size // 2 + 1
    product = _Product(np.arange(count), np.ones(count, dtype=np.complex128), np.zeros(count), 0.0)
    for item in items:
        product = _times(product, item, tilt, width, side, delta, size)
    return product


def _times(
    product: _Product, item: tuple[Pair, int], tilt: float, width: float, side: int, delta: float, size: int
) -> _Product:
    """``product`` and ``item[1]`` more steps of ``item[0]``."""
    pair, steps = item
    tilted = _tilted(_step(pair, width, _reach(steps, delta), side), tilt)
    phi = fft.rfft(tilted, size)[product.alive]
    spectrum = product.spectrum * _power(phi, steps)
    relative = product.relative + steps / np.maximum(np.abs(phi), 1e-200)
    norms = product.norms + steps * float(np.linalg.norm(tilted))
    kept = np.abs(spectrum) > _NEGLIGIBLE
    if kept.mean() > 0.7:
        return _Product(product.alive, spectrum, relative, norms)
    return _Product(product.alive[kept], spectrum[kept], relative[kept], norms)


def _tilted(step: _Step, tilt: float) -> Array:
    """The masses times e^{tilt loss}, normalised."""
    exponent = tilt * step.losses()
    shift = step.log_moment(tilt)
    if max(float(exponent[0]), float(exponent[-1])) < 300.0:
        result: Array = step.mass * np.exp(exponent) * math.exp(-shift)
        return result
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.log(step.mass) + exponent - shift))


def _power(phi: npt.NDArray[np.complex128], steps: int) -> npt.NDArray[np.complex128]:
    """phi^steps by repeated squaring."""
    result = None
    while True:
        if steps & 1:
            result = phi if result is None else result * phi
        steps >>= 1
        if not steps:
            break
        phi = phi * phi
    assert result is not None
    return result


def _log_missing(items: _Items, steps: list[_Step], delta: float, log_top: float, plan: _Plan) -> float:
    """log of a bound on E[R^s], s = TAIL_ORDER, over ratios above the top of the grid and steps beyond their reach."""
    s = TAIL_ORDER
    if plan.top_order + 1.0 <= s:
        return math.inf
    each = [step.log_moment(s - 1.0) for step in steps]
    whole = sum(t * moment for moment, (_, t) in zip(each, items, strict=True))
    logs = [log_top - (plan.top_order + 1.0 - s) * plan.top]
    logs += [
        math.log(t) + whole - moment + _log_tail(p, min(p.parameter + _reach(t, delta), _HIGHEST))
        for moment, (p, t) in zip(each, items, strict=True)
        if not p.laplace
    ]
    # the moments of the other steps leave out their own tails, each within the tolerance: hence the factor e
    return float(np.logaddexp.reduce(logs)) + 1.0


def _log_tail(pair: Pair, reach: float) -> float:
    """Upper bound on log E[A^s; z > reach], s = TAIL_ORDER: A <= 1 + q r, (1 + v)^s <= 2^{s-1} (1 + v^s), and the
    power s of r shifts the normal by s mu."""
    s, q, mu = TAIL_ORDER, pair.rate, pair.parameter
    power = s * math.log(q) + 0.5 * s * (s - 1.0) * mu * mu + float(log_ndtr(s * mu - reach))
    return (s - 1.0) * math.log(2.0) + float(np.logaddexp(float(log_ndtr(-reach)), power))
