"""From the norms of per-example gradients to the weight each example gets in the sum.

The contract of every clipper: for each example the weighted gradient has norm at most C, whatever the gradient
(NaN, infinity, zero). Adding or removing one example then moves the sum by at most C: its sensitivity. Per-layer
clipping keeps each layer within C_l as well, and adaptive clipping is flat clipping with a count beside it.

Norms come in per parameter because that is how engines produce them and what per-layer clipping needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import assert_never

from lightning_lap2 import _validate
from lightning_lap2._registry import Registry
from lightning_lap2.choices import CLIPPINGS, Norm
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.mechanism import COUNT_SENSITIVITY, Mechanism

STABILITY = 0.01
"""gamma of automatic clipping, in units of the gradient: the value of Bu et al. (2022) for AUTO-S."""


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
    match norm:
        case "l1":
            return norms.sum(dim=0)
        case "l2":
            # scaled by the largest entry, so that 1e200 does not overflow when squared
            top = norms.amax(dim=0).clamp_min(torch.finfo(norms.dtype).tiny)
            return top * torch.linalg.vector_norm(norms / top, dim=0)
        case _:
            assert_never(norm)


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

    def count(self, norms: Tensor) -> Tensor:
        """What the examples add to the released count, a 0-dim fp64 tensor; see :func:`centred_count`."""
        return centred_count(total_norm(norms, self.norm), self.max_grad_norm)


def centred_count(totals: Tensor, threshold: float) -> Tensor:
    """Sum over examples of +1/2 where the norm is at most ``threshold``, -1/2 where it is above (Andrew, Thakkar,
    McMahan, Ramaswamy 2021, section 2.1: the centred indicator has half the sensitivity of the plain one).

    An example whose gradient is zero or not finite adds 0. It has no say about C, and under zero-out adjacency, where
    the neighbour's gradient *is* zero, the count moves by 1/2 and not by 1.

    Args:
        totals: norms over all parameters, ``[B]``.
    """
    votes = torch.where(totals <= threshold, COUNT_SENSITIVITY, -COUNT_SENSITIVITY).to(totals.dtype)
    return torch.where(torch.isfinite(totals) & (totals > 0), votes, torch.zeros_like(votes)).sum()


@dataclass(frozen=True)
class AutomaticClipper:
    """Weight ``C / (||g|| + 0.01)``: every gradient is scaled to a norm just below C (AUTO-S of Bu, Wang, Zha, Karypis
    2022, "Automatic Clipping"). The norm after it is C ||g|| / (||g|| + 0.01) < C; a zero gradient stays zero.

    Args:
        max_grad_norm: C, finite.
        norm: as in :class:`FlatClipper`.
    """

    max_grad_norm: float
    norm: Norm = "l2"

    def weights(self, norms: Tensor) -> Tensor:
        total = total_norm(norms, self.norm)
        weight = self.max_grad_norm / (total + STABILITY)
        return torch.where(torch.isfinite(total), weight, torch.zeros_like(weight)).expand_as(norms)


@dataclass(frozen=True)
class PerLayerClipper:
    """Weight ``min(1, C_l / ||g_l||)`` with one norm for each layer (McMahan, Ramage, Talwar, Zhang 2018).

    With the same C_l for L layers the whole is within sqrt(L) C_l in l2 and L C_l in l1.

    Args:
        layer_norm: C_l.
        layers: for each of the P parameters the number of its layer, 0 .. L - 1.
        norm: as in :class:`FlatClipper`.
    """

    layer_norm: float
    layers: tuple[int, ...]
    norm: Norm = "l2"

    @cached_property
    def _members(self) -> list[list[int]]:
        """For each layer its parameters' rows, filled up to one length by the row P, which :meth:`weights` makes 0."""
        rows = [[k for k, own in enumerate(self.layers) if own == number] for number in range(1 + max(self.layers))]
        longest = max(map(len, rows))
        return [own + [len(self.layers)] * (longest - len(own)) for own in rows]

    def weights(self, norms: Tensor) -> Tensor:
        padded = torch.cat([norms, norms.new_zeros(1, norms.shape[1])])
        members = torch.tensor(self._members, device=norms.device)
        totals = total_norm(padded[members].movedim(1, 0), self.norm)  # [L, B]
        weight = (self.layer_norm / totals).clamp_max(1.0)[torch.tensor(self.layers, device=norms.device)]
        # not finite anywhere: nothing of the example enters
        return torch.where(torch.isfinite(norms).all(dim=0), weight, torch.zeros_like(weight))


WeightsOfOne = Callable[[Tensor, float], Tensor]
REGISTERED: Registry[WeightsOfOne] = Registry("clipping", {}, on_trust=False)


def register_clipping(name: str, weights: WeightsOfOne) -> None:
    """Makes ``clipping=name`` known in this process; see :class:`RegisteredClipper`.

    Nothing has to be proven of ``weights``: it sees one example's norms at a time, and what it returns is cut where the
    weighted gradient would be longer than C. So such a clipping is charged as flat clipping is.

    Args:
        name: what the setting ``clipping`` calls it.
        weights: from the norms ``[P]`` of one example's gradient (fp64, one for each parameter) and C to weights
            ``[P]``. It runs under :func:`torch.vmap`.

    Raises:
        TypeError, ValueError: the name is taken.
    """
    if name in CLIPPINGS:
        raise ValueError(f"clipping {name!r} is the library's own: choose another name")
    REGISTERED.add(name, weights)


def clippings() -> tuple[str, ...]:
    """The names that the setting ``clipping`` may have."""
    return (*CLIPPINGS, *REGISTERED)


@dataclass(frozen=True)
class RegisteredClipper:
    """Weights of one's own, made safe: ``min(w, w C / ||w g||)`` with w of one example's norms alone.

    Weights that are negative or not finite count as 0.

    Args:
        max_grad_norm: C.
        norm: as in :class:`FlatClipper`.
        of_one: see :func:`register_clipping`.
    """

    max_grad_norm: float
    norm: Norm
    of_one: WeightsOfOne

    def weights(self, norms: Tensor) -> Tensor:
        wanted = torch.vmap(lambda own: self.of_one(own, self.max_grad_norm), in_dims=1, out_dims=1)(norms)
        wanted = torch.where(torch.isfinite(wanted) & (wanted > 0), wanted, torch.zeros_like(wanted)).double()
        return wanted * FlatClipper(self.max_grad_norm, self.norm).weights(wanted * norms)


def make_clipper(clipping: str, mechanism: Mechanism, layout: ParameterLayout) -> Clipper:
    """The clipper whose sensitivity ``mechanism`` is charged for, less its margin.

    Args:
        clipping: ``"flat"``, ``"automatic"``, ``"per_layer"``, ``"adaptive"`` or a registered name. Adaptive clipping
            is flat clipping at the mechanism's present C; the count beside it is :meth:`FlatClipper.count`.
        mechanism: gives C and its margin in units of the gradient, the norm (l2; l1 of ``"laplace_l1"``) and the
            layers' share of C.
        layout: of the parameters whose norms will be handed in; per-layer clipping groups them by module.

    Returns:
        A :class:`Clipper`: norms ``[P, B]`` of P parameters and B examples in, weights ``[P, B]`` out, fp64.

    Raises:
        TypeError, ValueError: an unknown name, or the mechanism was made for other layers than those of ``layout``.

    Example:
        >>> layout = ParameterLayout(torch.nn.Linear(3, 1))  # weight and bias: P = 2
        >>> mechanism = Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=1.5)
        >>> clipper = make_clipper("flat", mechanism, layout)
        >>> clipper.weights(torch.tensor([[3.0, 0.3], [4.0, 0.4]], dtype=torch.float64))  # norms 5 and 0.5
        tensor([[0.1998, 1.0000],
                [0.1998, 1.0000]], dtype=torch.float64)
    """
    if clipping in REGISTERED:
        return RegisteredClipper(mechanism.clip_norm, mechanism.norm, REGISTERED[clipping])
    match _validate.choice("clipping", clipping, CLIPPINGS):
        case "flat" | "adaptive":
            return FlatClipper(mechanism.clip_norm, mechanism.norm)
        case "automatic":
            return AutomaticClipper(mechanism.clip_norm, mechanism.norm)
        case "per_layer":
            if mechanism.layer_sizes != layout.layer_sizes:
                raise ValueError(
                    f"a release of the layers {mechanism.layer_sizes} for gradients of {layout.layer_sizes}"
                )
            return PerLayerClipper(mechanism.layer_norm, layout.layers, mechanism.norm)
        case unknown:
            assert_never(unknown)
