"""The library's own mechanisms: the table of docs/guarantee.md, with what is proven of each."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lightning_lap2.accounting.composition import Composition
from lightning_lap2.accounting.family import FAMILIES, Family, Noise
from lightning_lap2.accounting.routes.comparison import Comparison
from lightning_lap2.accounting.routes.domination import Domination, SummedDomination, SummedVariation
from lightning_lap2.accounting.routes.falling import Falling
from lightning_lap2.accounting.routes.moments import even_spread_table, gaussian_table, single_coordinate_table
from lightning_lap2.accounting.routes.pairs import even_spread_gdp, laplace_gdp
from lightning_lap2.accounting.routes.route import Route
from lightning_lap2.choices import BOUNDS

LAPLACE_NOISE = Noise(
    name="laplace",
    scale_name="b of Laplace noise",
    standard_deviation=math.sqrt(2.0),
    log_density=lambda y: -np.abs(y),
)
GAUSSIAN_NOISE = Noise(
    name="gaussian",
    scale_name="sigma of Gaussian noise",
    standard_deviation=1.0,
    log_density=lambda y: -0.5 * y * y,
)


def _l1_routes(composition: Composition) -> tuple[Callable[[Composition], Route], ...]:
    if all(len(release.blocks) == 1 for release, _ in composition.noisy):
        return SummedVariation, SummedDomination  # the last is exact
    return SummedVariation, Falling, Comparison, SummedDomination, Domination


LAPLACE = Family(
    name="laplace",
    norm="l2",
    noise=LAPLACE_NOISE,
    moments=even_spread_table,
    largest_loss=lambda n, rho: math.sqrt(n) * rho,
    gdp=even_spread_gdp,
    routes=lambda composition: (Falling, Comparison, Domination),
    bounds=BOUNDS,
)
GAUSSIAN = Family(
    name="gaussian",
    norm="l2",
    noise=GAUSSIAN_NOISE,
    moments=gaussian_table,
    gdp=lambda n, rho: rho,
    routes=lambda composition: (Domination,),
    layers_cost=False,  # the squared norms of the parts add up to C^2
)
LAPLACE_L1 = Family(
    name="laplace_l1",
    norm="l1",
    noise=LAPLACE_NOISE,
    moments=single_coordinate_table,
    largest_loss=lambda n, rho: rho,
    gdp=lambda n, rho: laplace_gdp(rho),
    routes=_l1_routes,
)

FAMILIES.own({family.name: family for family in (LAPLACE, GAUSSIAN, LAPLACE_L1)})
