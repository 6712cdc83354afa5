r"""Pairs of distributions that stand for one step: Gaussian or Laplace, sampled by Poisson.

Three Gaussian pairs serve a Laplace step with l2 clipping, each for other test functions (docs/guarantee.md):

* :func:`dominating_pair`: every convex function of the likelihood ratio (Theorem 4). The largest parameter.
* :func:`compared_pair`: the class K (Theorem 6), at equal Bhattacharyya coefficient. The smallest.
* :func:`equal_pair`: sigma = b, mu = rho, for functions that may fall again (Theorem 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import log_ndtr
from typing_extensions import assert_never

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.family import family_of
from lightning_lap2.accounting.release import Release

MIN_RATE, MIN_PARAMETER = 1e-12, 1e-7
"""Below these the losses of one step drown in the rounding of its probabilities: they are raised, which costs more."""
_FULL_RATE = 1.0 - 1e-9


@dataclass(frozen=True)
class Pair:
    """N(0, 1) against N(parameter, 1), or Laplace likewise, sampled at ``rate``."""

    parameter: float
    rate: float
    laplace: bool = False

    @property
    def total_variation(self) -> float:
        """Upper bound on the total variation distance of one step."""
        far = -math.expm1(-0.5 * self.parameter) if self.laplace else math.erf(self.parameter / math.sqrt(8.0))
        return self.rate * far * (1.0 + 1e-15)


def paired(composition: Composition, pair_of: Callable[[Release, str], Pair]) -> dict[Pair, int]:
    """The noisy releases as pairs, each with its number of steps."""
    counts: dict[Pair, int] = {}
    for release, steps in composition.noisy:
        pair = pair_of(release, composition.mechanism)
        counts[pair] = counts.get(pair, 0) + steps
    return counts


def merged(counts: Mapping[Pair, int]) -> dict[Pair, int]:
    """Steps as they are composed: unsampled Gaussian ones are a single one, mu adding in squares; rates and parameters
    too small to be resolved are raised, rates within 1e-9 of 1 are 1. Never costs less."""
    result: dict[Pair, int] = {}
    square = 0.0
    for pair, steps in counts.items():
        rate = 1.0 if pair.rate > _FULL_RATE else max(pair.rate, MIN_RATE)
        raised = Pair(max(pair.parameter, MIN_PARAMETER), rate, pair.laplace)
        if rate == 1.0 and not pair.laplace:
            square += steps * (pair.parameter * pair.parameter)
        else:
            result[raised] = result.get(raised, 0) + steps
    if square > 0.0:
        result = {Pair(max(math.sqrt(square) * (1.0 + 1e-15), MIN_PARAMETER), 1.0): 1, **result}
    return result


def dominating_pair(release: Release, mechanism: str) -> Pair:
    """The Gaussian pair that dominates a release that is neither free nor bare. Blocks add in squares of mu."""
    gdp = family_of(mechanism).gdp
    if gdp is None:
        raise ValueError(f"mechanism={mechanism!r} states no Gaussian pair (Family.gdp): routes by domination need one")
    parameters = [gdp(n, rho) for n, rho in release.blocks]
    return Pair(math.hypot(*parameters) * (1.0 + 1e-15), release.sample_rate)


def summed_pair(release: Release, mechanism: str) -> Pair:
    """The Laplace pair that dominates a release with l1 clipping: one coordinate with the shifts of all blocks."""
    return Pair(math.fsum(rho for _, rho in release.blocks) * (1.0 + 1e-15), release.sample_rate, laplace=True)


def compared_pair(release: Release, mechanism: str) -> Pair:
    """The Gaussian pair with which the third route compares a release of Laplace noise; blocks add in squares.

    Under l1 clipping a single coordinate of each block is the worst, n = 1: 4x - 8 log(1 + x/2) is convex in x and 0
    at 0, hence superadditive (guarantee.md, section 7, has the statement for every convex function).
    """
    match family_of(mechanism).norm:
        case "l1":
            sizes = [(1.0, rho) for _, rho in release.blocks]
        case "l2":
            sizes = list(release.blocks)
        case norm:
            assert_never(norm)
    parameter = math.hypot(*(comparable_parameter(n, rho) for n, rho in sizes)) * (1.0 + 1e-15)
    return Pair(parameter, release.sample_rate)


def equal_pair(release: Release, mechanism: str) -> Pair:
    """The Gaussian pair of the fourth route: mu = rho, whatever n; blocks add in squares."""
    return Pair(math.hypot(*(rho for _, rho in release.blocks)) * (1.0 + 1e-15), release.sample_rate)


def laplace_gdp(shift: float) -> float:
    r"""Upper bound within 1e-12 of mu*(x), the smallest mu for which Lap(0, 1) against Lap(x, 1) is mu-GDP.

    mu* = 2 y where x = 2 H(y) and H(y) = -log(2 sf(y)) is the integrated hazard of the normal. H is convex and
    increasing, so Newton's method from above stays above. It starts from the tangent H(y) >= sqrt(2/pi) y
    (mu* <= sqrt(pi/2) x), or from H(y) >= y^2 / 2.
    """
    if shift <= 1e-10:
        return math.sqrt(math.pi / 2.0) * shift
    if shift > 1e4:
        return 2.0 * math.sqrt(shift)
    y = min(math.sqrt(math.pi / 8.0) * shift, math.sqrt(shift))
    for _ in range(60):
        log_sf = float(log_ndtr(-y))
        hazard = math.exp(-0.5 * y * y - 0.5 * math.log(2.0 * math.pi) - log_sf)
        integrated = -math.log1p(-math.erf(y / math.sqrt(2.0))) if y < 1.0 else -log_sf - math.log(2.0)
        step = (integrated - 0.5 * shift) / hazard
        y -= step
        if step <= 1e-14 * y:
            break
    return 2.0 * y * (1.0 + 1e-12)


@lru_cache(maxsize=1024)
def even_spread_gdp(n: float, rho: float) -> float:
    if math.isinf(n):
        return math.sqrt(math.pi / 2.0) * rho
    root = math.sqrt(n)
    return min(root * laplace_gdp(rho / root), math.sqrt(math.pi / 2.0) * rho * (1.0 + 1e-15))


@lru_cache(maxsize=1024)
def comparable_parameter(n: float, rho: float) -> float:
    r"""mu = sqrt(n (4x - 8 log(1 + x/2))), x = rho / sqrt n: the Gaussian step of equal Bhattacharyya coefficient.

    Args:
        n: coordinates, >= 1 or infinite.
        rho: C / b, the largest shift.
    """
    x = rho / math.sqrt(n)
    if x < 0.1:  # mu^2 / rho^2 = sum_k (-1)^k 2 (x/2)^k / (k + 2), where the difference would cancel
        series = 0.0
        for k in range(13, -1, -1):
            series = 2.0 / (k + 2) - 0.5 * x * series
        return rho * min(1.0, math.sqrt(series) * (1.0 + 1e-15))
    rounding = 1.0 + 4e-15 * (1.0 + 1.0 / x)
    return min(rho, math.sqrt(n * (4.0 * x - 8.0 * math.log1p(0.5 * x))) * rounding)


def gdp_delta(mu: float, eps: float) -> float:
    r"""delta(eps) of mu-GDP, :math:`\Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)`.

    Taken as the first term times 1 - exp(difference of logs), the difference widened by its rounding error.
    """
    if mu == 0.0 or eps > 1e100 * mu:
        return 0.0
    first = float(log_ndtr(0.5 * mu - eps / mu))
    second = eps + float(log_ndtr(-0.5 * mu - eps / mu))
    gap = second - first - 4e-15 * (1.0 + abs(first) + abs(second) + eps)
    return min(1.0, math.exp(first) * -math.expm1(gap) * (1.0 + 1e-15)) if gap < 0.0 else 0.0


def gdp_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 with ``gdp_delta(mu, eps) <= delta``, rounded up, for 0 < delta < 1."""
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    if mu > 1e100:
        return math.inf
    low, high = 0.0, mu
    while gdp_delta(mu, high) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if gdp_delta(mu, middle) > delta else (low, middle)
    return high
