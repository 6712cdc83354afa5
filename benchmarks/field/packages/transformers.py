"""transformers: small models of twenty families in a LightningModule, all hidden states asked for."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import image, random, trainer

_RECORDS, _TOKENS, _WORDS = 12, 10, 64


def _text(index: int) -> dict[str, Any]:
    """Filled up to ``_TOKENS``, as a tokenizer with ``padding="max_length"`` does it."""
    import torch

    length = 5 + index % 5
    ids = torch.randint(5, _WORDS, (_TOKENS,), generator=random(index))
    mask = torch.arange(_TOKENS) < length
    return {"input_ids": torch.where(mask, ids, 1), "attention_mask": mask.long()}


def _classified(index: int) -> dict[str, Any]:
    return {**_text(index), "labels": index % 3}


def _continued(index: int) -> dict[str, Any]:
    import torch

    text = _text(index)
    return {**text, "labels": torch.where(text["attention_mask"].bool(), text["input_ids"], -100)}


def _translated(index: int) -> dict[str, Any]:
    return {**_text(index), "labels": _text(index + 1)["input_ids"]}


def _seen(index: int) -> dict[str, Any]:
    return {"pixel_values": image(index, 32), "labels": index % 3}


def _heard(index: int) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(800, generator=random(index)), "labels": index % 3}


def _module(auto: str, family: str, sizes: dict[str, Any]) -> Any:
    import lightning as L
    import torch
    import transformers

    class Tuned(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.AutoConfig.for_model(family, **sizes)
            self.model = getattr(transformers, auto).from_config(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.model(**batch, output_hidden_states=True)
            self.log("train_loss", output.loss)
            return output.loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Tuned()


def _case(family: str, auto: str, record: Any, sizes: dict[str, Any], **more: Any) -> Case:
    def fit(run: Run) -> Any:
        from torch.utils.data import DataLoader

        loader = DataLoader([record(k) for k in range(_RECORDS)], batch_size=run.batch_size, shuffle=True)
        trainer(run).fit(_module(auto, family, sizes | more), loader)

    return Case(family, fit, "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`", records=_RECORDS)


_ENCODER = {
    "vocab_size": _WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 24, "num_labels": 3, "pad_token_id": 1,
}  # fmt: skip
_DECODER = _ENCODER | {"num_key_value_heads": 1, "head_dim": 8}
_IMAGES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "num_labels": 3,
}  # fmt: skip


def _classifies(family: str, sizes: dict[str, Any] | None = None, **more: Any) -> Case:
    return _case(family, "AutoModelForSequenceClassification", _classified, sizes or _ENCODER, **more)


def _continues(family: str, sizes: dict[str, Any] | None = None, **more: Any) -> Case:
    return _case(family, "AutoModelForCausalLM", _continued, sizes or _DECODER, **more)


PACKAGE = Package(
    name="transformers",
    environment="vision",
    requires=("transformers",),
    torch=TORCH_WITH_VISION,
    cases=(
        _classifies("bert"),
        _classifies("roberta"),
        _classifies("distilbert", {"vocab_size": _WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
                                   "max_position_embeddings": 24, "num_labels": 3, "pad_token_id": 1}),
        _classifies("electra", embedding_size=16),
        _classifies("albert", embedding_size=16),
        _classifies("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        _classifies("mpnet"),
        _classifies("modernbert"),
        _continues("gpt2", {"vocab_size": _WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}),
        _continues("opt", _ENCODER | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
        _continues("llama"),
        _continues("mistral", sliding_window=4),
        _continues("qwen2"),
        _continues("gemma"),
        _continues("phi"),
        _case("t5", "AutoModelForSeq2SeqLM", _translated,
              {"vocab_size": _WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
               "decoder_start_token_id": 0}),
        _case("bart", "AutoModelForSeq2SeqLM", _translated,
              {"vocab_size": _WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
               "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
               "decoder_ffn_dim": 24, "max_position_embeddings": 24, "decoder_start_token_id": 2}),
        _case("vit", "AutoModelForImageClassification", _seen, _IMAGES),
        _case("swin", "AutoModelForImageClassification", _seen,
              {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2],
               "window_size": 4, "num_labels": 3}),
        _case("dinov2", "AutoModelForImageClassification", _seen, _IMAGES | {"mlp_ratio": 2}),
        _case("wav2vec2", "AutoModelForAudioClassification", _heard,
              {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
               "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
               "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
               "classifier_proj_size": 8, "apply_spec_augment": False}),
    ),
)  # fmt: skip
