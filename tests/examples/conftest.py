"""The examples as a user runs them: imported from their own folder, in a directory of their own."""

from __future__ import annotations

import gzip
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "examples", ROOT / "examples" / "paper")
NAMES = tuple(path.stem for folder in FOLDERS for path in folder.glob("*.py"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """``example("digits")`` is the module ``examples/digits.py`` (or one of ``paper/``); it writes to ``tmp_path``."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])  # LightningCLI warns when it has arguments beside pytest's
    hidden = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def mnist_like(tmp_path: Path) -> Path:
    """Two hundred images with a bright row that tells the class; half of the files gzipped."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for split, count in (("train", 200), ("t10k", 60)):
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels] = 255
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)
    return folder
