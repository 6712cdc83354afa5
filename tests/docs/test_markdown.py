"""Documents that can be read: short where a newcomer starts, and in lines that fit."""

from __future__ import annotations

import re

import pytest

from tests.docs.scripts import script
from tests.examples.conftest import ROOT


@pytest.mark.parametrize(("page", "limit"), [("README.md", 1200), ("docs/design.md", 800)])
def test_length(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= limit


@pytest.mark.parametrize("page", ["design.md", "extending.md"])
def test_files_that_are_named_exist(page: str) -> None:
    files = [
        f"/{path.relative_to(ROOT)}"
        for room in ("lightning_lap2", "tests", "docs")
        for path in (ROOT / room).rglob("*.py")
    ]
    named = set(re.findall(r"`?([\w/]+\.py)\b", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert len(named) > 10
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in files)]


def test_lines_are_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    """``python docs/wrap.py`` does it."""
    assert script("wrap").main(["--check"]) == 0, capsys.readouterr().out


def test_wrapping_moves_words_and_nothing_else() -> None:
    wrap = script("wrap")
    text = """# A heading stays as it is

A paragraph with `code that is kept whole` and $a + b$ {0}and so on
over two lines.

* an item {0}
* another

| row | {0} |

    code {0}

```console
$ {0}
```
""".format("word " * 40)
    new = wrap.wrapped(text)
    assert new.split() == text.split()
    assert wrap.wrapped(new) == new
    for line in new.splitlines():
        assert len(line) <= 120 or line.lstrip().startswith(("|", "code", "$"))
    assert "\n  word word" in new and "`code that is kept whole`" in new
