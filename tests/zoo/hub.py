"""Hugging Face models built from small configurations: nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.heads import HubTask

VOCABULARY = 31
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def encoder(config: str, model: str, **changes: Any) -> Callable[[], nn.Module]:
    """A sequence classifier (3 classes)."""
    return _builder(config, model, SMALL | {"num_labels": 3} | changes)


def decoder(config: str, model: str, **changes: Any) -> Callable[[], nn.Module]:
    return _builder(config, model, SMALL | changes)


def _builder(config: str, model: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return HubTask(getattr(transformers, model)(getattr(transformers, config)(**options)))

    return build


def lora() -> nn.Module:
    """GPT-2 with low-rank adapters; everything else is frozen."""
    import peft

    task = decoder("GPT2Config", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=24)()
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        # peft asks for an attribute that transformers is about to rename
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        task.net = peft.get_peft_model(task.net, config)
    for name, parameter in task.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # zero at first, so that lora_A would get no gradient
    return task


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    return HubTask(transformers.ViTForImageClassification(config))


def convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=4, num_labels=3, layer_scale_init_value=0.5
    )
    return HubTask(transformers.ConvNextForImageClassification(config))


def _tokens(count: int, length: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens and masks ``[B, T]``: sequences of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    lengths = torch.randint(4, length + 1, (count, 1), generator=generator)
    mask = (torch.arange(length)[None] < lengths).long()
    return tokens * mask, mask


def sentences(count: int) -> dict[str, Tensor]:
    tokens, mask = _tokens(count)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(count) % 3}


def text(count: int) -> dict[str, Tensor]:
    """Language modelling: padding and the first two positions have no label."""
    tokens, mask = _tokens(count)
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def packed_encoding(count: int) -> Any:
    """The same as a tokenizer returns it."""
    from transformers import BatchEncoding

    return BatchEncoding(text(count))


def images(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        "pixel_values": torch.randn(count, 3, 16, 16, generator=generator),
        "labels": torch.arange(count) % 3,
    }
