r"""The curves of the five figures, as numbers.

==========  ============================================================================================
``moments`` log M_k of one step against the order k, and its ratio to the Gaussian's
``wall``    :math:`|d \log m / d \log \varepsilon|`: by how many per cent the noise falls when the budget
            grows by one per cent. Close to 0, more budget buys no less noise
``delta``   smallest provable delta after T steps against epsilon, at one noise multiplier
``clip``    epsilon after T steps against C at a fixed scale b, and the order of the moments that gives it
``snr``     C / b, and C over the standard deviation, of noise calibrated to epsilon
==========  ============================================================================================

``wall`` and ``snr`` are read off the same sweep: m runs between the multipliers calibrated for the two ends of the
epsilon axis, and epsilon is computed at each, which is one evaluation per point instead of a calibration.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant, UnsoundBoundWarning, log_moments
from lightning_lap2.figures.methods import GAUSSIAN, LAP2, Method, deviation, signal_to_noise, smallest_multiplier
from lightning_lap2.figures.model import Curve, Figure, Panel, Setting

METHODS = (*LAP2, GAUSSIAN)
EQUAL_DEVIATION = Method("Gaussian of equal standard deviation", "gaussian", "tight", scaled=math.sqrt(2.0))

Notify = Callable[[str], None]
Sweep = dict[Method, tuple[list[float], list[float]]]
"""For each method the noise multipliers, rising, and what each costs."""


def build(names: Iterable[str], setting: Setting, notify: Notify = lambda _: None) -> list[Figure]:
    """The figures called ``names`` (of :data:`FIGURES`), sweeps they share computed once.

    Args:
        setting: the plan and the axes.
        notify: told, in words, before each curve that takes seconds.

    Raises:
        ValueError: an unknown name.
    """
    wanted = [_validate.choice("figure", name, FIGURES) for name in names]
    sweeps: list[Sweep] = []

    def sweep() -> Sweep:
        if not sweeps:
            sweeps.append({method: _sweep(method, setting, notify) for method in METHODS})
        return sweeps[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundBoundWarning)  # the curve's label says it
        return [FIGURES[name](setting, notify, sweep) for name in wanted]


def _moments(setting: Setting, notify: Notify, sweep: Callable[[], Sweep]) -> Figure:
    grid = np.unique(np.round(np.geomspace(2, setting.max_order, 4 * setting.points)))
    orders = [int(k) for k in grid]
    values = {}
    for method in (*METHODS, EQUAL_DEVIATION):
        notify(f"moments: {method.label}")
        values[method] = log_moments(
            setting.noise_multiplier * method.scaled,
            setting.sample_rate,
            setting.dimension,
            orders,
            bound=method.bound,
            mechanism=method.mechanism,
        )
    x = tuple(map(float, orders))
    curves = tuple(Curve(method, x, tuple(map(float, y))) for method, y in values.items())
    ratios = tuple(
        Curve(method, x, tuple(map(float, y / values[GAUSSIAN]))) for method, y in values.items() if method != GAUSSIAN
    )
    return Figure(
        "moments",
        f"Log-moments of one step at noise multiplier {setting.noise_multiplier:g}",
        _note(setting, steps=False, delta=False),
        (
            Panel("log_moment", "order k", "log M_k", curves),
            Panel("ratio_to_gaussian", "order k", "log M_k over the Gaussian's", ratios, level=(1.0, "Gaussian")),
        ),
    )


def _wall(setting: Setting, notify: Notify, sweep: Callable[[], Sweep]) -> Figure:
    curves = tuple(
        Curve(method, tuple(eps), tuple(map(float, slope(multipliers, eps))))
        for method, (multipliers, eps) in sweep().items()
    )
    label = "|d log scale / d log epsilon|"
    panel = Panel("slope", "epsilon", label, curves, log_y=False, floor=0.0)
    return Figure("wall", "Privacy wall: what a larger epsilon buys in noise", _note(setting), (panel,))


def slope(multipliers: Sequence[float], eps: Sequence[float]) -> np.ndarray:
    """|d log m / d log eps| at each of at least two points, by second-order differences; empty for none."""
    if not eps:
        return np.zeros(0)
    return np.abs(np.gradient(np.log(multipliers), np.log(eps)))


def _delta(setting: Setting, notify: Notify, sweep: Callable[[], Sweep]) -> Figure:
    axis = tuple(map(float, np.geomspace(*setting.eps_range, setting.points)))
    curves = []
    for method in METHODS:
        notify(f"delta: {method.label}, {len(axis)} values")
        accountant = _spent(method, setting.noise_multiplier, setting)
        curves.append(Curve(method, axis, tuple(accountant.delta(eps=eps) for eps in axis)))
    level = (setting.delta, f"delta = {setting.delta:g}")
    panel = Panel("delta", "epsilon", "delta", tuple(curves), level=level, floor=1e-15)
    title = f"Delta at epsilon, noise multiplier {setting.noise_multiplier:g}"
    return Figure("delta", title, _note(setting, delta=False), (panel,))


def _clip(setting: Setting, notify: Notify, sweep: Callable[[], Sweep]) -> Figure:
    axis = tuple(map(float, np.geomspace(*setting.clip_range, setting.points)))
    costs, orders = [], []
    for method in METHODS:
        notify(f"clip: {method.label}, {len(axis)} values")
        spent = [_spent(method, setting.scale / c, setting) for c in axis]
        costs.append(Curve(method, axis, tuple(a.epsilon(delta=setting.delta) for a in spent)))
        orders.append(Curve(method, axis, tuple(a.best_order(setting.delta) for a in spent)))
    return Figure(
        "clip",
        f"Epsilon against the clipping norm, noise of fixed scale {setting.scale:g}",
        _note(setting),
        (
            Panel("epsilon", "clipping norm C", "epsilon", tuple(costs)),
            Panel("best_order", "clipping norm C", "best order of the moments", tuple(orders)),
        ),
    )


def _snr(setting: Setting, notify: Notify, sweep: Callable[[], Sweep]) -> Figure:
    by_scale, by_deviation = [], []
    for method, (multipliers, eps) in sweep().items():
        by_scale.append(Curve(method, tuple(eps), tuple(map(signal_to_noise, multipliers))))
        deviations = [deviation(method.mechanism, m) for m in multipliers]
        by_deviation.append(Curve(method, tuple(eps), tuple(map(signal_to_noise, deviations))))
    factor = setting.sample_rate * math.sqrt(setting.steps)
    return Figure(
        "snr",
        "Signal-to-noise ratio at equal epsilon",
        _note(setting),
        (
            Panel("snr", "epsilon", "C / scale", tuple(by_scale), second=("q sqrt(T) C / scale", factor)),
            Panel("clip_over_std", "epsilon", "C / standard deviation", tuple(by_deviation)),
        ),
    )


def _sweep(method: Method, setting: Setting, notify: Notify) -> tuple[list[float], list[float]]:
    """Multipliers between those calibrated for the ends of the epsilon axis, so that epsilon is spread evenly on a
    log axis: the widest gap is halved until there are enough points."""
    notify(f"epsilon against noise: {method.label}, {setting.points} values")
    low, high = setting.eps_range
    most = smallest_multiplier(method, eps=low, delta=setting.delta, **setting.plan)
    least = smallest_multiplier(method, eps=high, delta=setting.delta, **setting.plan)
    if math.isinf(most) or least == 0.0 or not least < most:
        return [], []

    def cost(multiplier: float) -> float:
        return _spent(method, multiplier, setting).epsilon(delta=setting.delta)

    points = [(m, cost(m)) for m in (least, most)]
    while len(points) < setting.points:
        gaps = [math.log(a[1]) - math.log(b[1]) for a, b in pairwise(points)]
        widest = int(np.argmax(gaps))
        middle = math.sqrt(points[widest][0] * points[widest + 1][0])
        points.insert(widest + 1, (middle, cost(middle)))
    return [m for m, _ in points], [eps for _, eps in points]


def _spent(method: Method, multiplier: float, setting: Setting) -> MajorizedAccountant:
    accountant = MajorizedAccountant(bound=method.bound, mechanism=method.mechanism)
    accountant.step(noise_multiplier=multiplier * method.scaled, **setting.plan)
    return accountant


def _note(setting: Setting, *, steps: bool = True, delta: bool = True) -> str:
    parts = [f"q = {setting.sample_rate:g}"]
    parts += [f"T = {setting.steps:,}"] if steps else []
    parts += [f"n = {setting.dimension:,}"]
    parts += [f"delta = {setting.delta:g}"] if delta else []
    return ", ".join(parts)


FIGURES: dict[str, Callable[[Setting, Notify, Callable[[], Sweep]], Figure]] = {
    "moments": _moments,
    "wall": _wall,
    "delta": _delta,
    "clip": _clip,
    "snr": _snr,
}
