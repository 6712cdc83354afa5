"""The constructor's arguments, checked and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import assert_never

from lightning_lap2 import _validate
from lightning_lap2.accounting import family_of
from lightning_lap2.accounting.selection import RunLimit
from lightning_lap2.choices import (
    BOUNDS,
    ENGINES,
    NOISE_SOURCES,
    ON_RECORD_ERROR,
    SAMPLINGS,
    Bound,
    EngineName,
    NoiseSourceName,
    OnRecordError,
    Sampling,
)
from lightning_lap2.gradients.clipping import clippings
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise import check_noise
from lightning_lap2.sampling.units import UnitOf, unit_name

TARGET_QUANTILE = 0.5
CLIP_LEARNING_RATE = 0.2
EXPECTED_PER_COUNT_NOISE = 20
"""``count_noise_scale=None`` is the expected batch size over this (Andrew et al. 2021, section 3.1)."""

_NUMBERS: dict[str, type] = {
    "eps": float,
    "delta": float,
    "max_grad_norm": float,
    "noise_multiplier": float,
    "chunk_size": int,
    "noise_seed": int,
    "augmentations": int,
    "records_per_unit": int,
    "target_quantile": float,
    "clip_learning_rate": float,
    "count_noise_scale": float,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See :class:`lightning_lap2.Lap2Privacy` for the meaning of each field.

    Args:
        run_limit: of a run that a private search makes: what it keeps instead of ``eps`` at ``delta``.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.
    """

    eps: float
    delta: float
    max_grad_norm: float
    noise_multiplier: float | None
    mechanism: str
    bound: Bound
    sampling: Sampling
    clipping: str
    engine: EngineName
    chunk_size: int | None
    augmentations: int
    noise_source: NoiseSourceName
    noise_seed: int | None
    assume_nothing_spent: bool
    allow_feedback: bool
    target_quantile: float | None
    clip_learning_rate: float | None
    count_noise_scale: float | None
    on_record_error: OnRecordError
    unit: UnitOf | None = None
    records_per_unit: int | None = None
    public_state: tuple[str, ...] = ()
    run_limit: RunLimit | None = None

    def __post_init__(self) -> None:
        _validate.positive("eps", self.eps)
        _validate.open_unit("delta", self.delta)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        family = family_of(self.mechanism)
        check_noise(family.noise)
        _validate.choice("bound", self.bound, BOUNDS)
        _validate.choice("sampling", self.sampling, SAMPLINGS)
        _validate.choice("clipping", self.clipping, clippings())
        _validate.choice("engine", self.engine, ENGINES)
        _validate.choice("on_record_error", self.on_record_error, ON_RECORD_ERROR)
        _validate.choice("noise_source", self.noise_source, NOISE_SOURCES)
        if isinstance(self.public_state, str) or not all(isinstance(name, str) for name in self.public_state):
            raise TypeError(f"public_state must be a list of attribute names, got {self.public_state!r}")
        object.__setattr__(self, "public_state", tuple(self.public_state))
        _validate.boolean("assume_nothing_spent", self.assume_nothing_spent)
        _validate.boolean("allow_feedback", self.allow_feedback)
        _validate.integer("augmentations", self.augmentations, minimum=1)
        if self.chunk_size is not None:
            _validate.integer("chunk_size", self.chunk_size, minimum=1)
        if self.noise_seed is not None:
            _validate.integer("noise_seed", self.noise_seed, minimum=0)
        if self.bound not in family.bounds:
            raise ValueError(
                f"bound={self.bound!r} is a bound for mechanism='laplace' only, got mechanism={self.mechanism!r}; "
                "use bound='tight'"
            )
        if self.engine == "ghost" and family.norm != "l2":
            raise ValueError(
                f"engine='ghost' computes l2 norms, but mechanism={self.mechanism!r} clips the {family.norm} norm; use "
                "engine='vmap'"
            )
        self._check_unit()
        self._check_clipping()
        self._check_noise()
        self._make_plain()

    def _make_plain(self) -> None:
        """numpy's numbers and fractions become Python's, which a checkpoint keeps and ``weights_only`` loads."""
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else kind(value))

    def _check_unit(self) -> None:
        if self.unit is None:
            if self.records_per_unit is not None:
                raise ValueError(
                    f"records_per_unit={self.records_per_unit!r} has no meaning without unit; leave it None, or name "
                    "the data set's ids, unit='user_id'"
                )
            return
        if not callable(self.unit) and not (isinstance(self.unit, str) and self.unit):
            raise TypeError(
                "unit must be the name of the training data's ids, or a function from the data set to them, got "
                f"{self.unit!r} of type {type(self.unit).__name__}"
            )
        if self.records_per_unit is not None:
            _validate.integer("records_per_unit", self.records_per_unit, minimum=1)
        if self.sampling != "poisson":
            raise ValueError(
                f"unit={self.unit_name!r} with sampling={self.sampling!r}: in the loader's own order a user's records "
                "come at many steps of a pass, each of which would have to be paid for; use sampling='poisson'"
            )

    def _check_clipping(self) -> None:
        for name in ("target_quantile", "clip_learning_rate", "count_noise_scale"):
            value = getattr(self, name)
            if value is not None and self.clipping != "adaptive":
                raise ValueError(
                    f"{name}={value!r} has no meaning for clipping={self.clipping!r}; leave it None, or use "
                    "clipping='adaptive'"
                )
        if self.target_quantile is not None:
            _validate.open_unit("target_quantile", self.target_quantile)
        if self.clip_learning_rate is not None:
            _validate.positive("clip_learning_rate", self.clip_learning_rate, finite=True)
        if self.count_noise_scale is not None:
            _validate.positive("count_noise_scale", self.count_noise_scale, finite=True)
            if self.noise_multiplier == 0:
                raise ValueError(
                    f"count_noise_scale={self.count_noise_scale!r} with noise_multiplier=0.0, a run without any "
                    "noise: leave it None"
                )
        if math.isinf(self.max_grad_norm) and self.clipping in ("automatic", "adaptive"):
            use = {"automatic": "the norm that every gradient is scaled to", "adaptive": "where the threshold starts"}
            raise ValueError(
                f"max_grad_norm=inf with clipping={self.clipping!r}, where it is {use[self.clipping]}: give a finite "
                "number, or clipping='flat' for no clipping"
            )
        if self.bound == "published" and self.clipping in ("per_layer", "adaptive"):
            raise ValueError(
                f"bound='published' is a formula for one vector under one norm, but clipping={self.clipping!r} "
                "releases several; use bound='tight' (or 'joint'), or clipping='flat' to reproduce the paper"
            )

    def _check_noise(self) -> None:
        if self.noise_multiplier is None:
            if math.isinf(self.eps):
                raise ValueError(
                    "eps=inf sets no budget to calibrate the noise for; give noise_multiplier "
                    "(0.0 for a run without noise), or a finite eps"
                )
            if math.isinf(self.max_grad_norm):
                raise ValueError("max_grad_norm=inf needs noise_multiplier=0.0 and eps=inf: a run without privacy")
            return
        _validate.non_negative("noise_multiplier", self.noise_multiplier)
        if math.isinf(self.noise_multiplier):
            raise ValueError("noise_multiplier must be finite, got inf")
        if self.noise_multiplier == 0 and not math.isinf(self.eps):
            raise ValueError(
                f"noise_multiplier=0.0 spends an infinite epsilon, but eps={self.eps!r}; give a positive "
                "noise_multiplier, or None to calibrate it, or eps=inf for a run without privacy"
            )
        self.mechanism_with(self.noise_multiplier)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines to try, in order. All show the step one example at a time; ``"auto"`` goes from the fastest to
        the one that runs everything."""
        match self.engine:
            case "auto":
                # ghost computes l2 norms
                return ("ghost", "vmap", "loop") if family_of(self.mechanism).norm == "l2" else ("vmap", "loop")
            case "ghost" | "vmap" | "loop":
                return (self.engine,)
            case _:
                assert_never(self.engine)

    def mechanism_with(
        self,
        noise_multiplier: float,
        *,
        max_grad_norm: float | None = None,
        layer_sizes: tuple[int, ...] = (),
        expected_batch_size: int | None = None,
    ) -> Mechanism:
        """The release that these settings describe, at the given noise multiplier.

        Args:
            max_grad_norm: C of this release; ``None``: as given to the constructor.
            layer_sizes: trainable scalars of each layer; used by per-layer clipping only.
            expected_batch_size: public normaliser, by which adaptive clipping chooses its count's noise; ``None``: the
                count is left out.
        """
        count = None
        if self.clipping == "adaptive" and expected_batch_size is not None:
            count = self.count_noise_scale or expected_batch_size / EXPECTED_PER_COUNT_NOISE
            count = count if noise_multiplier > 0 else 0.0
        return Mechanism(
            name=self.mechanism,
            max_grad_norm=self.max_grad_norm if max_grad_norm is None else max_grad_norm,
            noise_multiplier=noise_multiplier,
            layer_sizes=layer_sizes if self.clipping == "per_layer" else (),
            count_noise_scale=count,
        )

    @property
    def unit_name(self) -> str | None:
        """What the report and the ledger call the units."""
        return None if self.unit is None else unit_name(self.unit)

    @property
    def rows_per_unit(self) -> int:
        """Records that an example shows."""
        return self.records_per_unit or 1

    @property
    def adjacency(self) -> str:
        if self.unit is not None:
            return f"add/remove one user ({self.unit_name})"
        match self.sampling:
            case "poisson":
                return "add/remove one example"
            case "none":
                return "zero-out of one example"
            case _:
                assert_never(self.sampling)
