"""Norms and inner products of per-example gradients, accurate enough to clip by.

A norm that comes out too small lets a clipped gradient exceed C, so squared norms are accumulated in fp64 over
short fp32 blocks. Blocks keep the speed of fp32: a plain fp32 sum of 10^7 squares understates by 3.6e-4, a block
of 1,024 by at most about 2e-7.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1024
_ACCURATE = (torch.float32, torch.float64)


def row_norms(x: Tensor) -> Tensor:
    """Norm of each row: ``[R, N] -> [R]`` in fp64; see :func:`row_squares`."""
    if x.shape[1] <= _BLOCK and x.dtype in _ACCURATE:
        return torch.linalg.vector_norm(x, dim=1).double()
    return root(row_squares(x))


def root(squares: Tensor) -> Tensor:
    """Norms from squared norms, in place. Rounding may have made a zero negative; nan stays nan."""
    return squares.clamp_min_(0).sqrt_()


def row_squares(x: Tensor) -> Tensor:
    """Sum of squares of each row: ``[R, N] -> [R]`` in fp64.

    Entries above 1e19 overflow in fp32 and give ``inf``: such an example is treated as non-finite.
    """
    if x.dtype not in _ACCURATE:
        x = x.float()
    columns = x.shape[1]
    if columns <= _BLOCK:
        return torch.linalg.vector_norm(x, dim=1).double().square_()
    whole = columns - columns % _BLOCK
    blocks = torch.linalg.vector_norm(x[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
    total = blocks.double().square_().sum(dim=1)
    if whole < columns:
        total += torch.linalg.vector_norm(x[:, whole:], dim=1).double().square_()
    return total


def gram_product(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
    r"""Inner products of two sums of outer products, ``[B]`` in fp64.

    .. math:: \langle \sum_t a^1_t \otimes b^1_t,\ \sum_s a^2_s \otimes b^2_s \rangle
              = \sum_{t,s} (a^1_t \cdot a^2_s)\,(b^1_t \cdot b^2_s)

    Args:
        a1, b1: ``[B, T, p]``, ``[B, T, q]``.
        a2, b2: ``[B, S, p]``, ``[B, S, q]``.
    """
    products = torch.bmm(a1, a2.transpose(1, 2)).mul_(torch.bmm(b1, b2.transpose(1, 2)))
    return products.sum(dim=2).double().sum(dim=1)


def gram_squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Squared norms of :math:`\sum_t a_t \otimes b_t` and the sum of the terms' own, both ``[B]`` in fp64.

    The second, :math:`D = \sum_t |a_t|^2 |b_t|^2`, measures cancellation. Rounding of the fp32 Gram entries is of
    size u |a_t||a_s| each with independent signs (u = 6e-8), so the squared norm is off by about 3 u D: harmless
    unless the terms cancel and the norm is far below D. See :data:`CANCELLATION`.

    Args:
        a, b: ``[B, T, p]``, ``[B, T, q]``.
    """
    length = a.shape[1]
    over = length % _TILE
    if a.device.type == "cpu" and length > _TILE and 0 < over <= _FEW:
        whole, rest = (a[:, : length - over], b[:, : length - over]), (a[:, length - over :], b[:, length - over :])
        (squares, own), (more, own_more) = gram_squares(*whole), gram_squares(*rest)
        return squares + more + 2 * gram_product(*whole, *rest), own + own_more
    left, right = torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))
    products = left.mul_(right)
    own = products.diagonal(dim1=1, dim2=2).double().sum(dim=1)
    return products.sum(dim=2).double().sum(dim=1), own


_TILE, _FEW = 16, 4
"""A CPU's matrix kernels work in tiles of 16 columns: up to 4 positions too many (a class token beside 64 patches) are
taken by themselves, which saves up to a seventh of the time."""
CANCELLATION = 4.0
"""A Gram norm is recomputed in fp64 where D exceeds this multiple of it: the relative error of a norm then stays
below 4 * 3u / 2 = 4e-7."""
