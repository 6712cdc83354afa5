"""Table III: SST-2 and QNLI with a pretrained BERT-family encoder, at eps = 3.7, 1.15, 0.92 and 0.53.

    python paper/table3.py --task sst2 --encoder MODEL --data SST2 --cache sst2
    python paper/table3.py --task qnli --encoder MODEL --data QNLI --cache qnli --mechanism gaussian
    python paper/table3.py --task sst2 --encoder ROBERTA --data SST2 --tune lora --physical-batch 32

``MODEL`` is a folder that transformers can load (BERT, RoBERTa, MPNet, ...). ``SST2`` holds ``train.tsv`` and
``test.tsv`` of ``text<TAB>label`` (or GLUE's ``train.tsv`` and ``dev.tsv`` with their header). ``QNLI`` holds GLUE's
``train.tsv`` and ``dev.tsv``; without ``train.tsv``, four fifths of ``dev.tsv`` are trained on and one fifth is tested.

``--tune head`` (default) trains a linear head on frozen features, computed once per record and kept in the folder
``--cache``: the mean over the words; for a pair (u, v) of texts, each read by itself, u, v, |u - v| and u v sqrt(D).
``--tune lora``, ``bias`` and ``full`` run the encoder in every step, on both texts of a pair at once.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import _path  # noqa: F401
import numpy as np
import torch
from chunks import in_chunks
from jsonargparse import Namespace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import Row, fit, flags, summary, sweep
from tuning import Classifier, prepare, test_accuracy, tuning_flags

# One or two texts and a label for each record.
Records = list[tuple[tuple[str, ...], int]]
LABELS = {"entailment": 0, "not_entailment": 1, "0": 0, "1": 1}
TEST_PART = 5  # one record in five, where there is no training file


def read_tsv(file: Path) -> Records:
    """``text<TAB>label``, or GLUE's files for SST-2 and QNLI with their header, whose last column is ``label``.

    Raises:
        ValueError: a line has another number of fields, or a label that is none.
    """
    with file.open(newline="", encoding="utf-8") as opened:
        lines = [line for line in csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE) if line]
    if not lines:
        raise ValueError(f"{file} is empty")
    header = lines.pop(0) if lines[0][-1] == "label" else ["sentence", "label"]
    texts = [i for i, name in enumerate(header) if name in ("question", "sentence")]
    for number, line in enumerate(lines, start=1):
        if len(line) != len(header) or line[-1] not in LABELS:
            raise ValueError(f"{file}, record {number}: expected {len(header)} fields that end in a label, got {line}")
    return [(tuple(line[i] for i in texts), LABELS[line[-1]]) for line in lines]


def splits(folder: str | Path, subset: int | None = None) -> tuple[Records, Records]:
    """Records to train and to test on; the order, and so every subset, is the same each time."""
    folder = Path(folder)
    if (folder / "train.tsv").exists():
        test = read_tsv(next(file for name in ("test.tsv", "dev.tsv") if (file := folder / name).exists()))
        return shuffled(read_tsv(folder / "train.tsv"))[:subset], test
    records = shuffled(read_tsv(folder / "dev.tsv"))
    tested = len(records) // TEST_PART
    return records[tested:][:subset], records[:tested]


def shuffled(records: Records) -> Records:
    return [records[i] for i in np.random.default_rng(0).permutation(len(records))]


def tokenized(folder: str, columns: Sequence[Sequence[str]], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[N, tokens]``; padded to one length, since the longest of a batch would tie records together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    options = {"padding": "max_length", "truncation": True, "max_length": tokens, "return_tensors": "pt"}
    encoded = tokenizer(*(list(column) for column in columns), **options)
    return encoded["input_ids"], encoded["attention_mask"]


def mean_over_words(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` to ``[B, D]``, padding left out."""
    x = encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # [B, T, D]
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@torch.no_grad()
def frozen_features(encoder: nn.Module, folder: str, records: Records, tokens: int) -> Tensor:
    """Features ``[N, D]`` of single texts, ``[N, 4 D]`` of pairs, in bfloat16 arithmetic."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder, columns = encoder.to(device), []
    for column in zip(*(texts for texts, _ in records), strict=True):
        ids, masks = tokenized(folder, [column], tokens)
        x = torch.empty(len(ids), encoder.config.hidden_size)
        for chosen in masks.sum(1).argsort().split(64):  # by length: little padding
            used = int(masks[chosen].sum(1).max())  # no features depend on the padding that is cut off here
            part, mask = ids[chosen, :used].to(device), masks[chosen, :used].to(device)
            with torch.autocast(device.type, torch.bfloat16):
                x[chosen] = mean_over_words(encoder, part, mask).cpu()
        columns.append(torch.nn.functional.normalize(x, dim=-1))
    return columns[0] if len(columns) == 1 else paired(*columns)


def paired(u: Tensor, v: Tensor) -> Tensor:
    """Unit vectors ``[N, D]`` to ``[N, 4 D]``; products get the size that single entries have."""
    return torch.cat([u, v, (u - v).abs(), u * v * u.shape[-1] ** 0.5], dim=-1)


class TextClassifier(Classifier):
    """The head on an encoder that reads the texts in every step; inputs are ids and mask ``[B, T]``."""

    def features(self, inputs: list[Tensor]) -> Tensor:
        return mean_over_words(self.backbone, *inputs)


def load_encoder(folder: str) -> nn.Module:
    from transformers import AutoModel

    # "eager": the attention whose gradients all engines cover; .eval(): no dropout
    encoder = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # not used; its weights would only take noise
    return encoder


def data_sets(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Inputs and labels of the records to train and to test on: features, or ids and masks ``[N, tokens]``."""
    both = dict(zip(("train", "test"), splits(args.data, args.subset), strict=True))
    encoder = load_encoder(args.encoder).requires_grad_(False) if args.tune == "head" else None
    train, test = (TensorDataset(*inputs(args, encoder, records, what)) for what, records in both.items())
    return train, test


def inputs(args: Namespace, encoder: nn.Module | None, records: Records, what: str) -> list[Tensor]:
    """
    Args:
        encoder: computes features; ``None``: it is trained, and reads ids and masks.
    """
    labels = torch.tensor([label for _, label in records])
    if encoder is None:
        return [*tokenized(args.encoder, list(zip(*(texts for texts, _ in records), strict=True)), args.tokens), labels]
    folder = f"{args.cache}/{what}" if args.cache else None
    key = {"encoder": Path(args.encoder).name, "task": args.task, "tokens": args.tokens, "split": what}
    found = in_chunks(
        folder, key, len(records), lambda chosen: frozen_features(encoder, args.encoder, records[chosen], args.tokens)
    )
    return [found, labels]


def part(rows: TensorDataset, chosen: slice) -> TensorDataset:
    return TensorDataset(*(tensor[chosen] for tensor in rows.tensors))


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = flags(
        "SST-2 or QNLI with a pretrained encoder, privately (Table III).",
        eps=(3.7, 1.15, 0.92, 0.53),
        csv_name="table3.csv",
        **{"steps": 30, "batch_size": 2048, "max_grad_norm": 0.5, "lr": 5.0, "averaging": 0.9},
    )
    parser.add_argument("--task", type=Literal["sst2", "qnli"], required=True, help="names the rows")
    parser.add_argument("--encoder", type=str, required=True, help="folder of a BERT-family encoder with its tokenizer")
    parser.add_argument("--data", type=str, required=True, help="folder with the task's .tsv files")
    parser.add_argument("--tokens", type=int, default=128, help="every record is cut or padded to this")
    parser.add_argument("--held-out", type=int, default=0, help="test on so many training records (to choose settings)")
    tuning_flags(parser, optimizer="sgd")
    args = parser.parse_args(argv)
    train, test = data_sets(args)
    if args.held_out:
        test, train = part(train, slice(args.held_out)), part(train, slice(args.held_out, None))
    classes = int(train.tensors[-1].max()) + 1

    def run(mechanism: str, eps: float, seed: int) -> Row:
        options: dict[str, Any] = {name: args[name] for name in ("lr", "optimizer", "schedule", "backbone_lr")}
        if args.tune == "head":
            model = Classifier(train.tensors[0].shape[1], classes, **options)
        else:
            encoder = prepare(load_encoder(args.encoder), args.tune, args.rank)
            model = TextClassifier(encoder.config.hidden_size, classes, backbone=encoder, **options)
        batches = DataLoader(train, args.physical_batch or args.batch_size, shuffle=True)
        spent = fit(model, batches, args, mechanism, eps)
        return {**spent, "accuracy": test_accuracy(model, DataLoader(test, batch_size=256))}

    settings = {"experiment": args.task, "weights": args.encoder}
    names = ("tune", "rank", "tokens", "optimizer", "schedule", "backbone_lr", "held_out")
    rows = sweep(args, {**settings, **{name: args[name] for name in names}}, run)
    print(summary(rows, ["accuracy", "epsilon"]))
    return rows


if __name__ == "__main__":
    main()
