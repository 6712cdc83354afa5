"""The names that settings choose among, each list once.

Code that decides among them does so by ``match`` and ends in ``assert_never``: a name that is added here is then
reported by mypy wherever something must be done for it. Mechanisms and clippings can be registered besides
(docs/extending.md); what differs among mechanisms is in one record,
:class:`~lightning_lap2.accounting.family.Family`.
"""

from __future__ import annotations

from typing import Literal, get_args

from typing_extensions import assert_never

Norm = Literal["l1", "l2"]
MechanismName = Literal["laplace", "gaussian", "laplace_l1"]
Bound = Literal["tight", "joint", "published"]
Sampling = Literal["poisson", "none"]
ClippingName = Literal["flat", "automatic", "per_layer", "adaptive"]
EngineName = Literal["auto", "ghost", "vmap", "loop"]
NoiseSourceName = Literal["auto", "aes", "torch"]
OnRecordError = Literal["raise", "zero"]

NORMS: tuple[Norm, ...] = get_args(Norm)
MECHANISMS: tuple[MechanismName, ...] = get_args(MechanismName)
BOUNDS: tuple[Bound, ...] = get_args(Bound)
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
CLIPPINGS: tuple[ClippingName, ...] = get_args(ClippingName)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
NOISE_SOURCES: tuple[NoiseSourceName, ...] = get_args(NoiseSourceName)
ON_RECORD_ERROR: tuple[OnRecordError, ...] = get_args(OnRecordError)


def order(norm: Norm) -> int:
    """p of the l_p norm."""
    match norm:
        case "l1":
            return 1
        case "l2":
            return 2
        case _:
            assert_never(norm)
