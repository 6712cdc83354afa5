"""BLEU, NIST, METEOR, ROUGE-L and CIDEr of sentences with several references each, from the usual packages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import zip_longest
from shutil import which
from typing import Any

NAMES = ("bleu", "nist", "meteor", "rouge_l", "cider")


def scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Of a corpus; words are separated by blanks, as in the E2E data.

    Args:
        references: at least one for each hypothesis.

    Returns:
        ``bleu``: sacreBLEU, 0 to 100, cased, 13a tokens. ``nist``: NLTK, n = 5. ``meteor``: METEOR 1.5 for English with
        its synonyms and paraphrases, which pycocoevalcap brings, 0 to 1; NaN where there is no ``java`` to run it.
        ``rouge_l``: rouge-score's F measure against the best reference, 0 to 1, the mean over hypotheses. ``cider``:
        pycocoevalcap, 0 to 10, with document frequencies of these references.

    Raises:
        ValueError: not one list of references for each hypothesis, or an empty one.
        ModuleNotFoundError: a package is missing.
    """
    if len(hypotheses) != len(references) or not all(references):
        raise ValueError(f"{len(hypotheses)} hypotheses need as many lists of references, none of them empty")
    return {
        "bleu": package("sacrebleu").corpus_bleu(list(hypotheses), list(zip_longest(*references)), force=True).score,
        "nist": nist(hypotheses, references),
        "meteor": meteor(hypotheses, references) if which("java") else math.nan,
        "rouge_l": rouge_l(hypotheses, references),
        "cider": cider(hypotheses, references),
    }


def nist(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    score = package("nltk.translate.nist_score").corpus_nist
    words = [hypothesis.split() for hypothesis in hypotheses]
    order = min(5, max(map(len, words)))  # NLTK divides by the number of n-grams; an order without any adds nothing
    if order == 0:
        return 0.0
    return float(score([[reference.split() for reference in group] for group in references], words, n=order))


def rouge_l(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    scorer = package("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = zip(hypotheses, references, strict=True)
    return sum(scorer.score_multi(group, hypothesis)["rougeL"].fmeasure for hypothesis, group in pairs) / len(
        hypotheses
    )


def meteor(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    score, _ = (
        package("pycocoevalcap.meteor.meteor")
        .Meteor()
        .compute_score(
            {i: [one_line(reference) for reference in group] for i, group in enumerate(references)},
            {i: [one_line(hypothesis)] for i, hypothesis in enumerate(hypotheses)},
        )
    )
    return float(score)


def one_line(sentence: str) -> str:
    """As METEOR's process reads it: in lower case, bars separate fields. An empty sentence would end a line early."""
    return " ".join(sentence.replace("|||", " ").lower().split()) or "."


def cider(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    scorer = package("pycocoevalcap.cider.cider").Cider()
    score, _ = scorer.compute_score(
        {i: [reference.lower() for reference in group] for i, group in enumerate(references)},
        {i: [hypothesis.lower()] for i, hypothesis in enumerate(hypotheses)},
    )
    return float(score)


def package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"scoring needs {name.split('.')[0]}: pip install 'lightning-lap2[paper]'", name=missing.name
        ) from missing
