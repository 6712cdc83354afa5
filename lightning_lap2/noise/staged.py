"""AES noise for a tensor on an accelerator: made on the CPU, one release ahead of the step if wanted."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_lap2.noise import grid
from lightning_lap2.noise.aes import AesNoise
from lightning_lap2.noise.base import NoiseSource

_CHUNK = 1 << 22  # values at once: 32 MiB of float64 on the device


@dataclass(frozen=True)
class _Order:
    """What unit noise is wanted. ``release`` is None where it does not matter: without a seed."""

    size: int
    distribution: str
    release: int | None


class StagedAesNoise(NoiseSource):
    """The CPU's AES noise, copied to ``device``, scaled, added and rounded there.

    The noise is drawn at unit scale into one float64 host buffer (pinned for CUDA), so that it can be drawn before
    the scale is known. With ``ahead`` a background thread does so for the next release while the device
    computes this one; a next request that differs from the last in size, distribution or (seeded) release is
    drawn afresh, and what was prepared is dropped. Prepared noise is used at most once, by the process that
    prepared it: it is neither pickled nor copied, and a forked child discards it.

    A device without float64 (Apple's) sends its sum to the host, where it is noised and rounded, and takes it back.

    Args:
        device: the accelerator; ``cpu`` works too (no pinning), for tests.
        seed, rank, cells: see :class:`NoiseSource`. The noise does not depend on ``ahead``.
        ahead: draw the next release's noise in a background thread.
    """

    name: ClassVar[str] = "aes"

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int | None = None,
        rank: int = 0,
        cells: int = grid.CELLS,
        ahead: bool = True,
    ) -> None:
        super().__init__(device, seed=seed, rank=rank, cells=cells)
        self.ahead = ahead
        self._host = AesNoise(torch.device("cpu"), seed=seed, rank=rank)
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._buffer: Tensor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._prepared: tuple[_Order, Future[Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("device", "seed", "rank", "cells", "ahead", "_host")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _add(self, values: Tensor, scale: float, distribution: str, release: int, last_factor: float) -> None:
        if self._pid != os.getpid():
            self._forget()
        seeded = self.seed is not None
        order = _Order(values.numel(), distribution, release if seeded else None)
        noise = self._take(order)
        where = values.device if has_float64(values.device) else noise.device
        for start in range(0, order.size, _CHUNK):
            part = values[start : start + _CHUNK]
            total = part.to(where).to(torch.float64, copy=True)
            if start + _CHUNK >= order.size:
                total[-1] *= last_factor
            # A blocking copy: when it returns the host buffer may be written again.
            total += noise[start : start + _CHUNK].to(where, copy=True).mul_(scale)
            grid.round_(total, scale, self.cells)
            part.copy_(total)
        if self.ahead:
            self._prepare(_Order(order.size, distribution, release + 1 if seeded else None))

    def _take(self, order: _Order) -> Tensor:
        """The prepared noise if it is what is wanted (then it is spent), else noise drawn now."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            made, noise = prepared[0], prepared[1].result()  # waiting keeps the buffer in one hand
            if made == order:
                return noise
        return self._draw(order)

    def _prepare(self, order: _Order) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lap2-noise")
        self._prepared = (order, self._thread.submit(self._draw, order))

    def _draw(self, order: _Order) -> Tensor:
        if self._buffer is None or self._buffer.numel() != order.size:
            self._buffer = torch.empty(order.size, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        self._host.fill_(self._buffer, order.distribution, release=order.release or 0)
        return self._buffer


def has_float64(device: torch.device) -> bool:
    """Whether float64 arithmetic runs on ``device``."""
    return device.type != "mps"
