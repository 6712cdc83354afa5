"""``python paper/X.py`` finds the modules of ``examples/`` too, wherever it is started."""

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
