"""From the norms of per-example gradients to the weight each example gets in the sum.

The contract of every clipper: for each example the weighted gradient has norm at most C, whatever the gradient
(NaN, infinity, zero). Adding or removing one example then moves the sum by at most C: its sensitivity.

Norms come in per parameter because that is how engines produce them and what per-layer clipping needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_lap2.mechanism import Norm


class Clipper(Protocol):
    """Turns norms into weights.

    ``norm`` says which norm the engine must hand in.
    """

    @property
    def norm(self) -> Norm: ...

    def weights(self, norms: Tensor) -> Tensor:
        """Weights ``[P, B]`` (fp64, finite, in [0, inf)) for norms ``[P, B]`` (fp64) of P parameters, B examples.

        An example with any non-finite norm has weight 0 in every row; the engine must also replace its
        non-finite gradient entries by 0, since 0 * nan is nan.
        """
        ...


def total_norm(norms: Tensor, norm: Norm) -> Tensor:
    """Norm over all parameters: ``[P, B] -> [B]``, fp64. l2 norms add in squares, l1 norms add."""
    if norm == "l1":
        return norms.sum(dim=0)
    # scaled by the largest entry, so that 1e200 does not overflow when squared
    top = norms.amax(dim=0).clamp_min(torch.finfo(norms.dtype).tiny)
    return top * torch.linalg.vector_norm(norms / top, dim=0)


@dataclass(frozen=True)
class FlatClipper:
    """Weight ``min(1, C / ||g||)`` with one norm over all parameters (Abadi et al. 2016; the paper's Algorithm 2).

    Args:
        max_grad_norm: C; ``inf`` leaves finite gradients as they are.
        norm: ``"l2"``, or ``"l1"`` for the Laplace-l1 baseline.
    """

    max_grad_norm: float
    norm: Norm = "l2"

    def weights(self, norms: Tensor) -> Tensor:
        total = total_norm(norms, self.norm)
        # a zero norm gives C / 0 = inf, hence weight 1: no 0/0; an infinite one gives 0, or nan with C = inf
        weight = (self.max_grad_norm / total).clamp_max_(1.0)
        return weight.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).expand_as(norms)
