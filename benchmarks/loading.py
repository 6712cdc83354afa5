"""python -m benchmarks.loading [--batches 40]: what reading records one at a time costs, beside the plain loader.

Milliseconds per loader batch: of CPU time of this process where there are no workers, of wall time where there are
two (workers read while a step runs, so that only what is left of the wait counts). Kinds of data: tensors in memory, a
dict of tensors made in ``__getitem__``, and sentences of unlike lengths padded by a ``collate_fn``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_lap2.sampling import ExampleLoader

SIZE = 5_000


class Dicts(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = torch.randn(SIZE, 3, 32, 32), torch.randint(10, (SIZE,))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.x[index], "label": int(self.y[index])}


class Sentences(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(5, 61, (SIZE,), generator=generator).tolist()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return list(range(1, self.lengths[index] + 1)), index % 2


def pad(records: list[Any]) -> dict[str, Tensor]:
    longest = max(len(tokens) for tokens, _ in records)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in records])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([y for _, y in records])}


KINDS: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "tensors": (lambda: TensorDataset(torch.randn(SIZE, 1, 28, 28), torch.randint(10, (SIZE,))), None, 256),
    "dicts": (Dicts, None, 64),
    "sentences": (Sentences, pad, 32),
}


def per_batch(loader: Any, batches: int, workers: int) -> float:
    clock = time.perf_counter if workers else time.process_time
    iterator = iter(loader)
    next(iterator)
    start, count = clock(), 0
    for _ in iterator:
        count += 1
    return 1e3 * (clock() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'data':10s} {'batch':>5s} {'workers':>7s} {'plain ms':>9s} {'alone ms':>9s}")
    for name, (make, collate, size) in KINDS.items():
        data = make()
        generator = torch.Generator().manual_seed(1)
        lists = [torch.randint(SIZE, (size,), generator=generator).tolist() for _ in range(options.batches)]
        for workers in (0, 2):
            given = {"num_workers": workers, **({} if collate is None else {"collate_fn": collate})}
            found: dict[str, list[float]] = {"plain": [], "alone": []}
            for _ in range(options.rounds):
                plain = DataLoader(data, batch_sampler=lists, **given)  # type: ignore[arg-type]
                alone = ExampleLoader(DataLoader(data, **given), lists)  # type: ignore[arg-type]
                found["plain"].append(per_batch(plain, options.batches, workers))
                found["alone"].append(per_batch(alone, options.batches, workers))
            plain_ms, alone_ms = (statistics.median(found[key]) for key in ("plain", "alone"))
            print(f"{name:10s} {size:5d} {workers:7d} {plain_ms:9.2f} {alone_ms:9.2f}")


if __name__ == "__main__":
    main()
