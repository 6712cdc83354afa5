"""Data sets as tensors in memory: scikit-learn's digits, and any data set in MNIST's idx format."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

# idx magic number: two zero bytes, the type (8 = unsigned byte), the number of dimensions
_UNSIGNED_BYTE = 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Images ``[N, ...]`` and labels ``[N]``; a batch is read by one indexing operation, not N small ones."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:  # asked for by DataLoader, where it exists
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]  # [B, ...], [B]


class Jittered(Rows):
    """Images ``[N, C, H, W]``, each fetch shifted by up to ``shift`` pixels and, with ``flip``, mirrored at random."""

    def __init__(self, images: Tensor, labels: Tensor, *, shift: int = 0, flip: bool = False) -> None:
        super().__init__(images, labels)
        self.shift, self.flip = shift, flip

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = super().__getitems__(indices)
        return jitter(images, self.shift, self.flip), labels


def jitter(images: Tensor, shift: int, flip: bool) -> Tensor:
    """Draws for each image of ``[B, C, H, W]`` by itself; what is shifted in is 0."""
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (shift, shift, shift, shift))
    top, left = torch.randint(0, 2 * shift + 1, (2, count, 1))  # [B, 1] each
    rows, columns = top + torch.arange(height), left + torch.arange(width)  # [B, H], [B, W]
    if flip:
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    image, channel = torch.arange(count), torch.arange(channels)
    return padded[
        image[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]


def collate(records: Any) -> Any:
    """Batches come ready from ``Rows.__getitems__``; a list of single records is stacked."""
    return default_collate(records) if isinstance(records, list) else records


def loader(rows: Rows, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)


def digits() -> tuple[Rows, Rows]:
    """8x8 digits: 1,437 to train on, 360 to test on; images ``[N, 64]`` in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    return Rows(train_x, train_y), Rows(test_x, test_y)


def idx(folder: str | Path, split: str) -> Rows:
    """MNIST, Fashion-MNIST and others in that format (``.gz`` or not): images ``[N, 1, 28, 28]`` in [0, 1].

    Args:
        split: ``"train"`` or ``"t10k"``.
    """
    images = read_idx(find(folder, f"{split}-images-idx3-ubyte"), dimensions=3)  # [N, 28, 28]
    labels = read_idx(find(folder, f"{split}-labels-idx1-ubyte"), dimensions=1)  # [N]
    return Rows(torch.from_numpy(images).unsqueeze(1).float() / 255, torch.from_numpy(labels).long())


def find(folder: str | Path, name: str) -> Path:
    for path in (Path(folder) / name, Path(folder) / f"{name}.gz"):
        if path.exists():
            return path
    raise FileNotFoundError(f"neither {name} nor {name}.gz lies in {folder}")


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """The array of an idx file of unsigned bytes; the header and the length are checked."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if content[:4] != expected:
        raise ValueError(
            f"{path} begins with {content[:4].hex()}, an idx file with {dimensions} dimensions with {expected.hex()}"
        )
    header = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:header], dtype=">u4").astype(int)
    if len(content) - header != shape.prod():
        raise ValueError(f"{path} holds {len(content) - header} values, its header says {'x'.join(map(str, shape))}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()
