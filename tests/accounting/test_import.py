"""The accounting layer stands alone."""

from __future__ import annotations

import subprocess
import sys


def test_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_lap2.accounting as a; acc = a.MajorizedAccountant();"
        "acc.step(noise_multiplier=1.0, sample_rate=.01, dimension=10, steps=10); acc.epsilon(delta=1e-5);"
        "print([m for m in ('torch', 'lightning', 'pytorch_lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
