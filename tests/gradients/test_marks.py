"""Marks follow values, not shapes; and what escaped is known when it comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from lightning_lap2.errors import IsolationError
from lightning_lap2.gradients.marks import Marks, known_clean

B = 3


def marked(marks: Marks, tensor: Tensor) -> bool:
    return marks._read(tensor)


def test_values_are_followed_through_views_writes_and_lists() -> None:
    x, weight = torch.randn(B, B), torch.randn(B, B)
    with Marks([x], vmapped=False) as marks:
        derived = {
            "view": x[1:].t(), "sum": x.sum(), "product": weight @ x, "cat": torch.cat([weight, x]),
            "split": x.split(1)[2], "comparison": x > 0, "index": weight[x.argmax(1)], "shape": torch.zeros_like(x),
        }  # fmt: skip
        own = {"weight": weight * 2, "constant": torch.ones(B), "position": torch.arange(B)[None] + 1}
        written = torch.zeros(B)
        before = marked(marks, written)
        written[0] = x[0, 0]
        after = marked(marks, written[2:])
    assert [name for name, t in derived.items() if not marked(marks, t)] == []
    assert [name for name, t in own.items() if marked(marks, t)] == []
    assert (before, after) == (False, True)


def test_random_numbers_have_the_examples_dimension_under_vmap_only() -> None:
    x = torch.randn(B)
    with Marks([x], vmapped=False) as marks:
        assert not marked(marks, torch.rand(B))
    with Marks([x], vmapped=True) as marks:
        assert marked(marks, torch.rand(B))
        assert marked(marks, F.dropout(torch.ones(B), 0.5))
        assert not marked(marks, torch.tensor([1.0, 2.0]))


def test_nodes_that_carry_examples_are_noted() -> None:
    x, w = torch.randn(B, 2), torch.randn(2, 2, requires_grad=True)
    with Marks([x], vmapped=True, graph=True) as marks:
        derived = w.t().exp()
        y = vmap(lambda v: torch.tanh(v @ derived))(x)
        y.sum()
    assert y.grad_fn in marks.nodes
    assert derived.grad_fn not in marks.nodes
    assert derived.grad_fn.next_functions[0][0] not in marks.nodes


KEPT: dict[str, Any] = {
    "itself": lambda x: x,
    "view": lambda x: x[0],
    "clone": lambda x: x.clone(),
    "mean": lambda x: x.mean(),
    "detached": lambda x: (x * 2).detach(),
    "integers": lambda x: x.argmax(0),
    "written into": lambda x: torch.zeros(B).copy_(x[0]),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("use", [lambda t: t + 1, lambda t: [torch.stack([t, t])], lambda t: torch.ones(B, B).mul_(t)])
def test_what_escaped_is_refused_by_line_when_it_comes_back(kind: str, use: Any) -> None:
    first, second = torch.randn(B, B), torch.randn(B, B)
    with Marks([first], vmapped=False):
        kept = KEPT[kind](first)
        use(kept)
    use(kept)  # nobody's business outside a step
    with Marks([second], vmapped=False), pytest.raises(IsolationError, match=r"test_marks\.py:\d+ reads a tensor"):
        use(kept)


def test_a_record_that_comes_again_is_not_what_escaped() -> None:
    x = torch.randn(B)
    for _ in range(3):
        with Marks([x], vmapped=False):
            x + 1


def test_clean_is_only_what_is_known_to_be() -> None:
    x, w = torch.randn(B, 2), torch.randn(2)
    assert not known_clean(w)  # nothing is followed
    with Marks([x], vmapped=True):
        assert known_clean(w)
        assert known_clean(w * 2)
        assert not known_clean(x.mean())
        vmap(lambda v: v * 0 if known_clean(v) else v)(x)
        seen: list[bool] = []
        vmap(lambda v: seen.append(known_clean(v)) or v)(x)
        assert seen == [False]
    assert not known_clean(w)


def test_sparse_tensors_are_followed() -> None:
    x, adjacency = torch.randn(B, B), torch.eye(B).to_sparse()
    with Marks([x], vmapped=False) as marks:
        assert not marked(marks, adjacency @ torch.ones(B, 1))
        assert marked(marks, adjacency @ x)
        assert marked(marks, x.to_sparse())
        assert marked(marks, x.to_sparse() @ torch.ones(B, 1))
