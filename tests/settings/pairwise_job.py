"""Runs in every rank: the two-process cases of ``cases.json`` in OUTPUT (see ``tests.ddp.job``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.ddp import job
from tests.settings import pairwise

if __name__ == "__main__":
    cases = json.loads((Path(sys.argv[1]) / "cases.json").read_text())
    job.main({name: lambda ranks, case=case: pairwise.run(case) for name, case in cases.items()})
