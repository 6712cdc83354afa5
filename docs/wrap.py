"""Wraps the prose of Markdown files at 120 columns; tables, code, formulas on lines of their own and headings stay.

python docs/wrap.py            # README.md, CHANGELOG.md and docs/*.md
python docs/wrap.py --check    # says which are not wrapped
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
ITEM = re.compile(r"( *)([*+-]|\d+[.)])( +)")
FIXED = re.compile(r"\s*(\||#|<|>|\$\$|!\[|\{|:::)")  # lines that are no prose
BEGINS = re.compile(r"([*+>#=-]|\d+[.)])")  # words that would begin something else at the head of a line
SPAN = re.compile(r"(`+[^`]*`+|\$[^$\n]+\$)\S*|\S+")


def wrapped(text: str) -> str:
    """``text`` with each paragraph and list item that has a line of more than 120 columns filled anew."""
    return "\n".join(line for prose, block in _blocks(text.split("\n")) for line in (_fill(block) if prose else block))


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Paragraphs and list items, which are prose; everything else line by line."""
    block: list[str] = []
    fence = ""
    for line in lines:
        mark = re.match(r"\s*(```+|\$\$)", line)
        if fence or mark or not line.strip() or FIXED.match(line):
            if block:
                yield True, block
            yield False, [line]
            block = []
            if mark and not (mark[1] == "$$" and line.strip().endswith("$$") and len(line.strip()) > 2):
                fence = "" if fence == mark[1] else fence or mark[1]
            elif fence == "$$" and line.strip().endswith("$$"):
                fence = ""
            continue
        if block and ITEM.match(line):
            yield True, block
            block = []
        block.append(line)
    if block:
        yield True, block


def _fill(block: list[str]) -> list[str]:
    item = ITEM.match(block[0])
    code = block[0].startswith("    ") and not item
    if code or all(len(line) <= WIDTH for line in block):
        return block
    indent = " " * (len(item[0]) if item else len(block[0]) - len(block[0].lstrip()))
    words = [match[0] for match in SPAN.finditer(" ".join(line.strip() for line in block))]
    if item:  # the marker is the first word
        words = words[1:]
    lines, line = [], (item[0] if item else indent)
    for word in words:
        if line.strip() and len(line) + 1 + len(word) > WIDTH and not BEGINS.fullmatch(word):
            lines.append(line)
            line = indent + word
        else:
            line += word if not line.strip() or line == (item[0] if item else indent) else f" {word}"
    return [*lines, line]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(argv: list[str]) -> int:
    changed = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := wrapped(text)) != text:
            changed.append(page)
            if "--check" not in argv:
                page.write_text(new, encoding="utf-8")
    for page in changed:
        print(f"{'not wrapped' if '--check' in argv else 'wrapped'}: {page.relative_to(ROOT)}")
    return int("--check" in argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
