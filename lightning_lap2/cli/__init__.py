"""The ``lightning-lap2`` command: privacy accounting without training anything; audits and private searches.

Arguments are named as in the callback and the accountant. Results go to stdout, one line or one table, or JSON
with ``--json``; warnings and errors go to stderr, an error as one line with exit status 2.
"""

from __future__ import annotations

from lightning_lap2.cli.entry import main

__all__ = ["main"]
