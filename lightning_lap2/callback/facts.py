"""What a report says of the latest fit, beside what its ledger holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Sizes and choices of a fit, for its report.

    Attributes:
        dimension: n, when the plan was made or the fit ended.
        count_noise_scale: of adaptive clipping, else ``None``.
        rounding_margin: share of C that pays for rounding; ``None`` without noise.
        planned_steps: optimizer steps, ``inf`` without a last one.
        engine: what has run, or would be tried first.
        caveats: what trying the step found.
    """

    noise_multiplier: float
    sample_rate: float
    expected_batch_size: int
    num_examples: int | None
    num_records: int | None
    dimension: int
    count_noise_scale: float | None
    rounding_margin: float | None
    planned_steps: float
    noise_source: str
    world_size: int
    precision: str
    fast_dev_run: bool
    once_per_pass: bool
    engine: str
    caveats: tuple[str, ...] = ()
