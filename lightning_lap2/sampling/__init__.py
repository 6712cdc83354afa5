"""Which examples enter which optimizer step: Poisson draws, or the user's own order, counted."""

from __future__ import annotations

from lightning_lap2.sampling.alone import ExampleLoader, peek
from lightning_lap2.sampling.by_list import inner
from lightning_lap2.sampling.loaders import by_record, check_loader, provably_once, rebuild_loader
from lightning_lap2.sampling.parts import Part
from lightning_lap2.sampling.poisson import PoissonBatchSampler
from lightning_lap2.sampling.recorded import RecordedBatchSampler
from lightning_lap2.sampling.units import UnitBatchSampler, Units

__all__ = [
    "ExampleLoader",
    "Part",
    "PoissonBatchSampler",
    "RecordedBatchSampler",
    "UnitBatchSampler",
    "Units",
    "by_record",
    "check_loader",
    "inner",
    "peek",
    "provably_once",
    "rebuild_loader",
]
