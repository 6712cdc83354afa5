"""The examples as a user runs them: imported from their own folder, in a directory of their own."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import lightning as L
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "plot", "and", "very"]
FOLDERS = (ROOT / "examples", ROOT / "paper")
NAMES = tuple(path.stem for folder in FOLDERS for path in folder.glob("*.py"))
AVERAGES = pytest.mark.skipif(
    not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"), reason="Lightning averages weights since 2.6"
)


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


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    folder = tmp_path / "encoder"
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return str(folder)


@pytest.fixture
def sentences(tmp_path: Path) -> str:
    lines = [f"{'very ' * (i % 4)}{('bad', 'good')[i % 2]} film\t{i % 2}" for i in range(24)]
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path)


@pytest.fixture
def images(tmp_path: Path) -> str:
    from PIL import Image

    draw = np.random.default_rng(0)
    for name, number in (("train.zip", 12), ("test.zip", 3)):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for kind in ("cat", "dog"):
                for i in range(number):
                    file = io.BytesIO()
                    Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "JPEG")
                    archive.writestr(f"{kind}/{i:04}.jpg", file.getvalue())
    return str(tmp_path)
