"""Installs the wheel in a folder into an empty virtual environment and tries it there, away from the repository.

    python .ci/try_dist.py dist

What is tried: the README's first fit, the command line with what the README says that it prints, a run's report, and
that the accounting needs no torch. The sdist must build the same wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = os.environ.get("TORCH", "torch==2.13.0")

BEFORE = """
import torch, torch.nn.functional as F
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Model()
train_dataloader = DataLoader(TensorDataset(torch.randn(60, 5), torch.arange(60) % 3), batch_size=20, shuffle=True)
"""
AFTER = """
assert privacy.steps == 30 and 0.9 < privacy.epsilon <= 1.0, privacy.report()
"""


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        venv.create(here / "venv", with_pip=True)
        python = here / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, TORCH)
        run(*pip, wheel)
        empty = here / "empty"
        empty.mkdir()
        first = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.M | re.S)[0]
        (empty / "first_fit.py").write_text(BEFORE + first + AFTER, encoding="utf-8")
        run(python, "first_fit.py", cwd=empty)
        command = python.with_name("lightning-lap2")
        for line, shown in re.findall(r"^\$ lightning-lap2 (.*)\n((?:(?![$`]).*\n)*)", readme, flags=re.M):
            printed = run(command, *line.split(), cwd=empty)
            if printed != shown:
                raise SystemExit(f"lightning-lap2 {line} printed {printed!r}, the README shows {shown!r}")
        torchless = "import sys, lightning_lap2.accounting; sys.exit('torch' in sys.modules)"
        run(python, "-c", torchless, cwd=empty)
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", here / "again", sdist.resolve())
        (again,) = (here / "again").glob("*.whl")
        if contents(again) != contents(wheel):
            raise SystemExit(f"{sdist.name} builds another wheel: {contents(again) ^ contents(wheel)}")
    print(f"{wheel.name} and {sdist.name}: installed, the first fit and the command line run")


def run(*command: object, cwd: Path | None = None) -> str:
    """Its stdout. Nothing of this repository or of the calling environment is on its path."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def contents(wheel: Path) -> set[str]:
    """Names and check sums of what it installs."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {f"{entry.filename} {entry.CRC}" for entry in archive.infolist()}
    names = {entry.split()[0] for entry in entries}
    assert "lightning_lap2/py.typed" in names and not any(name.startswith(("tests", "docs")) for name in names)
    return {entry for entry in entries if not entry.split()[0].endswith("RECORD")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
