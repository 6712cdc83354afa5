"""A progress bar on stderr that shows a fraction and the time, and no numbers of what is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, *, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """A bar that is told the fraction done."""
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(desc=name, total=1.0, bar_format=form, file=sys.stderr, mininterval=1.0, disable=not shown) as bar:

        def progress(fraction: float) -> None:
            bar.update(min(1.0, fraction) - bar.n)

        yield progress
