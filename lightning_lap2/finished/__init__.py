"""A finished run, read back from its folder: the privacy report and the curves beside it, as a page and as text.

Needs neither torch nor Lightning; tensorboard is loaded where a folder holds event files.
"""

from __future__ import annotations

from lightning_lap2.finished.page import page
from lightning_lap2.finished.run import FinishedRun, read_run
from lightning_lap2.finished.text import text

__all__ = ["FinishedRun", "page", "read_run", "text"]
