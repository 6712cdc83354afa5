"""Figures as PNG or SVG. matplotlib is imported when something is drawn, and its global state is left alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning_lap2.figures.methods import Method
from lightning_lap2.figures.model import Curve, Figure, Panel

FORMATS = ("png", "svg")

# Okabe and Ito's palette, told apart in every common colour blindness; the dashes tell them apart in grey
_BLUE, _GREEN, _VERMILION, _BLACK, _PURPLE = "#0072B2", "#009E73", "#D55E00", "#000000", "#CC79A7"
_SOLID, _DASHED, _DOTTED, _DASH_DOT, _LOOSE = "-", (0, (6, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (3, 3))
_STYLES: dict[tuple[str, str, bool], dict[str, Any]] = {
    ("laplace", "tight", False): {"color": _BLUE, "linestyle": _SOLID, "linewidth": 2.6},
    ("laplace", "joint", False): {"color": _GREEN, "linestyle": _DASHED, "linewidth": 1.8},
    ("laplace", "published", False): {"color": _VERMILION, "linestyle": _DOTTED, "linewidth": 2.2},
    ("gaussian", "tight", False): {"color": _BLACK, "linestyle": _DASH_DOT, "linewidth": 1.4},
    ("gaussian", "tight", True): {"color": _PURPLE, "linestyle": _LOOSE, "linewidth": 1.6},
}


class MissingMatplotlibError(ImportError):
    """matplotlib is not installed; the message says what to install."""


def draw(figure: Figure, path: Path) -> None:
    """Writes ``figure`` to ``path``, whose suffix is one of :data:`FORMATS`; the folder must exist.

    Raises:
        MissingMatplotlibError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    count = len(figure.panels)
    # the same data give the same bytes: no date, no random ids
    with matplotlib.rc_context({"svg.hashsalt": figure.name, "svg.fonttype": "none", "font.size": 10}):
        layout = ConstrainedLayoutEngine(wspace=0.08)
        canvas = Canvas(figsize=(5.4 * count + (0.6 if count == 1 else 0.0), 4.6), layout=layout)
        axes = canvas.subplots(1, count, squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, figure.panels, strict=True):
            handles |= _draw_panel(axis, panel)
        canvas.suptitle(f"{figure.title}\n", fontsize=12)
        canvas.text(0.5, 0.925, _pretty(figure.note), ha="center", va="center", fontsize=9, color="#444444")
        columns = 4 if count > 1 and len(handles) == 4 else 2 + (count > 1)
        canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        canvas.savefig(path, dpi=150, metadata=metadata)


def check_matplotlib() -> None:
    """Says what to install where matplotlib is missing.

    Raises:
        MissingMatplotlibError: it is.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlibError(
            "drawing needs matplotlib, which is not installed: pip install 'lightning-lap2[plot]' (or pip install "
            "matplotlib). The numbers alone, --json or --csv without --out, need nothing more"
        ) from error


def _draw_panel(axis: Any, panel: Panel) -> dict[str, Any]:
    """Draws one panel and returns its lines by label."""
    handles = {}
    for curve in panel.curves:
        x, y = _visible(curve, panel)
        if x:
            (handles[curve.method.label],) = axis.plot(x, y, **_style(curve.method))
    axis.set_xscale("log" if panel.log_x else "linear")
    axis.set_yscale("log" if panel.log_y else "linear")
    axis.set_xlabel(_pretty(panel.x_label))
    axis.set_ylabel(_pretty(panel.y_label))
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _limit(axis, panel)
    _plain_ticks(axis, panel)
    if panel.level is not None:
        value, text = panel.level
        axis.axhline(value, color="#777777", linewidth=1.0, zorder=0.5)
        axis.annotate(
            _pretty(text),
            (0.995, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8.5,
            color="#555555",
        )
    if panel.second is not None:
        label, factor = panel.second
        second = axis.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
        second.set_ylabel(_pretty(label))
        _plain(second.yaxis)
    return handles


def _style(method: Method) -> dict[str, Any]:
    return _STYLES[method.mechanism, method.bound, method.scaled != 1.0]


def _visible(curve: Curve, panel: Panel) -> tuple[list[float], list[float]]:
    """The points that can be drawn: finite, positive on log axes."""

    def shows(x: float, y: float) -> bool:
        finite = math.isfinite(x) and math.isfinite(y)
        return finite and (x > 0.0 or not panel.log_x) and (y > 0.0 or not panel.log_y)

    pairs = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if shows(x, y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _limit(axis: Any, panel: Panel) -> None:
    """Cuts the y axis at the floor; curves run on below, so their last visible segments keep their slopes."""
    if panel.floor is None:
        return
    points = [(x, y) for curve in panel.curves for x, y in zip(*_visible(curve, panel), strict=True) if y > panel.floor]
    if points:
        top = max(y for _, y in points)
        axis.set_ylim(panel.floor, 3.0 * top if panel.log_y else 1.08 * top)
        axis.set_xlim(right=max(x for x, _ in points) * (1.2 if panel.log_x else 1.0))


def _pretty(text: str) -> str:
    """Symbols for the words that tables use."""
    for word, symbol in (("epsilon", "ε"), ("delta", "δ"), ("sqrt(T)", "√T"), ("M_k", "$M_k$")):
        text = text.replace(word, symbol)
    return text


def _plain_ticks(axis: Any, panel: Panel) -> None:
    """1, 2, 5, 10 instead of powers where an axis spans little."""
    for log, side, limits in ((panel.log_x, axis.xaxis, axis.get_xlim()), (panel.log_y, axis.yaxis, axis.get_ylim())):
        if log and limits[1] < 1e4 * limits[0]:
            _plain(side)


def _plain(side: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    side.set_major_locator(LogLocator(base=10.0, subs=(1.0, 2.0, 5.0)))
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(NullFormatter())
