"""The numbers behind the figures, against quadrature, dp-accounting and calibration point by point."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate, stats

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.figures import FIGURES, Curve, Figure, Setting, build
from lightning_lap2.figures.curves import EQUAL_DEVIATION, METHODS, slope
from lightning_lap2.figures.methods import GAUSSIAN, LAP2, Method, smallest_multiplier

QUICK = Setting(sample_rate=0.02, steps=60, dimension=50, noise_multiplier=1.2, max_order=12, points=5)
TIGHT, JOINT, PUBLISHED = LAP2


def figure(name: str, setting: Setting = QUICK) -> Figure:
    (found,) = build([name], setting)
    return found


def curve(found: Figure, panel: str, method: Method) -> Curve:
    (axes,) = [p for p in found.panels if p.name == panel]
    (line,) = [c for c in axes.curves if c.method == method]
    return line


def test_every_figure_has_every_bound_and_the_gaussian() -> None:
    figures = build(FIGURES, QUICK)
    assert [f.name for f in figures] == ["moments", "wall", "delta", "clip", "snr"]
    for found in figures:
        for panel in found.panels:
            shown = {c.method for c in panel.curves}
            assert set(LAP2) <= shown
            assert GAUSSIAN in shown or panel.name == "ratio_to_gaussian"
            for line in panel.curves:
                assert len(line.x) == len(line.y) >= QUICK.points
                assert list(line.x) == sorted(line.x, reverse=line.x[0] > line.x[-1])
    assert [m.valid for m in METHODS] == [True, True, False, True]
    assert "not a valid bound" in PUBLISHED.label


@pytest.mark.parametrize("method", [GAUSSIAN, EQUAL_DEVIATION])
def test_gaussian_moments_by_quadrature(method: Method) -> None:
    line = curve(figure("moments"), "log_moment", method)
    q, sigma = QUICK.sample_rate, QUICK.noise_multiplier * method.scaled

    def moment(k: float) -> float:
        def integrand(z: float) -> float:
            ratio = math.exp((2.0 * z - 1.0) / (2.0 * sigma**2))
            return float(stats.norm.pdf(z, scale=sigma)) * (1.0 - q + q * ratio) ** k

        return float(integrate.quad(integrand, -30, 40, limit=400, epsabs=1e-13, epsrel=1e-11)[0])

    for k, value in list(zip(line.x, line.y, strict=True))[:8]:
        assert value == pytest.approx(math.log(moment(k)), rel=1e-6)


def test_moments_are_ordered_as_proven() -> None:
    found = figure("moments")
    tight, joint, gaussian = (np.array(curve(found, "log_moment", m).y) for m in (TIGHT, JOINT, GAUSSIAN))
    assert (tight <= joint).all() and (tight <= gaussian).all()
    ratio = np.array(curve(found, "ratio_to_gaussian", TIGHT).y)
    assert ratio == pytest.approx(tight / gaussian)


def test_delta_of_the_gaussian_by_dp_accounting() -> None:
    line = curve(figure("delta"), "delta", GAUSSIAN)
    single = pld.from_gaussian_mechanism(
        QUICK.noise_multiplier, value_discretization_interval=1e-3, sampling_prob=QUICK.sample_rate
    )
    composed = single.self_compose(QUICK.steps)
    for eps, delta in zip(line.x, line.y, strict=True):
        if delta > 1e-10:
            assert delta == pytest.approx(composed.get_delta_for_epsilon(eps), rel=0.02)


def test_delta_agrees_with_epsilon() -> None:
    """Where a curve crosses delta, epsilon is what the accountant says."""
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=QUICK.noise_multiplier, **QUICK.plan)
    eps = accountant.epsilon(delta=1e-5)
    near = dataclasses.replace(QUICK, eps_range=(eps * 0.99, eps * 1.01), points=3)
    below, at, above = curve(figure("delta", near), "delta", TIGHT).y
    assert below > 1e-5 > above
    assert at == pytest.approx(1e-5, rel=0.02)


@pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")
def test_snr_is_that_of_the_calibrated_noise() -> None:
    found = figure("snr")
    for method in METHODS:
        line = curve(found, "snr", method)
        by_std = curve(found, "clip_over_std", method)
        factor = 1.0 if method == GAUSSIAN else math.sqrt(2.0)
        assert by_std.y == pytest.approx([y / factor for y in line.y])
        for eps, snr in zip(line.x, line.y, strict=True):
            m = calibrate_noise_multiplier(
                eps=eps, delta=QUICK.delta, bound=method.bound, mechanism=method.mechanism, **QUICK.plan
            )
            assert 1.0 / snr == pytest.approx(m, rel=5e-4)
    assert found.panels[0].second == ("q sqrt(T) C / scale", pytest.approx(0.02 * math.sqrt(60)))


def test_wall_is_the_slope_between_calibrated_neighbours() -> None:
    line = curve(figure("wall", dataclasses.replace(QUICK, eps_range=(0.5, 1.0))), "slope", GAUSSIAN)
    plan: dict[str, Any] = {"delta": QUICK.delta, "mechanism": "gaussian", **QUICK.plan}
    for eps, value in list(zip(line.x, line.y, strict=True))[1:-1]:
        low, high = (calibrate_noise_multiplier(eps=eps * f, **plan) for f in (0.9, 1.1))
        assert value == pytest.approx(math.log(low / high) / math.log(1.1 / 0.9), abs=0.01)


def test_slope_of_a_power_law() -> None:
    eps = np.geomspace(0.1, 10.0, 7) ** 1.3  # unevenly spaced is fine
    assert slope(list(3.0 * eps**-0.7), list(eps)) == pytest.approx(0.7)
    assert slope([], []).size == 0


def test_clip_sees_only_the_ratio() -> None:
    setting = dataclasses.replace(QUICK, points=3)
    doubled = dataclasses.replace(setting, max_grad_norm=2.0, clip_range=(0.2, 6.0))
    once, twice = figure("clip", setting), figure("clip", doubled)
    for panel in ("epsilon", "best_order"):
        assert curve(once, panel, TIGHT).y == pytest.approx(curve(twice, panel, TIGHT).y)
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=QUICK.noise_multiplier / 3.0, **QUICK.plan)
    assert curve(once, "epsilon", TIGHT).y[-1] == accountant.epsilon(delta=QUICK.delta)
    assert curve(once, "best_order", TIGHT).y[-1] == accountant.best_order(QUICK.delta)


def test_a_bound_that_says_nothing_gives_no_curve() -> None:
    found = figure("snr", dataclasses.replace(QUICK, dimension=math.inf, points=3))
    assert curve(found, "snr", JOINT).x == ()
    assert len(curve(found, "snr", TIGHT).x) == 3
    assert math.isinf(smallest_multiplier(JOINT, eps=1.0, delta=1e-5, **{**QUICK.plan, "dimension": math.inf}))


def test_shared_sweeps_are_made_once_and_announced() -> None:
    said: list[str] = []
    build(["wall", "snr"], dataclasses.replace(QUICK, points=3), said.append)
    assert [text.split(": ")[1].split(",")[0] for text in said] == [m.label for m in METHODS]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sample_rate": 0.0}, ValueError, "sample_rate must be positive"),
        ({"sample_rate": 2.0}, ValueError, "sample_rate must lie in"),
        ({"delta": 0.0}, ValueError, "delta must lie strictly between"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"steps": 2.5}, TypeError, "steps must be an integer"),
        ({"dimension": 2.5}, ValueError, "dimension must be a non-negative integer or inf"),
        ({"noise_multiplier": math.inf}, ValueError, "noise_multiplier must be positive and finite"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive"),
        ({"eps_range": (1.0, 1.0)}, ValueError, "eps_range must rise"),
        ({"clip_range": (0.0, 1.0)}, ValueError, "clip_range must be positive"),
        ({"max_order": 5000}, ValueError, "max_order must be at most 4096"),
        ({"points": 2}, ValueError, "points must be at least 3"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Setting(**change)


def test_unknown_figure() -> None:
    with pytest.raises(ValueError, match="figure must be one of 'moments'"):
        build(["tables"], QUICK)
