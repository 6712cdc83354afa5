"""The E2E data set of restaurant descriptions, and a byte-pair tokenizer from GPT-2's own files.

A line of the data is ``key : value | key : value||sentence``. Sentences with the same meaning are one another's
references.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END = "<|endoftext|>"
BYTES = 256
NO_LABEL = -100
# Names are open-ended: a model trained from scratch can not copy one that it never saw.
PLACEHOLDERS = {"name": "Xname", "near": "Xnear"}


@dataclass(frozen=True)
class Record:
    meaning: str
    sentence: str

    @property
    def values(self) -> dict[str, str]:
        return dict(part.strip().split(" : ", 1) for part in self.meaning.split("|"))  # type: ignore[misc]


def read_e2e(file: str | Path) -> list[Record]:
    """
    Raises:
        ValueError: a line is not of the form above.
    """
    records = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
        meaning, bar, sentence = line.partition("||")
        if not bar or any(" : " not in part for part in meaning.split("|")):
            raise ValueError(f"{file}, line {number} is no 'key : value | ...||sentence': {line!r}")
        records.append(Record(meaning.strip(), sentence.strip()))
    return records


def delexicalised(record: Record) -> Record:
    """With placeholders for the values of ``name`` and ``near``: a function of this record alone."""
    meaning, sentence = record.meaning, record.sentence
    for key, value in record.values.items():
        if key in PLACEHOLDERS:
            meaning = meaning.replace(f"{key} : {value}", f"{key} : {PLACEHOLDERS[key]}")
            sentence = sentence.replace(value, PLACEHOLDERS[key])
    return Record(meaning, sentence)


def lexicalised(sentence: str, meaning: str) -> str:
    """The placeholders of a generated sentence filled in from the meaning it was generated for."""
    values = Record(meaning, "").values
    for key, placeholder in PLACEHOLDERS.items():
        sentence = sentence.replace(placeholder, values.get(key, ""))
    return sentence


def grouped(records: Sequence[Record]) -> dict[str, list[str]]:
    """Each meaning with all its sentences."""
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(record.meaning, []).append(record.sentence)
    return groups


def bpe_tokenizer(folder: str | Path, merges: int) -> Any:
    """GPT-2's tokenizer with its first ``merges`` merges (it has 50,000), from ``encoder.json`` and ``vocab.bpe``.

    A shorter list gives a smaller vocabulary, and so a smaller model; it is public either way, where one made from the
    training sentences would not be.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lines = (Path(folder) / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split()) for line in lines if line and not line.startswith("#version")][:merges]
    ids = json.loads((Path(folder) / "encoder.json").read_text(encoding="utf-8"))
    vocabulary = {token: i for token, i in ids.items() if i < BYTES + len(pairs)}  # ids follow the order of merges
    if absent := [pair for pair in pairs if "".join(pair) not in vocabulary]:
        raise ValueError(f"{folder}: encoder.json is not the vocabulary of vocab.bpe: it lacks {absent[0]}")
    vocabulary[END] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def prompt(tokenizer: Any, meaning: str) -> list[int]:
    return [*tokenizer(meaning)["input_ids"], tokenizer.eos_token_id]


def encoded(tokenizer: Any, records: Sequence[Record], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and labels ``[N, tokens]``: meaning, end mark, sentence, end mark, padding; labels on the sentence alone.

    All rows have one length, since the longest of a batch would tie records together. Padding comes last, where a
    causal model's earlier positions can not see it.
    """
    end = tokenizer.eos_token_id
    ids, labels = torch.full((len(records), tokens), end), torch.full((len(records), tokens), NO_LABEL)
    for row, record in enumerate(records):
        start = prompt(tokenizer, record.meaning)[: tokens - 2]
        sentence = [*tokenizer(f" {record.sentence}")["input_ids"], end][: tokens - len(start)]
        ids[row, : len(start) + len(sentence)] = torch.tensor(start + sentence)
        labels[row, len(start) : len(start) + len(sentence)] = torch.tensor(sentence)
    return ids, labels
