"""Which weights of a pretrained network are trained, and the head on top of it."""

from __future__ import annotations

from typing import Any, Literal

import _path  # noqa: F401
import lightning as L
import torch
import torch.nn.functional as F
from fashion_mnist import Schedule, scheduled
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

Tune = Literal["head", "lora", "bias", "full"]
Optimizer = Literal["adam", "sgd"]
# Query, key and value under the names that BERT, MPNet, DINOv2 and GPT-2 have for them.
ATTENTION = r".*\.(query|key|value|q_proj|k_proj|v_proj|q|k|v|c_attn)"


def tuning_flags(
    parser: ArgumentParser,
    default: Tune = "head",
    optimizer: Optimizer = "adam",
    schedule: Schedule = "constant",
    *,
    pretrained: bool = True,
) -> None:
    """
    Args:
        pretrained: with the flags that choose which weights below the head are trained.
    """
    parser.add_argument("--optimizer", type=Optimizer, default=optimizer, help="adam suits lora and full")
    parser.add_argument("--schedule", type=Schedule, default=schedule, help="linear: the learning rate falls to 0")
    parser.add_argument("--cache", type=str, default=None, help="keeps what is computed before training")
    if pretrained:
        parser.add_argument("--tune", type=Tune, default=default, help="which weights are trained")
        parser.add_argument("--rank", type=int, default=4, help="of the adapters (--tune lora)")
        parser.add_argument("--backbone-lr", type=float, default=1e-3, help="below the head (--tune lora, full)")


def prepare(backbone: nn.Module, tune: Tune, rank: int) -> nn.Module:
    """The backbone with the chosen weights trainable, and without dropout.

    Args:
        tune: ``"head"``: none of the backbone's; ``"lora"``: adapters of ``rank`` in every attention; ``"bias"``: every
            bias (BiTFiT), of which a network without any is given some; ``"full"``: all.
    """
    backbone.requires_grad_(tune == "full")
    if tune == "lora":
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        transposed = any(isinstance(module, Conv1D) for module in backbone.modules())  # GPT-2
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, fan_in_fan_out=transposed)
        backbone = inject_adapter_in_model(config, backbone)
    if tune == "bias":
        with_biases(backbone)
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return backbone


def with_biases(backbone: nn.Module) -> None:
    """Makes every bias trainable; where there is none (Llama's family), zeros are added to each linear layer's output.

    Not to the output layer's: its bias would be one number per token of the vocabulary.
    """
    biases = [p for name, p in backbone.named_parameters() if name.endswith("bias")]
    if not biases:
        last = backbone.get_output_embeddings()
        for module in backbone.modules():
            if isinstance(module, nn.Linear) and module is not last:
                module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
                biases.append(module.bias)
    for bias in biases:
        bias.requires_grad_()


def unit(x: Tensor) -> Tensor:
    """Each vector scaled by its own length: ``[B, D]`` to ``[B, D]`` of length 1.

    Statistics of the data set would be one more release to pay for.
    """
    return F.normalize(x, dim=-1)


def centred(x: Tensor) -> Tensor:
    """Each vector less its own mean: ``[B, D]``."""
    return x - x.mean(dim=-1, keepdim=True)


class Classifier(L.LightningModule):
    """A linear head on the unit vectors that ``features`` makes of a batch's inputs, and the backbone below it.

    Args:
        width: of the features.
        lr: of the head.
        backbone: trained with it where it has trainable weights; ``None``: the inputs are the features.
        backbone_lr: of the backbone's weights.
        schedule: of the learning rates.
        hidden: units of a layer with bounded activations (tanh) before the linear one; 0: none.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        lr: float,
        *,
        backbone: nn.Module | None = None,
        backbone_lr: float = 1e-3,
        optimizer: Optimizer = "adam",
        schedule: Schedule = "constant",
        hidden: int = 0,
    ) -> None:
        super().__init__()
        self.lr, self.backbone_lr, self.optimizer, self.schedule = lr, backbone_lr, optimizer, schedule
        last = nn.Linear(hidden or width, classes)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), last) if hidden else last
        self.backbone = backbone
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def features(self, inputs: list[Tensor]) -> Tensor:
        """``[B, D]``; here the inputs are features already."""
        return inputs[0]

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return self.head(unit(self.features(inputs)))  # [B, classes]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, y = batch
        return F.cross_entropy(self(inputs), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        *inputs, y = batch
        self.accuracy(self(inputs), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, batch_size=len(y))

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": list(self.head.parameters()), "lr": self.lr}]
        if self.backbone is not None:
            groups.append(
                {"params": [p for p in self.backbone.parameters() if p.requires_grad], "lr": self.backbone_lr}
            )
        groups = [group for group in groups if group["params"]]
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        return scheduled(optimizer, self.schedule, self.trainer.estimated_stepping_batches)


def test_accuracy(model: Classifier, test: Any) -> float:
    tester = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return tester.test(model, test, verbose=False)[0]["accuracy"]
