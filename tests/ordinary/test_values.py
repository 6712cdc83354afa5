"""What a step reads out of its tensors under ``vmap``: the value where all examples agree, else a number of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lap2.errors import IsolationError
from lightning_lap2.gradients import FlatClipper, ParameterLayout, StepCall, StepRunner
from lightning_lap2.gradients.engines import make_engine
from lightning_lap2.sampling.alone import Collator
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


@pytest.mark.parametrize("ys", [(2.0, 2.0), (1.0, 2.0, 6.0)])
def test_what_was_read_is_kept_for_the_end_of_the_epoch_and_not_for_a_later_step(ys: tuple[float, ...]) -> None:
    """One entry for each batch, its mean, as in plain training; a later step would carry the data into its release."""

    def step(m: Any, batch: Any) -> Tensor:
        loss = m.net(batch[0]).sum()
        if m.reads:
            loss = loss * m.seen
        m.seen = batch[1].item()
        m.history.append({"loss": loss, "y": batch[1].item()})
        return loss

    given = case(step, ys=ys)
    module = given.module()
    module.reads, module.seen, module.history = False, 0.0, []
    layout, total = ParameterLayout(module), torch.zeros(4)
    runner = StepRunner(module, [make_engine("ghost", module)])
    examples = Collator(given.collate).of_stream(list(given.records))
    call = StepCall((examples, 0), len(ys))
    runner.accumulate(call, layout, FlatClipper(1.0), total)
    assert module.seen == pytest.approx(sum(ys) / len(ys))
    (entry,) = module.history
    assert entry["y"] == module.seen
    assert entry["loss"].dim() == 0
    module.reads = True
    with pytest.raises(IsolationError, match=r"reads self\.seen"):
        runner.accumulate(call, layout, FlatClipper(1.0), total)


def test_nothing_stays_replaced() -> None:
    names = ("item", "tolist", "squeeze", "squeeze_", "__bool__", "__float__", "__int__", "__index__", "__complex__")
    before = [getattr(Tensor, name) for name in names] + [torch.squeeze, torch.batch_norm]
    own = set(vars(Tensor))
    privately(case(lambda m, batch: m.net(batch[0]).sum()))
    assert [getattr(Tensor, name) for name in names] + [torch.squeeze, torch.batch_norm] == before
    assert set(vars(Tensor)) == own
