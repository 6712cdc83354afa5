"""The page and the text of a finished run: whole in themselves, and with the run's own numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_lap2.finished import page, read_run, text
from lightning_lap2.finished.chart import BOTTOM, HEIGHT, LEFT, MOST_POINTS, RIGHT, TOP, WIDTH, Chart, thinned, ticks
from lightning_lap2.report import GENERAL_CAVEATS
from tests.finished.folder import ADAPTIVE, log, write_report_file


class _Reader(HTMLParser):
    """Elements with their attributes, the visible text, and whether all that was opened is closed."""

    VOID = ("meta", "br", "line", "polyline", "circle")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(folder: Path) -> _Reader:
    reader = _Reader(page(read_run(folder)))
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "version_0"
    log(folder, CSVLogger, {"privacy/epsilon": [0.5, 1.0], "privacy/max_grad_norm": [1.0, 0.5]})
    write_report_file(folder, **ADAPTIVE)
    reader = read(folder)
    assert not {tag for tag, _ in reader.elements} & {"script", "link", "img", "iframe", "a"}
    assert not [attrs for _, attrs in reader.elements if {"src", "href", "srcset"} & set(attrs)]
    assert "url(" not in page(read_run(folder)) and "@import" not in page(read_run(folder))


def test_statement_numbers_and_settings_are_there(tmp_path: Path) -> None:
    report = write_report_file(tmp_path)
    seen = read(tmp_path).text
    for words in (report.statement(), "ε spent 2.5 budget 3 δ 1e-05 releases 40", "N 10,000", "n 26,010", "ghost"):
        assert words in seen
    assert "neither in a TensorBoard event file nor in" in seen


def test_own_caveats_stand_before_the_general_ones(tmp_path: Path) -> None:
    own = ["gravest <one>", "graver & two"]
    write_report_file(tmp_path, caveats=[*own, *GENERAL_CAVEATS])
    for seen in (read(tmp_path).text, " ".join(text(read_run(tmp_path)).split())):
        places = [seen.index(caveat) for caveat in (*own, *GENERAL_CAVEATS)]
        assert places == sorted(places)


def test_a_folder_of_several_runs_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "version_0"
    log(folder, CSVLogger, {"privacy/epsilon": [0.5, 1.0]})
    write_report_file(folder)
    write_report_file(folder, "privacy_report_a.json")
    assert "runs logged" not in read(folder).text
    write_report_file(folder, "privacy_report_b.json")
    for seen in (read(folder).text, " ".join(text(read_run(folder)).split())):
        assert "2 runs logged into this folder" in seen


@pytest.mark.parametrize("changes", [{"reproducible": True}, {"bound": "published"}, {"epsilon": "inf", "eps": "inf"}])
def test_what_is_no_guarantee_is_not_called_private(changes: dict[str, Any], tmp_path: Path) -> None:
    write_report_file(tmp_path, **changes)
    reader = read(tmp_path)
    assert "Differentially private" not in reader.text
    (header,) = [attrs for tag, attrs in reader.elements if tag == "header"]
    assert header["class"] in ("reproducible", "invalid", "infinite")


def points(svg: str) -> np.ndarray:
    (drawn,) = re.findall(r'class="curve" points="([^"]+)"', svg)
    return np.array([[float(v) for v in pair.split(",")] for pair in drawn.split()])


def test_the_curve_is_drawn_to_scale() -> None:
    data = tuple((5 * k, 0.3 * k**0.5) for k in range(60))
    drawn = points(Chart("t", "y", data, (3.0, "budget")).svg())
    steps, values = np.array(data).T
    assert np.ptp(drawn[:, 0]) > 0.9 * (WIDTH - LEFT - RIGHT)
    assert np.polynomial.Polynomial.fit(steps, drawn[:, 0], 1)(steps) == pytest.approx(drawn[:, 0], abs=0.06)
    # y = 0 is the floor and the budget the top: heights are in proportion
    assert (HEIGHT - BOTTOM - drawn[:, 1]) == pytest.approx(values / 3.0 * (HEIGHT - BOTTOM - TOP), abs=0.06)


@pytest.mark.parametrize("data", [((0, 0.0),), ((7, 2.5),), ((0, 0.0), (1, 0.0)), ((10**9, 1e-9), (10**9 + 1, 2e-9))])
def test_any_curve_can_be_drawn(data: tuple[tuple[int, float], ...]) -> None:
    drawn = points(Chart("t", "y", data).svg())
    assert len(drawn) == len(data) and np.isfinite(drawn).all()
    assert (drawn >= 0).all() and (drawn <= [WIDTH, HEIGHT]).all()


def test_a_long_curve_is_thinned_between_its_ends() -> None:
    data = tuple((k, float(k)) for k in range(100_000))
    few = thinned(data)
    assert len(few) == MOST_POINTS + 1 and few[0] == data[0] and few[-1] == data[-1]
    assert thinned(few) == few or len(thinned(few)) == MOST_POINTS + 1
    assert list(few) == sorted(set(few))


@pytest.mark.parametrize(("low", "high"), [(0, 3), (0, 179), (0, 1e-3), (0.0, 66.7), (17, 5859)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 8 and low <= found[0] and found[-1] <= high
    unit = found[1] - found[0]
    assert np.allclose(np.diff(found), unit)
    assert f"{unit:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")


def test_whole_ticks_are_whole() -> None:
    assert ticks(0, 2, whole=True) == [0, 1, 2]
    assert ticks(4, 4, whole=True) == [4]
