"""The site: these Markdown pages, the README as its front page, an API reference from docstrings, and the tutorial,
which is executed. ``make docs`` builds it; warnings are errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from lightning_lap2 import __version__  # noqa: E402

project = "lightning-lap2"
author = "The lightning-lap2 authors"
copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # copies MathJax into the site: nothing is fetched to read it
]
exclude_patterns = ["_build", "img", "results"]
html_theme = "furo"
html_title = "lightning-lap2"
html_static_path: list[str] = []
templates_path: list[str] = []

# Markdown as GitHub shows it: $...$ and anchors of headings
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 6
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # results.md and others skip a level of headings on purpose

# the tutorial runs at every build
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_execution_in_temp = True
nb_output_stderr = "remove"
nb_merge_streams = True

# every reference must lead somewhere; what other packages define is not looked up, the build is offline
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|lightning|pl|L|np|numpy|npt|collections|pathlib|optional|trainer)\b.*"),
    (r"py:class", r"(Array|Blocks|Bound|Norm|RegisteredClipper)"),  # names of types
    (r"py:class", r"lightning_lap2\.gradients\.ghost\.\w+\.(Use|Scope|Term)"),  # see extending.md
    (r"py:class", r"lightning_lap2\.callback\.hooks\.Lap2Hooks"),  # Lap2Privacy of whichever namespace
]
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def _front_page(app: Any, docname: str, source: list[str]) -> None:
    """The README before the list of pages in index.md, its links seen from this folder."""
    if docname != "index":
        return
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("(CHANGELOG.md)", "(docs/changelog.md)")
    source[0] = re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/|#|\w+:)", "](../", readme)) + "\n" + source[0]


def _folders_are_no_files(app: Any, docname: str, source: list[str]) -> None:
    """A link to a folder of the repository shows its text: files are copied into the site, folders are not."""

    def plain(link: re.Match[str]) -> str:
        return link[1] if (DOCS / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^][]+)\]\((\.\./[^)#]+)\)", plain, source[0])


def _as_napoleon_reads(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Attributes that share an entry get one each: napoleon would take all but the last for types."""
    shared = re.compile(r"^(\s+)((?:\w+, )+\w+): (.*)$")
    start = lines.index("Attributes:") if "Attributes:" in lines else len(lines)
    for number in range(start, len(lines)):
        if match := shared.match(lines[number]):
            indent, names, text = match.groups()
            lines[number] = "\n".join(f"{indent}{each}: {text}" for each in names.split(", "))
    lines[:] = "\n".join(lines).split("\n")


def _no_types_from_words(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What stands before a colon in the first line of a property's docstring: napoleon took it for a type."""
    if what not in ("property", "attribute", "data"):
        return
    for number, line in enumerate(lines):
        if line.startswith(":type: "):
            del lines[number]
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            return


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_napoleon_reads, priority=100)
    app.connect("autodoc-process-docstring", _no_types_from_words, priority=900)
    app.connect("source-read", _front_page)
    app.connect("source-read", _folders_are_no_files)
