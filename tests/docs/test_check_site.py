"""The checker of the built site finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.scripts import script

GOOD = {
    "index.html": '<a href="a.html#there">a</a><img src="i.png"><a href="https://example.org/x">out</a>',
    "a.html": '<h1 id="there">A</h1><a href="#there">up</a><a href="sub/b.html">b</a>',
    "sub/b.html": '<a href="../index.html">home</a><img src="data:image/png;base64,AA">',
    "i.png": "",
}


def check(site: Path, pages: dict[str, str]) -> list[str]:
    for name, html in pages.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(html)
    return script("check_site").check(site.resolve())


def test_a_whole_site_passes(tmp_path: Path) -> None:
    assert check(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("name", "html", "words"),
    [
        ("a.html", '<a href="sub/b.html">b</a>', "index.html: a.html#there has no such anchor"),
        ("sub/b.html", '<a href="c.html">c</a>', "sub/b.html: c.html leads nowhere"),
        ("sub/b.html", '<img src="../j.png">', "sub/b.html: ../j.png leads nowhere"),
        ("sub/b.html", '<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ("lost.html", "", "lost.html is not reached by navigation"),
    ],
)
def test_faults_are_named(name: str, html: str, words: str, tmp_path: Path) -> None:
    (problem,) = check(tmp_path, {**GOOD, name: html})
    assert words in problem
