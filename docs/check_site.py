"""Checks a built site without a network: every link and anchor leads somewhere inside it, every page is reached by
navigation from the front page, and no page loads anything from elsewhere.

    python docs/check_site.py docs/_build/html
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

GENERATED = {"genindex.html", "py-modindex.html", "search.html"}
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """Where a page leads and what can be led to.

    Attributes:
        links: targets of ``a``.
        loads: what the browser fetches by itself.
        anchors: ids, and names of ``a``.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), tag == "a" and values.get("name")) if value}
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in LOADS and values.get(LOADS[tag]):
            self.loads.append(str(values[LOADS[tag]]))


def check(site: Path) -> list[str]:
    """What is wrong, one sentence each; empty for a good site."""
    pages = {
        path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if "_static" not in path.parts
    }
    wrong: list[str] = []
    leads: dict[Path, set[Path]] = {}
    for path, page in pages.items():
        here = path.relative_to(site)
        leads[path] = set()
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{here} loads {link} from elsewhere")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{here}: {link} leads nowhere")
            elif target in pages:
                leads[path].add(target)
                if parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                    wrong.append(f"{here}: {link} has no such anchor")
    unreached = set(pages) - _reached(site / "index.html", leads)
    wrong += [
        f"{path.relative_to(site)} is not reached by navigation" for path in unreached if path.name not in GENERATED
    ]
    return sorted(set(wrong))


def _reached(front: Path, leads: dict[Path, set[Path]]) -> set[Path]:
    found, todo = {front}, [front]
    while todo:
        new = leads[todo.pop()] - found
        found |= new
        todo += new
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    problems = check(site)
    print("\n".join(problems) or f"{len(list(site.glob('*.html')))} pages: links, anchors and navigation are whole")
    sys.exit(bool(problems))
