"""Random draws held still, so that one example alone and the same example among others can be compared.

A fixed seed does not do that: the draws for a batch of one and for a batch of four have other shapes and
another order. Here every draw of torch is replaced by a constant of its distribution (a normal: half a
standard deviation,
a uniform: the middle, a Bernoulli: 1, a permutation: a cyclic shift without fixed point), whatever its shape.
So dropout, VAE noise and stochastic depth become deterministic per example, while a batch permuted to be
mixed with itself stays visibly mixed. numpy's and Python's generators, and kernels that draw inside
themselves, are only seeded; whether that leaves the step deterministic is for the caller to test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

# code that draws until it likes the result would never end on constants
_MAX_CONSTANT_DRAWS = 10_000


@contextmanager
def still(seed: int) -> Iterator[Draws]:
    """Constant torch draws and everything else seeded by ``seed``; the caller restores the generators.

    Attention runs as plain operations, since fused kernels draw their dropout inside. Yields whether torch was asked
    for draws inside.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (user code draws from the global generator)
    random.seed(seed)
    with sdpa_kernel(SDPBackend.MATH), Draws() as draws:
        yield draws


class Draws(TorchDispatchMode):
    """Makes draws constant. Works below autograd and below vmap; the operation itself runs first and gives shape, type
    and device."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _MAX_CONSTANT_DRAWS

    @property
    def any(self) -> bool:
        """Whether there was a draw."""
        return self._left < _MAX_CONSTANT_DRAWS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        fill = _FILLS.get(func.overloadpacket.__name__)
        if fill is not None and self._left > 0:
            self._left -= 1
            given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            fill(out, given | (kwargs or {}))
        return out


def _uniform(out: Tensor, given: dict[str, Any]) -> None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    out.fill_((low + high) / 2)


def _normal(out: Tensor, given: dict[str, Any]) -> None:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    out.copy_(torch.as_tensor(mean + 0.5 * std))


def _exponential(out: Tensor, given: dict[str, Any]) -> None:
    out.fill_(math.log(2) / given.get("lambd", 1.0))


def _integers(out: Tensor, given: dict[str, Any]) -> None:
    low, high = given.get("low", 0), given["high"]
    out.fill_(low + (high - low) // 2)


def _permutation(out: Tensor, given: dict[str, Any]) -> None:
    out.copy_(torch.arange(len(out), device=out.device).roll(-1))


def _bernoulli(out: Tensor, given: dict[str, Any]) -> None:
    """``bernoulli(self)`` and ``bernoulli(self, p)``: 1 wherever the probability is not 0."""
    out.copy_(torch.as_tensor(given.get("p", given["self"]) > 0))


def _bernoulli_in_place(out: Tensor, given: dict[str, Any]) -> None:
    out.copy_(torch.as_tensor(given.get("p", 0.5) > 0))


def _dropout(out: tuple[Tensor, Tensor], given: dict[str, Any]) -> None:
    """``native_dropout(input, p, train) -> (output, mask)`` with nothing dropped."""
    dropped, mask = out
    if given.get("train"):
        dropped.copy_(given["input"] / (1 - given["p"]) if given["p"] < 1 else 0 * given["input"])
        mask.fill_(True)


def _fused_dropout(out: tuple[Tensor, Tensor], given: dict[str, Any]) -> None:
    """``_fused_dropout(self, p)`` where p is the probability to keep."""
    out[0].copy_(given["self"] / given["p"])
    out[1].fill_(1)


_FILLS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform_": _uniform,
    "uniform": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal_": _normal,
    "normal": _normal,
    "exponential_": _exponential,
    "randint": _integers,
    "randint_like": _integers,
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "native_dropout": _dropout,
    "_fused_dropout": _fused_dropout,
}
