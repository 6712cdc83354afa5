"""lightly: its heads, losses and momentum helpers in LightningModules as its documentation has them."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import GROUP_NORM, image, random, trainer, with_group_norm

_IMAGES, _SIDE, _WIDTH = 12, 32, 16


def _records() -> list[Any]:
    """Two views, label and file name, as ``LightlyDataset`` with a transform gives them; the views are made once."""
    import torch

    clean = [image(k, _SIDE) for k in range(_IMAGES)]
    return [
        (
            [x + 0.1 * torch.randn(x.shape, generator=random(100 + 2 * k + view), dtype=x.dtype) for view in range(2)],
            0,
            f"{k}.png",
        )
        for k, x in enumerate(clean)
    ]


def _backbone() -> Any:
    from torch import nn
    from torchvision.models import VisionTransformer

    backbone = VisionTransformer(
        image_size=_SIDE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=_WIDTH, mlp_dim=24
    )  # fmt: skip
    backbone.heads = nn.Identity()
    return backbone


def _base() -> Any:
    import lightning as L
    import torch

    class Base(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = _backbone()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    return Base


def _two_branches(head: str, loss: str) -> Any:
    """SimCLR, VICReg, Barlow Twins: one head on both views, and a loss of both."""

    def make() -> Any:
        from lightly import loss as losses
        from lightly.models.modules import heads

        class TwoBranches(_base()):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.projection_head = getattr(heads, head)(_WIDTH, 16, 8)
                self.criterion = getattr(losses, loss)()

            def training_step(self, batch: Any, batch_index: int) -> Any:
                (x0, x1), _, _ = batch
                z0, z1 = (self.projection_head(self.backbone(x)) for x in (x0, x1))
                return self.criterion(z0, z1)

        return TwoBranches()

    return make


def _simsiam() -> Any:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules.heads import SimSiamPredictionHead, SimSiamProjectionHead

    class SimSiam(_base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.projection_head = SimSiamProjectionHead(_WIDTH, 16, 8)
            self.prediction_head = SimSiamPredictionHead(8, 4, 8)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: Any) -> Any:
            z = self.projection_head(self.backbone(x))
            return z.detach(), self.prediction_head(z)

        def training_step(self, batch: Any, batch_index: int) -> Any:
            (x0, x1), _, _ = batch
            (z0, p0), (z1, p1) = self.forward(x0), self.forward(x1)
            loss = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
            self.log("train_loss_ssl", loss)
            return loss

    return SimSiam()


def _byol(*, in_hook: bool) -> Any:
    def make() -> Any:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad, update_momentum

        class BYOL(_base()):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.projection_head = BYOLProjectionHead(_WIDTH, 16, 8)
                self.prediction_head = BYOLPredictionHead(8, 16, 8)
                for part in (self.backbone, self.projection_head):
                    with_group_norm(part)
                self.backbone_momentum = copy.deepcopy(self.backbone)
                self.projection_head_momentum = copy.deepcopy(self.projection_head)
                deactivate_requires_grad(self.backbone_momentum)
                deactivate_requires_grad(self.projection_head_momentum)
                self.criterion = NegativeCosineSimilarity()

            def update(self) -> None:
                update_momentum(self.backbone, self.backbone_momentum, m=0.99)
                update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if in_hook:
                    self.update()

            def training_step(self, batch: Any, batch_index: int) -> Any:
                if not in_hook:
                    self.update()
                (x0, x1), _, _ = batch
                p0, p1 = (self.prediction_head(self.projection_head(self.backbone(x))) for x in (x0, x1))
                z0, z1 = (self.projection_head_momentum(self.backbone_momentum(x)).detach() for x in (x0, x1))
                return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

        return BYOL()

    return make


def _case(name: str, make: Any, wrote: str = "", refused: str | None = None) -> Case:
    def fit(run: Run) -> Any:
        from torch.utils.data import DataLoader

        trainer(run).fit(with_group_norm(make()), DataLoader(_records(), batch_size=run.batch_size, shuffle=True))

    wrote = f"`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`, and {GROUP_NORM} of the heads{wrote}"
    return Case(name, fit, wrote, records=_IMAGES, refused=refused)


PACKAGE = Package(
    name="lightly",
    environment="vision",
    requires=("lightly",),
    torch=TORCH_WITH_VISION,
    notes="A contrastive loss compares an example with the others of its batch: it has no gradient of one example.",
    cases=(
        _case("SimSiam", _simsiam),
        _case("BYOL, momentum update in on_train_batch_end", _byol(in_hook=True)),
        _case("BYOL", _byol(in_hook=False), refused="writes self.backbone_momentum.class_token in place"),
        _case("SimCLR", _two_branches("SimCLRProjectionHead", "NTXentLoss"),
              refused="no gradient for any example alone"),
        _case("VICReg", _two_branches("VICRegProjectionHead", "VICRegLoss"),
              refused="not on one example alone"),
        _case("Barlow Twins", _two_branches("BarlowTwinsProjectionHead", "BarlowTwinsLoss"),
              refused="not on one example alone"),
    ),
)  # fmt: skip
