"""Seconds per optimizer step, for the examples that report it."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class StepTime(L.Callback):
    """The mean over a run's steps, the first few (warm-up) left out."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        skip = min(20, len(self.ends) // 2)
        return (self.ends[-1] - self.ends[skip]) / max(1, len(self.ends) - 1 - skip)
