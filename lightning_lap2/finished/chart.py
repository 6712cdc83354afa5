"""A line chart as inline SVG: no script, no font, nothing that has to be fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_lap2.finished.series import Series

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 28, 48
MOST_POINTS = 800


@dataclass(frozen=True)
class Chart:
    """One curve over steps.

    Attributes:
        title: what screen readers are told.
        label: of the y axis.
        points: (step, value), at least one, steps ascending.
        level: a horizontal line with its label, or ``None``.
    """

    title: str
    label: str
    points: Series
    level: tuple[float, str] | None = None

    def svg(self) -> str:
        """The chart; its colours are the classes ``curve``, ``level``, ``grid`` and ``axis`` of the page's style."""
        last = self.points[-1]
        top = max([value for _, value in self.points] + ([self.level[0]] if self.level else []))
        xs, ys = ticks(self.points[0][0], last[0], whole=True), ticks(0.0, top)
        x = _scale((min(xs[0], self.points[0][0]), max(xs[-1], last[0], xs[0] + 1)), (LEFT, WIDTH - RIGHT))
        y = _scale((0.0, max(ys[-1], top) or 1.0), (HEIGHT - BOTTOM, TOP))
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(self.points))
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *(_horizontal(y(value), f"{value:g}") for value in ys),
            *(
                f'<text class="axis" x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:,.0f}'
                "</text>"
                for step in xs
            ),
            f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>',
            f'<text class="axis" transform="translate(17 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.label)}</text>',
            self._level(y),
            f'<polyline class="curve" points="{path}"/>',
            f'<circle class="end" cx="{x(last[0]):.1f}" cy="{y(last[1]):.1f}" r="4"/>',
            "</svg>",
        ]
        return "\n".join(part for part in parts if part)

    def _level(self, y: _Scale) -> str:
        if self.level is None:
            return ""
        value, label = self.level
        return (
            f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="level-label" x="{LEFT + 6}" y="{y(value) - 6:.1f}">{escape(label)}</text>'
        )


@dataclass(frozen=True)
class _Scale:
    slope: float
    intercept: float

    def __call__(self, value: float) -> float:
        return self.intercept + self.slope * value


def _scale(of: tuple[float, float], to: tuple[float, float]) -> _Scale:
    slope = (to[1] - to[0]) / (of[1] - of[0])
    return _Scale(slope, to[0] - slope * of[0])


def _horizontal(at: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="axis" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight multiples of 1, 2 or 5 times a power of ten that lie in [low, high]; ``low`` alone if it is
    ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if whole:
        unit = max(1.0, unit)
    first, last = math.ceil(low / unit), math.floor(high / unit * (1 + 1e-12))
    return [round(k * unit, 12) for k in range(first, last + 1)]


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most :data:`MOST_POINTS` and one of ``points``, evenly by position, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[k * last // MOST_POINTS] for k in range(MOST_POINTS + 1)]
