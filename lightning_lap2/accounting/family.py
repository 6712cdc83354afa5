"""What is known of each mechanism: one record, from which clipping, noise, accounting and reports are made.

The library's own are in :mod:`lightning_lap2.accounting.families`; docs/extending.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_lap2._registry import Registry
from lightning_lap2.choices import Bound, Norm

if TYPE_CHECKING:
    from lightning_lap2.accounting.composition import Composition
    from lightning_lap2.accounting.routes.route import Route

Array = npt.NDArray[np.float64]
Blocks = Sequence[tuple[float, float]]
"""(n, rho) of vectors that are clipped and noised by themselves: n coordinates, rho = C / scale."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The law of the noise on one coordinate: symmetric about 0, i.i.d.

    Attributes:
        name: what noise sources call it.
        scale_name: what its scale is, for people.
        standard_deviation: of noise of scale 1.
        log_density: of noise of scale 1, elementwise, up to a constant.
        magnitude: ``|Z|`` of scale 1 as a function of its survival probability t, elementwise on float64 tensors of
            torch with entries in (0, 1]; it may work in place. ``None``: ``lightning_lap2.noise`` has a draw of its
            own. ``lightning_lap2.noise.quantile`` says what it must obey, and checks it.
    """

    name: str
    scale_name: str
    standard_deviation: float
    log_density: Callable[[Array], Array]
    magnitude: Callable[[Any], Any] | None = None


def unbounded(n: float, rho: float) -> float:
    """The largest loss where the likelihood ratio has no bound."""
    return math.inf


def no_routes(composition: Composition) -> tuple[Callable[[Composition], Route], ...]:
    """No routes beside those that follow from the other fields."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of mechanism. Whatever is stated here is believed: docs/guarantee.md has the proofs of the library's own.

    Attributes:
        name: what the setting ``mechanism`` calls it.
        norm: in which examples are clipped to C.
        noise: of each coordinate, of scale b = m C.
        moments: upper bounds on log E[ratio^k] of one release *without sampling*, at real orders k >= 1, for every
            gradient that clipping allows: ``(orders [K], blocks) -> [K]``. Sampling follows (docs/guarantee.md,
            section 3), since the noise is symmetric.
        largest_loss: upper bound on the log likelihood ratio of one block: ``(n, rho) -> x``, or ``inf``.
        gdp: mu of a Gaussian pair that dominates one block, ``(n, rho) -> mu``; ``None``: none is known. For the routes
            by domination and by total variation.
        routes: further routes that are valid for it, the quick ones first.
        bounds: that are statements about it.
        layers_cost: whether parts that are clipped by themselves cost more than one vector does.
    """

    name: str
    norm: Norm
    noise: Noise
    moments: Callable[[Array, Blocks], Array]
    largest_loss: Callable[[float, float], float] = unbounded
    gdp: Callable[[float, float], float] | None = None
    routes: Callable[[Composition], tuple[Callable[[Composition], Route], ...]] = no_routes
    bounds: tuple[Bound, ...] = ("tight",)
    layers_cost: bool = True


FAMILIES: Registry[Family] = Registry("mechanism", {}, on_trust=True)


def family_of(mechanism: object) -> Family:
    """What is known of a mechanism.

    Raises:
        TypeError, ValueError: nothing is; the message has the names there are.
    """
    return FAMILIES.chosen("mechanism", mechanism)


def register_mechanism(family: Family) -> None:
    """Makes ``mechanism=family.name`` known to the callback, the accountant and the audit, in this process.

    Nothing here can check what the family states: a mechanism that is charged too little looks like any other. The
    report of every run in this process names it.

    Raises:
        TypeError, ValueError: its name, or that of its noise, is taken.
    """
    known = {other.noise.name: other.noise for other in FAMILIES.values()}
    if known.get(family.noise.name, family.noise) is not family.noise:
        raise ValueError(f"noise {family.noise.name!r} is known already: choose another name")
    FAMILIES.add(family.name, family)


def noise_of(distribution: str) -> Noise:
    """The law of noise of this name.

    Raises:
        ValueError: no mechanism has such noise.
    """
    known = {family.noise.name: family.noise for family in FAMILIES.values()}
    if distribution not in known:
        raise ValueError(f"distribution must be one of {', '.join(map(repr, known))}, got {distribution!r}")
    return known[distribution]
