"""The zoo: one small configuration of every family that people bring, importable by every engine's tests.

A case is built in evaluation mode, so that dropout does nothing and gradients can be compared; ``tests.zoo.compare``
has the independent per-example loop.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import heads, hub, modules
from tests.zoo.heads import Task


@dataclass(frozen=True)
class Case:
    """One model family.

    Attributes:
        name: shown in tests and in ``docs/models.md``.
        make: builds the module with its ``training_step``.
        batch: ``batch(B)`` gives a batch of B examples; always the same for the same B.
        loss: which loss head.
        needs: packages beyond torch.
        refused: engine name -> a part of the sentence it must refuse with.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: str
    needs: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.needs)

    def build(self, *, train: bool = False) -> nn.Module:
        """The module, seeded: the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().train(train)


def _random(count: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * count + len(shape))
    return torch.randn(count, *shape, generator=generator)


def _labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


def _vectors(width: int, classes: int) -> Callable[[int], Any]:
    return lambda count: (_random(count, width), _labels(count, classes))


def _images(channels: int, side: int, classes: int) -> Callable[[int], Any]:
    return lambda count: (_random(count, channels, side, side), _labels(count, classes))


def _series(count: int) -> Any:
    return _random(count, 7, 5), _labels(count, 4)


def _lengths(count: int) -> Tensor:
    return 3 + torch.arange(count) % 5


def _padded(count: int, length: int = 7) -> Tensor:
    """Masks ``[B, T]``, true where padded."""
    return torch.arange(length)[None] >= _lengths(count)[:, None]


def _table(count: int) -> Any:
    return _random(count, 5), _labels(count, 7), _labels(count, 4), _random(count)


def _tokens(count: int) -> Any:
    tokens = torch.randint(0, 11, (count, 9), generator=torch.Generator().manual_seed(count))
    labels = tokens.clone()
    labels[:, :3] = -100
    labels[torch.arange(count), 3 + torch.arange(count) % 4] = -100
    return tokens, labels


def _bags(count: int) -> Any:
    tokens, _ = _tokens(count)
    return tokens, torch.sigmoid(_random(count, 3)).round()


def _task(net: Callable[[], nn.Module], head: Any) -> Callable[[], nn.Module]:
    return lambda: Task(net(), head)


def _recurrent(cell: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return _task(lambda: modules.Recurrent(cell, **options), heads.classification)


_classify = heads.classification
_ITEM = dict.fromkeys(("vmap", "ghost"), "it reads the value of a tensor")
_HUB = ("transformers",)

PLAIN = [
    Case("MNIST CNN", _task(modules.cnn, _classify), _images(1, 28, 10), "classification"),
    Case(
        "ResNet, GroupNorm", _task(lambda: modules.resnet(modules.group_norm), _classify), _images(3, 12, 5),
        "classification",
    ),
    Case(
        "ResNet, BatchNorm frozen by eval()", _task(lambda: modules.resnet(modules.FrozenBatchNorm), _classify),
        _images(3, 12, 5), "classification",
    ),
    Case(
        "Convolutions, 1d to 3d and transposed", _task(modules.Convolutions, _classify),
        lambda count: (_random(count, 3, 8), _labels(count, 4)), "classification",
    ),
    Case("Tabular MLP, one-hot, unused layer", _task(modules.Tabular, heads.regression), _table, "regression"),
    Case("Module reachable by two paths", _task(modules.TwoPaths, _classify), _vectors(6, 3), "classification"),
    Case("weight_norm", _task(modules.weight_norm, _classify), _vectors(6, 3), "classification"),
    Case(
        "Tied embeddings, raw position parameter", _task(modules.TiedLanguageModel, heads.language_model), _tokens,
        "language model",
    ),
    Case("EmbeddingBag", _task(modules.Bag, heads.multi_label), _bags, "multi-label"),
    Case(
        "TransformerEncoder, padding mask", _task(modules.Encoder, _classify),
        lambda count: (_random(count, 7, 8), _padded(count), _labels(count, 3)), "classification",
    ),
    Case(
        "MultiheadAttention, both masks", _task(modules.Attention, _classify),
        lambda count: (
            _random(count, 7, 8), _random(count, 7, 6), _random(count, 7, 4), _padded(count), _labels(count, 3)
        ),
        "classification",
    ),
    Case("LSTM", _recurrent(nn.LSTM), _series, "classification"),
    Case("LSTM, bidirectional, 2 layers", _recurrent(nn.LSTM, num_layers=2, bidirectional=True), _series,
         "classification"),
    Case("GRU", _recurrent(nn.GRU), _series, "classification"),
    Case("GRU, bidirectional, 2 layers, dropout",
         _recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.2), _series, "classification"),
    Case("RNN", _recurrent(nn.RNN), _series, "classification"),
    Case("RNN, bidirectional, 2 layers", _recurrent(nn.RNN, num_layers=2, bidirectional=True), _series,
         "classification"),
    Case("LSTMCell, GRUCell and RNNCell", _task(modules.Cells, _classify), _series, "classification"),
    Case("LSTM decoder, proj_size, learned first input", _task(modules.Decoder, _classify), _vectors(6, 3),
         "classification"),
    Case("Bilinear", _task(modules.Bilinear, _classify), _vectors(6, 3), "classification"),
    Case("Windows folded into the batch (Swin)", _task(modules.Windows, _classify), _images(3, 8, 5),
         "classification"),
    Case("Standardised weights", _task(modules.Standardised, _classify), _images(3, 9, 5), "classification"),
    Case(
        "LSTM on packed sequences", _task(lambda: modules.Packed(nn.LSTM), _classify),
        lambda count: (_random(count, 7, 5), _lengths(count), _labels(count, 4)), "classification",
        refused=dict.fromkeys(("vmap", "ghost"), "packed sequences"),
    ),
    Case("Branches on data, .item()", _task(modules.Branching, _classify), _vectors(4, 3), "classification",
         refused=_ITEM),
    Case(
        "checkpoint(use_reentrant=False)", _task(lambda: modules.Checkpointed(reentrant=False), _classify),
        _vectors(4, 3), "classification", refused={"vmap": "activation checkpointing"},
    ),
]  # fmt: skip

HUGGING_FACE = [
    Case("ViT (transformers)", hub.vit, hub.images, "classification", _HUB),
    Case("ConvNeXt (transformers)", hub.convnext, hub.images, "classification", _HUB),
    Case("BERT", hub.encoder("BertConfig", "BertForSequenceClassification"), hub.sentences, "classification", _HUB),
    Case("RoBERTa", hub.encoder("RobertaConfig", "RobertaForSequenceClassification"), hub.sentences,
         "classification", _HUB),
    Case(
        "DistilBERT",
        hub.encoder("DistilBertConfig", "DistilBertForSequenceClassification", dim=16, n_layers=2, n_heads=2,
                    hidden_dim=24),
        hub.sentences, "classification", _HUB,
    ),
    Case("ELECTRA", hub.encoder("ElectraConfig", "ElectraForSequenceClassification", embedding_size=12),
         hub.sentences, "classification", _HUB),
    Case("BERT, multi-label",
         hub.encoder("BertConfig", "BertForSequenceClassification", problem_type="multi_label_classification"),
         lambda count: hub.sentences(count) | {"labels": torch.sigmoid(_random(count, 3)).round()}, "multi-label",
         _HUB),
    Case("GPT-2", hub.decoder("GPT2Config", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=24),
         hub.text, "language model", _HUB),
    Case("Llama", hub.decoder("LlamaConfig", "LlamaForCausalLM"), hub.text, "language model", _HUB),
    Case("Mistral, grouped queries", hub.decoder("MistralConfig", "MistralForCausalLM", num_key_value_heads=1),
         hub.text, "language model", _HUB),
    Case("Qwen2", hub.decoder("Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=1), hub.packed_encoding,
         "language model", _HUB),
    Case("OPT", hub.decoder("OPTConfig", "OPTForCausalLM", ffn_dim=24, word_embed_proj_dim=16), hub.text,
         "language model", _HUB),
    Case(
        "T5", hub.decoder("T5Config", "T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=24, num_layers=2,
                          num_heads=2, decoder_start_token_id=0),
        hub.text, "language model", _HUB,
    ),
    Case(
        "BART",
        hub.decoder("BartConfig", "BartForConditionalGeneration", d_model=16, encoder_layers=1, decoder_layers=1,
                    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                    decoder_start_token_id=2),
        hub.text, "language model", _HUB,
    ),
    Case("GPT-2 with LoRA (peft)", hub.lora, hub.text, "language model", ("transformers", "peft")),
]  # fmt: skip

CASES = PLAIN + HUGGING_FACE


def _train_mode_batch_norm() -> nn.Module:
    return Task(modules.resnet(nn.BatchNorm2d), _classify).train()


def _stateless_batch_norm() -> nn.Module:
    return Task(modules.resnet(lambda width: nn.BatchNorm2d(width, track_running_stats=False)), _classify)


def _max_norm() -> nn.Module:
    net = nn.Sequential(nn.Embedding(11, 4, max_norm=1.0), nn.Linear(4, 11))
    return Task(net, heads.language_model)


# built in train mode; no engine may run these
REFUSED = [
    Case("BatchNorm in train mode", _train_mode_batch_norm, _images(3, 12, 5), "classification",
         refused=dict.fromkeys(("vmap", "loop", "ghost"), "nn.GroupNorm")),
    Case("BatchNorm without running statistics", _stateless_batch_norm, _images(3, 12, 5), "classification",
         refused=dict.fromkeys(("vmap", "loop", "ghost"), "nn.GroupNorm")),
    Case(
        "InstanceNorm with running statistics",
        _task(lambda: modules.resnet(lambda width: nn.InstanceNorm2d(width, track_running_stats=True)), _classify),
        _images(3, 12, 5), "classification", refused=dict.fromkeys(("vmap", "loop", "ghost"), "running statistics"),
    ),
    Case("Embedding(max_norm)", _max_norm, _tokens, "language model",
         refused=dict.fromkeys(("vmap", "loop", "ghost"), "max_norm")),
]  # fmt: skip
