"""Layers and extra blocks under one coin, against 50-digit arithmetic."""

from __future__ import annotations

import json
import math
from typing import Any

import mpmath
import pytest

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.accounting.release import Release

Blocks = list[tuple[float, float]]
"""(n, rho) each."""


def kernel(x: Any, k: int) -> Any:
    return mpmath.log((k * mpmath.exp((k - 1) * x) + (k - 1) * mpmath.exp(-k * x)) / (2 * k - 1))


def worst(mechanism: str, blocks: Blocks, k: int) -> Any:
    """log of the k-th moment of the likelihood ratio without sampling, for the worst gradient."""
    if mechanism == "gaussian":
        return sum(mpmath.mpf(k) * (k - 1) / 2 * mpmath.mpf(rho) ** 2 for _, rho in blocks)
    if mechanism == "laplace_l1":
        return sum(kernel(mpmath.mpf(rho), k) for _, rho in blocks)
    return sum(n * kernel(mpmath.mpf(rho) / mpmath.sqrt(n), k) for n, rho in blocks)


def epsilon(mechanism: str, blocks: Blocks, q: float, steps: int, delta: float) -> float:
    """Smallest over integer orders 2..64, written out from ACCOUNTING's formulas."""
    with mpmath.workdps(50):
        table = [mpmath.mpf(0), mpmath.mpf(0), *(worst(mechanism, blocks, j) for j in range(2, 65))]
        q = mpmath.mpf(q)
        found = []
        for k in range(2, 65):
            terms = (mpmath.binomial(k, j) * (1 - q) ** (k - j) * q**j * mpmath.exp(table[j]) for j in range(k + 1))
            spent = steps * mpmath.log(mpmath.fsum(terms))
            found.append(
                spent / (k - 1) + mpmath.log(mpmath.mpf(k - 1) / k) - (mpmath.log(delta) + mpmath.log(k)) / (k - 1)
            )
        return float(min(found))


PLAN: dict[str, Any] = {"sample_rate": 0.05, "dimension": 1045}
LAYERS = [[500, 0.5, 2], [40, 0.5, 1], [5, 0.5, 1]]


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "laplace_l1"])
def test_layers_and_a_count_cost_what_their_blocks_do(mechanism: str) -> None:
    m, count = 1.3, 9.0
    accountant = MajorizedAccountant(mechanism=mechanism)
    accountant.step(noise_multiplier=m, layers=LAYERS, extra_blocks=[(1, count)], steps=300, **PLAN)
    blocks = [(n, share / m) for n, share, number in LAYERS for _ in range(number)] + [(1, 1 / count)]
    want = epsilon(mechanism, blocks, 0.05, 300, 1e-5)
    assert accountant.epsilon(delta=1e-5, orders_only=True) == pytest.approx(want, rel=1e-9)
    assert accountant.epsilon(delta=1e-5) <= want * (1 + 1e-12)


def test_layers_never_cost_more_than_the_whole_and_less_in_l1() -> None:
    def cost(mechanism: str, **layers: Any) -> float:
        accountant = MajorizedAccountant(mechanism=mechanism)
        accountant.step(noise_multiplier=1.0, steps=300, **PLAN, **layers)
        return accountant.epsilon(delta=1e-5, orders_only=True)

    quarters = [[n, 0.25, number] for n, _, number in LAYERS]
    assert 0.9 * cost("laplace") < cost("laplace", layers=LAYERS) < cost("laplace")
    assert cost("gaussian", layers=LAYERS) == pytest.approx(cost("gaussian"), rel=1e-12)
    assert cost("laplace_l1", layers=quarters) < 0.7 * cost("laplace_l1")


@pytest.mark.parametrize("mechanism", ["laplace", "laplace_l1"])
def test_calibration_pays_for_layers_and_count(mechanism: str) -> None:
    beside: dict[str, Any] = {"layers": LAYERS, "extra_blocks": [(1, 9.0)]}
    m = calibrate_noise_multiplier(eps=2.0, delta=1e-5, steps=300, mechanism=mechanism, **PLAN, **beside)
    for multiplier, within in ((m, True), (m * (1 - 1e-4), False)):
        accountant = MajorizedAccountant(mechanism=mechanism)
        accountant.step(noise_multiplier=multiplier, steps=300, **PLAN, **beside)
        assert (accountant.epsilon(delta=1e-5) <= 2.0) is within


def test_blocks_that_cost_too_much_alone_are_named() -> None:
    with pytest.raises(ValueError, match="released before costs more with what is released beside"):
        calibrate_noise_multiplier(eps=0.1, delta=1e-5, steps=300, extra_blocks=[(1, 0.5)], **PLAN)


def test_the_single_coordinate_of_l1_clipping_keeps_its_sharp_route_beside_a_count() -> None:
    alone, both = MajorizedAccountant(mechanism="laplace_l1"), MajorizedAccountant(mechanism="laplace_l1")
    alone.step(noise_multiplier=0.5, steps=300, **PLAN)
    both.step(noise_multiplier=0.5, steps=300, extra_blocks=[(1, 50.0)], **PLAN)
    assert alone.epsilon(delta=1e-5) < both.epsilon(delta=1e-5) < 1.05 * alone.epsilon(delta=1e-5)
    assert both.without_extra_blocks() == alone


def test_state_keeps_layers_and_is_strict_json() -> None:
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.0, layers=LAYERS, steps=3, **PLAN)
    accountant.step(noise_multiplier=1.0, layers=[[math.inf, 1.0, 1]], sample_rate=0.1, dimension=math.inf)
    accountant.step(noise_multiplier=1.0, **PLAN)
    again = MajorizedAccountant.from_state_dict(json.loads(json.dumps(accountant.state_dict(), allow_nan=False)))
    assert again == accountant
    assert vars(again) == vars(accountant)
    assert "layers" not in again.state_dict()["releases"][2], "readable by what knows no layers"


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ([[1000, 0.5, 1]], ValueError, r"layers must hold as many coordinates as dimension=1045.0, got 1000.0"),
        ([[1045, 0.0, 1]], ValueError, r"layers share must be positive and finite, got 0.0"),
        ([[1045, math.nan, 1]], ValueError, "layers share"),
        ([[1045, "1", 1]], TypeError, "layers share must be a number"),
        ([[1045, 1.0, 1.0]], TypeError, "layers count must be an integer"),
        ([[1045, 1.0]], TypeError, r"layers must hold \(dimension, share, count\) tuples"),
        ("abc", TypeError, "layers must be a sequence"),
    ],
)
def test_layers_are_checked(layers: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MajorizedAccountant().step(noise_multiplier=1.0, layers=layers, **PLAN)


def test_edges() -> None:
    assert Release(math.inf, 0.1, 1045, layers=[(1045, 1.0, 1)]).is_free
    assert Release(0.0, 0.1, 1045, layers=[(1045, 1e-3, 1)]).is_bare
    assert Release(1.0, 0.1, 0, layers=[(0, 1.0, 5)]).is_free
    assert not Release(1e308, 0.1, 1045, layers=[(1045, 1e-300, 1)]).is_free, "a cost that underflows is a cost"
