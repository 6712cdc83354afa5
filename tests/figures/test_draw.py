"""Drawing: files that open, show every curve, and come out the same twice."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from lightning_lap2.figures import Curve, Figure, Panel
from lightning_lap2.figures.draw import MissingMatplotlibError, draw
from lightning_lap2.figures.methods import GAUSSIAN, LAP2

INF = float("inf")


def example(*panels: Panel) -> Figure:
    return Figure("example", "A title", "q = 0.1, delta = 1e-05", panels)


def panel(**options: object) -> Panel:
    x = (0.1, 1.0, 10.0)
    lines = [Curve(m, x, tuple(y * (i + 1) for y in (1e-3, 1e-6, 1e-30))) for i, m in enumerate((*LAP2, GAUSSIAN))]
    return Panel("p", "epsilon", "delta", tuple(lines), **options)  # type: ignore[arg-type]


def texts(path: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_svg_names_every_curve_and_axis(tmp_path: Path) -> None:
    path = tmp_path / "one.svg"
    draw(example(panel(level=(1e-5, "delta = 1e-05"), second=("twice", 2.0))), path)
    shown = texts(path)
    for words in ("A title", "ε", "δ", "twice", "δ = 1e-05", *(m.label for m in (*LAP2, GAUSSIAN))):
        assert any(words in text for text in shown), words


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_bytes_twice(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    for path in (first, second):
        draw(example(panel(), panel(floor=1e-15)), path)
    assert first.read_bytes() == second.read_bytes()


def test_png_is_wide_enough_for_its_panels(tmp_path: Path) -> None:
    sizes = []
    for count in (1, 2):
        path = tmp_path / f"{count}.png"
        draw(example(*[panel()] * count), path)
        with Image.open(path) as image:
            image.verify()
            sizes.append(image.size)
    assert sizes[1][0] > 1.5 * sizes[0][0] >= 1000


def test_what_no_axis_can_show_is_left_out(tmp_path: Path) -> None:
    """Infinite, zero and missing values: the rest is drawn, without a warning."""
    lines = (
        Curve(LAP2[0], (1.0, 2.0, 3.0), (INF, 1.0, 0.0)),
        Curve(LAP2[1], (), ()),
        Curve(GAUSSIAN, (1.0, 2.0), (0.5, 0.25)),
    )
    path = tmp_path / "holes.svg"
    draw(example(Panel("p", "x", "y", lines, floor=1e-3)), path)
    assert GAUSSIAN.label in texts(path)
    assert LAP2[1].label not in texts(path)


def test_pyplot_and_its_backend_are_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lightning_lap2.figures import *; from lightning_lap2.figures.draw "
        "import draw; from lightning_lap2.figures.methods import GAUSSIAN; before = 'matplotlib' in sys.modules;"
        "draw(Figure('f', 't', 'n', (Panel('p', 'x', 'y', (Curve(GAUSSIAN, (1., 2.), (1., 2.)),)),)), "
        f"Path({str(tmp_path / 'f.png')!r})); print(before, 'matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingMatplotlibError, match=r"pip install 'lightning-lap2\[plot\]'"):
        draw(example(panel()), tmp_path / "x.png")
