"""Norms from Gram matrices against the gradients written out in fp64."""

from __future__ import annotations

import pytest
import torch

from lightning_lap2.gradients.ghost.numerics import gram_product, gram_squares, row_norms, row_squares


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 20, 21, 33, 64, 65, 67])
def test_gram_squares(length: int) -> None:
    torch.manual_seed(length)
    a, b = torch.randn(3, length, 7), torch.randn(3, length, 5)
    squares, own = gram_squares(a, b)
    written_out = torch.einsum("btp,btq->bpq", a.double(), b.double())
    torch.testing.assert_close(squares, written_out.square().sum((1, 2)), rtol=1e-6, atol=0)
    each = a.double().square().sum(2) * b.double().square().sum(2)
    torch.testing.assert_close(own, each.sum(1), rtol=1e-6, atol=0)
    bad = a.clone()
    bad[1, -1, 0] = torch.nan
    assert torch.isfinite(gram_squares(bad, b)[0]).tolist() == [True, False, True]


def test_gram_product() -> None:
    a, b, c, d = (torch.randn(2, t, s) for t, s in ((17, 3), (17, 4), (5, 3), (5, 4)))
    first, second = (torch.einsum("btp,btq->bpq", x.double(), y.double()) for x, y in ((a, b), (c, d)))
    torch.testing.assert_close(gram_product(a, b, c, d), (first * second).sum((1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 1000, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_row_norms(columns: int, dtype: torch.dtype) -> None:
    rows = torch.randn(4, columns).to(dtype)
    exact = rows.double().norm(dim=1)
    assert row_norms(rows).dtype == row_squares(rows).dtype == torch.float64
    torch.testing.assert_close(row_norms(rows), exact, rtol=3e-7, atol=0)
    torch.testing.assert_close(row_squares(rows), exact.square(), rtol=6e-7, atol=0)
