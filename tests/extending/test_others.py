"""A route, a clipping, a ghost rule and a container by their recipes, each against something independent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lap2 import Lap2Privacy
from lightning_lap2._registry import trusted
from lightning_lap2.accounting import MajorizedAccountant, register_route
from lightning_lap2.accounting.routes.best import epsilon_by, routes_of
from lightning_lap2.accounting.routes.route import Sides
from lightning_lap2.gradients import ParameterLayout, UnsupportedModelError, make_clipper, register_clipping
from lightning_lap2.gradients.ghost.rules import RULES
from lightning_lap2.mechanism import Mechanism
from tests.extending.recipes import follow
from tests.gradients.ghost.oracle import Step, assert_equals_loop
from tests.helpers import LIGHTNING_WARNINGS, classifier, loader, quiet_trainer, records

pytestmark = LIGHTNING_WARNINGS


def gaussian(m: float, steps: int) -> MajorizedAccountant:
    accountant = MajorizedAccountant(mechanism="gaussian")
    accountant.step(noise_multiplier=m, sample_rate=1.0, dimension=3, steps=steps)
    return accountant


def test_a_route() -> None:
    before = gaussian(4.0, 8).epsilon(delta=1e-5)
    route = follow("A route to epsilon")["Concentrated"]
    composition = gaussian(4.0, 8).composition
    assert route in routes_of(composition)
    assert route not in routes_of(MajorizedAccountant().composition)
    rho = 8 / (2 * 16)  # Bun and Steinke 2016, Propositions 1.3 and 1.6
    found = epsilon_by(composition, 1e-5, [route])
    assert found == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)), rel=1e-9)
    assert gaussian(4.0, 8).epsilon(delta=1e-5) == before <= found  # exact without it
    assert max(route(composition).delta(found)) == pytest.approx(1e-5, rel=1e-6)
    assert "route 'zCDP'" in trusted()


def test_the_smallest_route_counts() -> None:
    class Nothing:
        """A route that is wrong, to see that it is asked."""

        def __init__(self, composition: Any) -> None:
            self.sides = Sides(0.125, 0.125)

        def usable(self, delta: float) -> bool:
            return True

        def epsilon(self, delta: float) -> Any:
            return self.sides

    register_route("nothing", Nothing, mechanisms=["laplace"])  # type: ignore[arg-type]
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.5, dimension=3, steps=4)
    assert accountant.epsilon(delta=1e-5) == 0.125
    with pytest.raises(ValueError, match="route 'nothing' is known already"):
        register_route("nothing", Nothing, mechanisms=["laplace"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mechanism must be one of"):
        register_route("other", Nothing, mechanisms=["cauchy"])  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ["laplace", "laplace_l1"])
def test_a_clipping(mechanism: str) -> None:
    follow("A clipping")
    layout = ParameterLayout(nn.Linear(3, 1))
    release = Mechanism(name=mechanism, max_grad_norm=2.0, noise_multiplier=1.0)
    c = release.clip_norm
    norms = torch.tensor([[3.0, 0.0, 0.1, math.inf, math.nan], [4.0, 0.0, 0.2, 1.0, 1.0]], dtype=torch.float64)
    weights = make_clipper("smooth", release, layout).weights(norms)
    totals = norms[:, :3].norm(dim=0)
    expected = c / (c**2 + totals**2).sqrt()
    if mechanism == "laplace_l1":  # cut where the l1 norm would be above C
        expected = torch.minimum(expected, c / norms[:, :3].sum(dim=0))
    torch.testing.assert_close(weights[:, :3], expected.expand(2, 3))
    assert not weights[:, 3:].any()


@pytest.mark.parametrize("wanted", [10.0, -1.0, math.nan, math.inf])
def test_weights_that_would_go_past_c_are_cut(wanted: float) -> None:
    register_clipping("hostile", lambda norms, c: torch.full_like(norms, wanted))
    release = Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=1.0)
    norms = torch.rand(2, 100, dtype=torch.float64).mul_(3).exp_()
    weights = make_clipper("hostile", release, ParameterLayout(nn.Linear(3, 1))).weights(norms)
    assert bool((weights >= 0).all())
    lengths = (weights * norms).norm(dim=0)
    assert float(lengths.max()) <= release.clip_norm * (1 + 1e-15)
    assert float(lengths.max()) == pytest.approx(release.clip_norm if wanted == 10.0 else 0.0)


def test_weights_see_one_example() -> None:
    seen = []

    def peeking(norms: Tensor, max_grad_norm: float) -> Tensor:
        seen.append(tuple(norms.shape))
        return norms / norms.sum()

    register_clipping("peeking", peeking)
    clipper = make_clipper(
        "peeking", Mechanism(name="laplace", max_grad_norm=9.0, noise_multiplier=1.0), ParameterLayout(nn.Linear(3, 1))
    )
    norms = torch.rand(2, 7, dtype=torch.float64)
    torch.testing.assert_close(clipper.weights(norms)[:, 3:4], clipper.weights(norms[:, 3:4]))
    assert set(seen) == {(2,)}


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
def test_a_clipping_trains_under_every_engine(engine: Any, tmp_path: Path) -> None:
    follow("A clipping")
    privacy = Lap2Privacy(eps=math.inf, noise_multiplier=0.0, clipping="smooth", engine=engine, sampling="none")
    model = classifier(L, learning_rate=1.0)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    quiet_trainer(L, privacy, max_steps=1, default_root_dir=tmp_path).fit(model, loader(6, 6))
    total = torch.zeros_like(start)
    fresh = classifier(L)
    for x, y in records(6):
        loss = fresh.loss((x[None], y[None]))
        grad = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(fresh.parameters()))]).double()
        total += grad / (1 + grad.norm() ** 2).sqrt()
    moved = start - torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    torch.testing.assert_close(moved, total / 6, rtol=1e-4, atol=1e-6)


def test_names_of_clippings() -> None:
    follow("A clipping")
    for name in ("smooth", "flat"):
        with pytest.raises(ValueError, match=f"clipping '{name}' is"):
            register_clipping(name, lambda norms, c: norms)
    with pytest.raises(ValueError, match="clipping must be one of .*'smooth', got 'rough'"):
        Lap2Privacy(eps=1.0, clipping="rough")


class Dilation(nn.Module):
    """max(x, w), summed over rows if there are any."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(6)), first

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.weight) if self.first else torch.maximum(self.weight, x)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_a_ghost_rule(first: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rule = follow("A ghost rule")["maximum"]
    asked = []
    monkeypatch.setitem(RULES._added, "MaximumBackward0", lambda *args: asked.append(1) or rule(*args))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), Dilation(first), nn.Linear(6, 4))
    assert_equals_loop(Step(net), (torch.randn(5, *shape, 6), torch.randint(0, 4, (5, *shape))))
    assert asked
    assert "ghost rule 'MaximumBackward0'" in trusted()


def test_a_container(tmp_path: Path) -> None:
    """Without the registration only the loop takes such a batch."""
    names: dict[str, Any] = {}

    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = module.loss((batch.x, batch.y))
        return found

    def fit(engine: str) -> None:
        pair = names["Pair"]
        data = DataLoader(
            records(12), batch_size=4, collate_fn=lambda rows: pair(*map(torch.stack, zip(*rows, strict=True)))
        )
        privacy = Lap2Privacy(eps=5.0, delta=1e-3, engine=engine)  # type: ignore[arg-type]
        quiet_trainer(L, privacy, max_steps=2, default_root_dir=tmp_path).fit(classifier(L, step=step), data)
        assert privacy.report().engine == engine

    names["Pair"] = type("Pair", (), {"__init__": lambda self, x, y: self.__dict__.update(x=x, y=y)})
    with pytest.raises(UnsupportedModelError, match="Use engine='loop'"):
        fit("vmap")
    names |= follow("A container of tensors")
    for engine in ("vmap", "ghost", "loop"):
        fit(engine)
