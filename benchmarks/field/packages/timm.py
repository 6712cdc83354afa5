"""timm: its small test models, one of each kind of architecture, in a LightningModule of the user's."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import GROUP_NORM, image, trainer, with_group_norm

_IMAGES, _SIDE = 12, 64


def _module(name: str, **options: Any) -> Any:
    import lightning as L
    import timm
    import torch
    import torch.nn.functional as F

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model(name, pretrained=False, num_classes=3, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            logits = self.model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            self.log_dict({"train_loss": loss, "train_acc": (logits.argmax(1) == labels).float().mean()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Classifier()


def _case(
    model: str, wrote: str = "", *, name: str = "", replaced: bool = False, refused: str | None = None, **options: Any
) -> Case:
    def fit(run: Run) -> Any:
        from torch.utils.data import DataLoader

        module = _module(model, **options)
        if replaced:
            with_group_norm(module)
        records = [(image(k, _SIDE), k % 3) for k in range(_IMAGES)]
        trainer(run).fit(module, DataLoader(records, batch_size=run.batch_size, shuffle=True))

    callback = "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`"
    return Case(name or model, fit, f"{callback}{wrote}", records=_IMAGES, refused=refused)


PACKAGE = Package(
    name="timm",
    environment="vision",
    requires=("timm",),
    torch=TORCH_WITH_VISION,
    cases=(
        _case("test_vit", img_size=_SIDE),
        _case("test_convnext"),
        _case("test_nfnet"),
        _case("test_mambaout"),
        _case("test_efficientnet_gn"),
        _case("test_resnet", f", and {GROUP_NORM}", name="test_resnet, GroupNorm", replaced=True),
        _case("test_resnet", refused="BatchNorm2d"),
    ),
)
