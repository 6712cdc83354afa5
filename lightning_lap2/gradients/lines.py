"""Which line of the user's an error is about."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch


def line_of(trace: TracebackType | None) -> str:
    """``file:line`` of the innermost frame of an error's traceback outside libraries, else of ``training_step``."""
    return _line(list(traceback.walk_tb(trace)))


def line_now() -> str:
    """The same for the code that is running."""
    return _line(list(_running())[::-1])


def _running() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _line(found: list[tuple[FrameType, int]]) -> str:
    users = [i for i, (frame, _) in enumerate(found) if not _is_library(frame.f_code.co_filename)]
    users = users or [i for i, (frame, _) in enumerate(found) if frame.f_code.co_name == "training_step"]
    index = users[-1] if users else len(found) - 1
    if index < 0:
        return "training_step"
    frame, line = found[index]
    return f"{frame.f_code.co_filename}:{line}"


def _is_library(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or "site-packages" in path.parts:
        return True
    roots = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
    return any(root in path.parents for root in roots)
