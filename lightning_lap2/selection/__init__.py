"""Hyperparameter search whose price is part of epsilon: the best of a random number of runs (docs/private-search.md).

The names below are loaded on first use, since a search needs torch and Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lap2._lazy import lazy

if TYPE_CHECKING:
    from lightning_lap2.selection.report import SearchReport
    from lightning_lap2.selection.search import BestRun, PrivateSearch

__all__ = ["BestRun", "PrivateSearch", "SearchReport"]

_HOMES = {
    "BestRun": "lightning_lap2.selection.search",
    "PrivateSearch": "lightning_lap2.selection.search",
    "SearchReport": "lightning_lap2.selection.report",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
