"""What one step of the mechanism releases: a frozen event, apart from any accountant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting.family import family_of
from lightning_lap2.choices import BOUNDS, Bound

_LEAST = 5e-324


class UnsoundBoundWarning(UserWarning):
    """The bound asked for reproduces a published formula that does not bound the privacy loss."""


def known_pair(mechanism: object, bound: object) -> tuple[str, Bound]:
    """Return the (mechanism, bound) pair if it is supported, else raise.

    Raises:
        TypeError: where either is not a string.
        ValueError: where either is unknown, or the two do not go together: ``"joint"`` and ``"published"``
            are statements about Laplace noise with l2 clipping only.
    """
    family, kind = family_of(mechanism), _validate.choice("bound", bound, BOUNDS)
    if kind not in family.bounds:
        legal = " or ".join(map(repr, family.bounds))
        raise ValueError(f"bound must be {legal} where mechanism={family.name!r}, got {kind!r}")
    return family.name, kind


def warn_if_unsound(bound: str, stacklevel: int = 3) -> None:
    """Warn on every use of ``bound="published"``."""
    if bound == "published":
        warnings.warn(
            'bound="published" reproduces Theorem III.7 of the Lap2 paper as printed; it is not a valid bound on '
            'the privacy loss (docs/guarantee.md has the counterexample). Use bound="tight".',
            UnsoundBoundWarning,
            stacklevel=stacklevel,
        )


@dataclass(frozen=True)
class Release:
    """One noisy sum: every example enters with probability ``sample_rate``, one coin for all coordinates.

    Args:
        noise_multiplier: m = scale / C, in [0, inf]: b / C for Laplace, sigma / C for Gaussian noise, where C
            bounds the l2 norm of an example's contribution (the l1 norm for mechanism ``"laplace_l1"``).
        sample_rate: q in [0, 1]; 1 means no sampling and no amplification.
        dimension: n, the number of coordinates, all of which are noised; ``math.inf`` is valid and pessimistic.
        extra_blocks: (dimension, noise multiplier) of further vectors released under the same coin, each clipped
            and noised by itself: the noisy count of adaptive clipping.
        layers: (dimension, share, count) of the parts that the vector itself is clipped in: ``count`` parts of
            ``dimension`` coordinates, each to the norm share * C. Their multipliers are m / share, so they scale with
            m. Empty: one part, clipped to C.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.
    """

    noise_multiplier: float
    sample_rate: float
    dimension: float
    extra_blocks: Sequence[tuple[float, float]] = ()
    layers: Sequence[tuple[float, float, int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _validate.non_negative("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "sample_rate", _validate.probability("sample_rate", self.sample_rate))
        object.__setattr__(self, "dimension", _validate.dimension("dimension", self.dimension))
        object.__setattr__(self, "extra_blocks", _extra_blocks(self.extra_blocks))
        object.__setattr__(self, "layers", _layers(self.layers, self.dimension))

    @property
    def blocks(self) -> tuple[tuple[float, float], ...]:
        """(n_l, rho_l) of every block that costs anything, with rho = C / scale = 1 / m; rho may be ``inf``."""
        own = [(n, share) for n, share, count in self.layers for _ in range(count)] or [(self.dimension, 1.0)]
        triples = [(n, share, self.noise_multiplier) for n, share in own] + [(n, 1.0, m) for n, m in self.extra_blocks]
        # a cost that underflows is still a cost
        return tuple((n, max(share * _inverse(m), _LEAST)) for n, share, m in triples if n > 0.0 and m < math.inf)

    @property
    def is_free(self) -> bool:
        """Whether the output does not depend on the example at all: q = 0, n = 0 or m = inf."""
        return self.sample_rate == 0.0 or not self.blocks

    @property
    def is_bare(self) -> bool:
        """Whether some block carries no noise: an example that is drawn is revealed."""
        return self.sample_rate > 0.0 and any(rho == math.inf for _, rho in self.blocks)

    def with_multiplier(self, noise_multiplier: float) -> Release:
        """The same release with another noise multiplier m; its extra blocks keep theirs."""
        return replace(self, noise_multiplier=noise_multiplier)

    def without_extra_blocks(self) -> Release:
        """The vector alone."""
        return replace(self, extra_blocks=())

    def to_dict(self) -> dict[str, Any]:
        """Plain Python numbers, strings and lists: strict JSON, infinities written ``"inf"``."""
        return {
            "noise_multiplier": _encode(self.noise_multiplier),
            "sample_rate": self.sample_rate,
            "dimension": _encode(self.dimension),
            "extra_blocks": [[_encode(n), _encode(m)] for n, m in self.extra_blocks],
            **({"layers": [[_encode(n), share, count] for n, share, count in self.layers]} if self.layers else {}),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Release:
        """What :meth:`to_dict` gave; ``extra_blocks`` and ``layers`` may be left out where there are none.

        Raises:
            TypeError, ValueError: an entry is missing, unknown or illegal, saying which.
        """
        if not isinstance(found, Mapping) or not _NEEDED <= found.keys() <= _NEEDED | _OPTIONAL:
            shown = sorted(found) if isinstance(found, Mapping) else found
            raise ValueError(f"expected the entries {sorted(_NEEDED)} of a release, got {shown!r}")
        return cls(
            _decode(found["noise_multiplier"]),
            found["sample_rate"],
            _decode(found["dimension"]),
            [(_decode(n), _decode(m)) for n, m in found.get("extra_blocks", ())],
            [(_decode(n), share, count) for n, share, count in found.get("layers", ())],
        )


def _extra_blocks(value: object) -> tuple[tuple[float, float], ...]:
    name = "extra_blocks"
    return tuple(
        (_validate.dimension(f"{name} dimension", n), _validate.non_negative(f"{name} noise_multiplier", m))
        for n, m in _validate.rows(name, value, "dimension", "noise_multiplier")
    )


def _layers(value: object, whole: float) -> tuple[tuple[float, float, int], ...]:
    """As given, of a vector of ``whole`` coordinates."""
    found = tuple(
        (
            _validate.dimension("layers dimension", n),
            _validate.positive("layers share", share, finite=True),
            _validate.steps("layers count", count),
        )
        for n, share, count in _validate.rows("layers", value, "dimension", "share", "count")
    )
    total = sum(n * count for n, _, count in found if count)
    if found and total != whole:
        raise ValueError(f"layers must hold as many coordinates as dimension={whole!r}, got {total!r}")
    return found


_NEEDED = {"noise_multiplier", "sample_rate", "dimension"}
_OPTIONAL = {"extra_blocks", "layers"}


def _encode(value: float) -> float | int | str:
    if math.isinf(value):
        return "inf"
    return int(value) if value == math.floor(value) and abs(value) < _validate.MAX_STEPS else value


def _decode(value: object) -> Any:
    return math.inf if isinstance(value, str) and value == "inf" else value


def _inverse(multiplier: float) -> float:
    return math.inf if multiplier < 1e-300 else 1.0 / multiplier
