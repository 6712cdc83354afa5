"""Workloads that grow: ``"batch=512"``, ``"parameters=1000000"``, ``"length=256"``."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.workloads import WORKLOADS, LanguageModel, Workload, tutorial_cnn

MLP_BATCH = 32
TEXT_BATCH, LONGEST, VOCABULARY = 8, 1024, 2000
_MLP_INPUTS, _CLASSES = 64, 10


def find_workload(name: str) -> Workload:
    """A workload by the name of the five, or ``family=size``.

    Raises:
        KeyError: neither.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    family, _, size = name.partition("=")
    return FAMILIES[family](int(size))


def growing_batch(size: int) -> Workload:
    """The tutorial CNN (26,010 parameters)."""
    return Workload(
        f"batch={size}", tutorial_cnn, lambda: (torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,))), size
    )


def growing_width(parameters: int) -> Workload:
    """64 -> w -> w -> 10 with the width w that comes closest to ``parameters``."""
    # w^2 + (64 + 10 + 2) w + 10 parameters
    half = (_MLP_INPUTS + _CLASSES + 2) / 2
    width = round(math.sqrt(half**2 + parameters - _CLASSES) - half)

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(_MLP_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _CLASSES)
        )

    return Workload(
        f"parameters={parameters}",
        net,
        lambda: (torch.randn(MLP_BATCH, _MLP_INPUTS), torch.randint(0, _CLASSES, (MLP_BATCH,))),
        MLP_BATCH,
    )


def growing_length(length: int) -> Workload:
    """A causal transformer of two layers, width 128, with positions for the longest sequence at every length."""
    shape = (TEXT_BATCH, length)
    return Workload(
        f"length={length}",
        lambda: LanguageModel(VOCABULARY, width=128, depth=2, length=LONGEST),
        lambda: (torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)),
        TEXT_BATCH,
    )


FAMILIES = {"batch": growing_batch, "parameters": growing_width, "length": growing_length}
