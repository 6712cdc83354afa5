"""What a frozen network makes of each record, computed once, in chunks that are kept: a stopped run goes on with them.

A chunk is a file of its own in a folder, so nothing is lost but the chunk at work, and the first N records of a data
set in a fixed order are found whatever N was asked for before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZE = 1000


def in_chunks(
    folder: str | None, key: dict[str, Any], count: int, compute: Callable[[slice], Tensor], *, size: int = SIZE
) -> Tensor:
    """``compute(slice(0, count))``, a chunk at a time: ``[count, ...]``.

    Args:
        folder: of the chunks; ``None``: nothing is kept.
        key: what the values depend on, beside the record. It is written into the folder.
        compute: features of these records, each a function of its own record alone.
        size: records in a chunk.

    Raises:
        ValueError: the folder holds chunks made with another key or size.
    """
    if folder is None:
        return compute(slice(0, count))
    kept = Path(folder)
    kept.mkdir(parents=True, exist_ok=True)
    _check(kept / "key.json", json.loads(json.dumps({**key, "chunk": size})))
    return torch.cat([_chunk(kept, slice(i, min(i + size, count)), count, compute) for i in range(0, count, size)])


def _check(file: Path, key: dict[str, Any]) -> None:
    if not file.exists():
        file.write_text(json.dumps(key, indent=1) + "\n")
    elif (found := json.loads(file.read_text())) != key:
        raise ValueError(f"{file.parent} was made with {found}, not {key}: delete it, or name another folder")


def _chunk(folder: Path, chosen: slice, count: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """From its file, where that holds as many records as are asked for."""
    file, wanted = folder / f"{chosen.start:08}.pt", chosen.stop - chosen.start
    if file.exists() and len(found := torch.load(file, weights_only=True)) >= wanted:
        return found[:wanted]
    found = compute(chosen)
    part = file.with_suffix(".part")
    torch.save(found, part)
    part.replace(file)  # a file under its own name is whole
    print(f"{folder.name}: {chosen.stop} of {count}", flush=True)
    return found
