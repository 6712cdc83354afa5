"""A figure as data: panels of curves, before anybody draws it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.figures.methods import Method


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The plan that all curves of a figure share.

    Args:
        delta: in (0, 1).
        sample_rate: q in (0, 1].
        steps: T >= 1.
        dimension: n >= 1, or inf.
        noise_multiplier: m = b / C (sigma / C for the Gaussian) where a figure needs one, in (0, inf).
        max_grad_norm: the C at which the noise has that multiplier, in (0, inf).
        eps_range: smallest and largest epsilon on an axis.
        clip_range: smallest and largest C on an axis.
        max_order: largest order of the moments, at most 4096.
        points: values per curve, at least 3.

    Raises:
        TypeError, ValueError: naming the argument, its value and the legal set.
    """

    delta: float = 1e-5
    sample_rate: float = 0.0043
    steps: int = 5860
    dimension: float = 26_010
    noise_multiplier: float = 1.5
    max_grad_norm: float = 1.0
    eps_range: tuple[float, float] = (0.1, 10.0)
    clip_range: tuple[float, float] = (0.1, 3.0)
    max_order: int = 256
    points: int = 25

    def __post_init__(self) -> None:
        _validate.open_unit("delta", self.delta)
        if _validate.probability("sample_rate", self.sample_rate) == 0.0:
            raise ValueError("sample_rate must be positive for a figure, got 0")
        _validate.integer("steps", self.steps, minimum=1)
        _validate.dimension("dimension", _validate.positive("dimension", self.dimension))
        _validate.positive("noise_multiplier", self.noise_multiplier, finite=True)
        _validate.positive("max_grad_norm", self.max_grad_norm, finite=True)
        for name in ("eps_range", "clip_range"):
            low, high = (_validate.positive(name, value, finite=True) for value in getattr(self, name))
            if low >= high:
                raise ValueError(f"{name} must rise, got {getattr(self, name)!r}")
        if _validate.integer("max_order", self.max_order, minimum=3) > 4096:
            raise ValueError(f"max_order must be at most 4096, got {self.max_order!r}")
        _validate.integer("points", self.points, minimum=3)

    @property
    def scale(self) -> float:
        """b (sigma for the Gaussian): the noise multiplier times C."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments of a step and of a calibration."""
        return {"sample_rate": self.sample_rate, "steps": self.steps, "dimension": self.dimension}


@dataclass(frozen=True)
class Curve:
    """y against x for one method; ``inf`` where a bound says nothing."""

    method: Method
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        name: of the quantity, for tables.
        level: (value, text) of a horizontal line, if any.
        second: (label, factor) of a second axis on the right, y times factor, if any.
        floor: where the drawing cuts the y axis off.
    """

    name: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = True
    log_y: bool = True
    level: tuple[float, str] | None = None
    second: tuple[str, float] | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Figure:
    """Panels side by side.

    Attributes:
        name: as on the command line.
        note: what all of it was computed for.
    """

    name: str
    title: str
    note: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, infinities included."""
        return {**asdict(self), "panels": [_panel(panel) for panel in self.panels]}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One flat record per point, for a table."""
        for panel in self.panels:
            for curve in panel.curves:
                for x, y in zip(curve.x, curve.y, strict=True):
                    yield {
                        "figure": self.name,
                        "panel": panel.name,
                        "curve": curve.method.label,
                        "mechanism": curve.method.mechanism,
                        "bound": curve.method.bound,
                        "valid": curve.method.valid,
                        "x": x,
                        "y": y,
                    }


def _panel(panel: Panel) -> dict[str, Any]:
    curves = [
        {
            "label": curve.method.label,
            "mechanism": curve.method.mechanism,
            "bound": curve.method.bound,
            "valid": curve.method.valid,
            "x": list(curve.x),
            "y": list(curve.y),
        }
        for curve in panel.curves
    ]
    return {"name": panel.name, "x_label": panel.x_label, "y_label": panel.y_label, "curves": curves}
