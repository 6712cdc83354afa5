"""What a step reads out of its tensors under ``vmap``: the value where all examples agree, else a number of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lap2.errors import UnsupportedModelError
from tests.ordinary.harness import Case, alone, privately


def case(step: Any, *, engine: str = "ghost", ys: tuple[float, ...] = (1.0, 2.0, 3.0)) -> Case:
    records = [(torch.full((3,), y), y) for y in ys]
    return Case(step, records, lambda: {"net": nn.Linear(3, 1)}, engine=engine)


def check(given: Case) -> dict[str, Any]:
    got, want = privately(given), alone(given)
    assert list(got.engines) == [given.engine], got.why
    for key in want:
        torch.testing.assert_close(got.gradient[key], want[key])
    return got.logged


def test_a_number_computes_as_the_number_does() -> None:
    def step(m: Any, batch: Any) -> Tensor:
        x, y = batch
        n = y.item()
        m.log_dict({"a": 2 - n, "b": n // 2, "c": 2**n, "d": -n % 4, "e": abs(1 - n), "f": round(n / 3, 2), "g": n < 3})
        return (m.net(x) * n + n / (1 + y)).sum() / n

    logged = check(case(step))
    want = {"a": 0, "b": 2 / 3, "c": 14 / 3, "d": 2, "e": 1, "f": 2.0 / 3, "g": 2 / 3}
    assert logged == pytest.approx(want, abs=2e-3)


def test_a_value_on_which_all_agree_may_decide() -> None:
    def step(m: Any, batch: Any) -> Tensor:
        x, y = batch
        assert not torch.isnan(y)
        assert x.isfinite().all().item()
        times = [0.0, 1.0][int(y > 0)] + float((y > 0).sum()) + y.gt(0).tolist()[0]
        return m.net(x).sum() * times * (2 if y > 0 else 1)

    check(case(step))


def test_a_value_on_which_they_do_not_goes_to_the_loop() -> None:
    check(case(lambda m, batch: m.net(batch[0]).sum() * (2 if batch[1] > 2 else 1), engine="loop"))
    check(case(lambda m, batch: m.net(batch[0]).sum() * float(f"{batch[1].item():.1f}"), engine="loop"))


def test_an_assertion_that_fails_for_one_example_ends_the_step() -> None:
    def step(m: Any, batch: Any) -> Tensor:
        loss = (m.net(batch[0]) / batch[1]).sum()
        assert torch.isfinite(loss), "not finite"
        return loss

    with pytest.raises(AssertionError, match="not finite"):
        privately(case(step, ys=(1.0, 0.0, 2.0)))


def test_what_was_read_is_not_kept_for_a_later_step() -> None:
    """The common value would carry the data into the next release."""

    def step(m: Any, batch: Any) -> Tensor:
        m.seen = batch[1].item()
        return m.net(batch[0]).sum()

    with pytest.raises(UnsupportedModelError, match="(keeps a tensor computed from the data in|changes) self.seen"):
        privately(case(step, ys=(2.0, 2.0)))
    with pytest.raises(UnsupportedModelError, match="(keeps a tensor computed from the data in|changes) self.seen"):
        privately(case(step))


def test_nothing_stays_replaced() -> None:
    names = ("item", "tolist", "squeeze", "squeeze_", "__bool__", "__float__", "__int__", "__index__", "__complex__")
    before = [getattr(Tensor, name) for name in names] + [torch.squeeze, torch.batch_norm]
    own = set(vars(Tensor))
    privately(case(lambda m, batch: m.net(batch[0]).sum()))
    assert [getattr(Tensor, name) for name in names] + [torch.squeeze, torch.batch_norm] == before
    assert set(vars(Tensor)) == own
