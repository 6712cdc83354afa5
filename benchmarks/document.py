"""Measured tables inside a document: between two comments that name the command they came from."""

from __future__ import annotations

from pathlib import Path


def replace_block(path: Path, name: str, text: str) -> None:
    """Puts ``text`` between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` in place of what is there.

    Raises:
        ValueError: the document does not hold the two comments exactly once each, in this order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(end) < content.index(begin):
        raise ValueError(f"{path} must hold {begin!r} and then {end!r}, once each")
    before, _, rest = content.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
