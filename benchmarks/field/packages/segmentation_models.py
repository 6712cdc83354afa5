"""segmentation-models-pytorch: its models, losses and metrics in the LightningModule of its examples."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import GROUP_NORM, image, random, trainer, with_group_norm

_IMAGES, _SIDE = 12, 64


def _records() -> list[dict[str, Any]]:
    import torch

    return [
        {
            "image": image(k, _SIDE),
            "mask": (torch.rand(1, _SIDE, _SIDE, generator=random(k), dtype=torch.float32) > 0.5).float(),
        }
        for k in range(_IMAGES)
    ]


def _module(make: Any) -> Any:
    import lightning as L
    import segmentation_models_pytorch as smp
    import torch

    class Segmentation(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make(smp)
            self.register_buffer("std", torch.full((1, 3, 1, 1), 0.3))
            self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.5))
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.training_step_outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, mask = batch["image"], batch["mask"]
            assert images.ndim == 4 and images.shape[2] % 32 == 0
            assert mask.max() <= 1.0 and mask.min() >= 0
            logits = self.model((images - self.mean) / self.std)
            loss = self.loss_fn(logits, mask)
            predicted = (logits.sigmoid() > 0.5).float()
            tp, fp, fn, tn = smp.metrics.get_stats(predicted.long(), mask.long(), mode="binary")
            output = {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}
            self.training_step_outputs.append(output)
            return output

        def on_train_epoch_end(self) -> None:
            counts = [torch.cat([out[key] for out in self.training_step_outputs]) for key in ("tp", "fp", "fn", "tn")]
            self.log("train_iou", smp.metrics.iou_score(*counts, reduction="micro"))
            self.training_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=2e-4)

    return Segmentation()


def _case(
    name: str, make: Any, wrote: str, *, replaced: bool = False, refused: str | None = None
) -> Case:  # fmt: skip
    def fit(run: Run) -> Any:
        from torch.utils.data import DataLoader

        module = _module(make)
        if replaced:
            with_group_norm(module)
        trainer(run).fit(module, DataLoader(_records(), batch_size=run.batch_size, shuffle=True))

    return Case(name, fit, wrote, records=_IMAGES, refused=refused)


_INSTANCE = {"type": "instancenorm", "affine": True}
_CALLBACK = "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`"

PACKAGE = Package(
    name="segmentation-models-pytorch",
    environment="vision",
    requires=("segmentation-models-pytorch",),
    torch=TORCH_WITH_VISION,
    cases=(
        _case("Unet resnet18", lambda smp: smp.Unet("resnet18", encoder_weights=None, decoder_use_norm="identity"),
              f"{_CALLBACK}, and {GROUP_NORM} of the encoder", replaced=True),
        _case("Unet mit_b0", lambda smp: smp.Unet("mit_b0", encoder_weights=None, decoder_use_norm=_INSTANCE),
              f'{_CALLBACK}, and `decoder_use_norm={{"type": "instancenorm", "affine": True}}`'),
        _case("FPN efficientnet-b0", lambda smp: smp.FPN("efficientnet-b0", encoder_weights=None),
              f"{_CALLBACK}, and {GROUP_NORM}", replaced=True),
        _case("Segformer mit_b0", lambda smp: smp.Segformer("mit_b0", encoder_weights=None),
              f"{_CALLBACK}, and {GROUP_NORM} of the decoder", replaced=True),
        _case("Unet resnet18 with BatchNorm", lambda smp: smp.Unet("resnet18", encoder_weights=None),
              f"{_CALLBACK} and nothing else.", refused="BatchNorm"),
    ),
)  # fmt: skip
