"""``python -m lightning_lap2`` is the ``lightning-lap2`` command."""

from __future__ import annotations

import sys

from lightning_lap2.cli import main

if __name__ == "__main__":
    sys.exit(main())
