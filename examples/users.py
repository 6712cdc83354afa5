"""Privacy for a person with all records: 500 newspaper editorials, of which each is some ten sentences by one author.

    pip download --no-deps --no-binary vadersentiment vadersentiment==3.3.2
    tar xzf vaderSentiment-3.3.2.tar.gz && cd vaderSentiment-3.3.2
    tar xzf additional_resources/hutto_ICWSM_2014.tar.gz
    python examples/users.py --sentences hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt \\
        --lexicon vaderSentiment/vader_lexicon.txt

Whether readers found a sentence positive is learnt from a public word list: without privacy, private for one sentence,
and at the same epsilon private for one editorial with all its sentences. Data: Hutto and Gilbert, "VADER", ICWSM 2014.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_lap2 import Lap2Privacy

FEATURES = 8
NEGATIONS = {"not", "no", "never", "nor", "without", "cannot"}


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Features ``[8]`` and label of each sentence; ``editorial`` says where it stands, as ``unit=`` wants it."""

    def __init__(self, lines: Sequence[str], lexicon: dict[str, float]) -> None:
        places, ratings, texts = zip(*(line.split("\t", 2) for line in lines), strict=True)
        self.editorial = [int(place.split("_")[0]) for place in places]
        self.x = torch.tensor([features(text, lexicon) for text in texts])
        self.y = torch.tensor([float(rating) > 0 for rating in ratings]).float()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def features(text: str, lexicon: dict[str, float]) -> list[float]:
    """Of one sentence by itself: what the public word list says of its words, and what stands beside them."""
    words = re.findall(r"[a-z']+", text.lower())
    found = [lexicon[word] for word in words if word in lexicon]
    good, bad = [v for v in found if v > 0], [-v for v in found if v < 0]
    negated = any(word in NEGATIONS or word.endswith("n't") for word in words)
    counts = [sum(good) / 4, sum(bad) / 4, len(good) / 2, len(bad) / 2, len(words) / 25]
    return [*counts, float(negated), float("but" in words), float("?" in text)]


class Logistic(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.net = lr, nn.Linear(FEATURES, 1)
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.net(x)[:, 0], y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def accuracy(
    train: Sentences, test: Sentences, *, batch_size: int, steps: int, lr: float, callbacks: Sequence[Any]
) -> float:
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Logistic(lr)
    trainer.fit(module, DataLoader(train, batch_size=batch_size, shuffle=True))
    with torch.no_grad():
        return float(((module.net(test.x)[:, 0] > 0) == (test.y > 0.5)).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=Path, required=True, help="nytEditorialSnippets_GroundTruth.txt")
    parser.add_argument("--lexicon", type=Path, required=True, help="vader_lexicon.txt")
    parser.add_argument("--eps", type=list[float], default=[0.25, 1.0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.1, help="sampling rate of sentences, and of editorials")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    lines = args.lexicon.read_text(encoding="utf-8").splitlines()
    lexicon = {word: float(valence) for word, valence in (line.split("\t")[:2] for line in lines)}
    sentences = args.sentences.read_text(encoding="latin-1").splitlines()
    split = [int(line.split("_")[0]) % 5 == 0 for line in sentences]  # whole editorials are held out
    train = Sentences([s for s, out in zip(sentences, split, strict=True) if not out], lexicon)
    test = Sentences([s for s, out in zip(sentences, split, strict=True) if out], lexicon)
    editorials = len(set(train.editorial))
    print(f"{len(train)} sentences of {editorials} editorials; {len(test)} held out, {test.y.mean():.1%} positive")

    by_sentence, by_editorial = round(args.rate * len(train)), round(args.rate * editorials)
    ways: list[tuple[str, int, dict[str, Any] | None]] = [("no privacy", by_sentence, None)]
    for eps in args.eps:
        ways.append((f"eps = {eps:g}, one sentence", by_sentence, {"eps": eps}))
        for number in (1, 10):
            unit = {"unit": "editorial", "records_per_unit": number}
            ways.append((f"eps = {eps:g}, one editorial, {number} shown", by_editorial, {"eps": eps, **unit}))
    for name, batch_size, privacy in ways:
        found, multiplier = [], 0.0
        for run in range(args.runs):
            L.seed_everything(run, verbose=False)
            callbacks = [] if privacy is None else [Lap2Privacy(delta=1e-5, clipping="automatic", **privacy)]
            found.append(
                accuracy(train, test, batch_size=batch_size, steps=args.steps, lr=args.lr, callbacks=callbacks)
            )
            multiplier = callbacks[0].noise_multiplier if callbacks else 0.0
        values = torch.tensor(found)
        print(f"{name:36s} noise multiplier {multiplier:6.3f}   accuracy {values.mean():.1%} +- {values.std():.1%}")


if __name__ == "__main__":
    main()
