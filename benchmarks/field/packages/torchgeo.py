"""torchgeo: its tasks and data modules, trained by Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import GROUP_NORM, image, random, trainer, with_group_norm

_IMAGES, _SIDE = 16, 32


def _data(run: Run, target: str) -> Any:
    """torchgeo's data module, with its augmentation of whole batches, over a data set of the user's."""
    import torch
    from torchgeo.datamodules import NonGeoDataModule
    from torchgeo.datasets import NonGeoDataset

    class Scenes(NonGeoDataset):
        def __init__(self, split: str = "train") -> None:
            self.split = split

        def __len__(self) -> int:
            return _IMAGES

        def __getitem__(self, index: int) -> dict[str, Any]:
            label: Any = torch.tensor(index % 3)
            if target == "mask":
                label = torch.randint(0, 3, (_SIDE, _SIDE), generator=random(index))
            elif target == "value":
                return {
                    "image": 255 * image(index, _SIDE),
                    "label": torch.rand((), generator=random(index), dtype=torch.float32),
                }
            return {"image": 255 * image(index, _SIDE), target: label}

    return NonGeoDataModule(Scenes, batch_size=run.batch_size, num_workers=0)


def _case(
    name: str, task: Any, wrote: str, *, target: str = "label", replaced: bool = False, refused: str | None = None
) -> Case:  # fmt: skip
    def fit(run: Run) -> Any:
        from torchgeo import trainers

        module = task(trainers)
        if replaced:
            with_group_norm(module)
        epochs = -(-run.max_steps * run.batch_size // _IMAGES)
        trainer(run, max_epochs=epochs, max_steps=-1).fit(module, datamodule=_data(run, target))

    return Case(name, fit, wrote, records=_IMAGES, refused=refused)


_CALLBACK = "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])` with a `NonGeoDataModule`"

PACKAGE = Package(
    name="torchgeo",
    environment="vision",
    requires=("torchgeo",),
    torch=TORCH_WITH_VISION,
    cases=(
        _case("ClassificationTask ViT", lambda t: t.ClassificationTask(model="test_vit", num_classes=3),
              f"{_CALLBACK}."),
        _case("ClassificationTask resnet18", lambda t: t.ClassificationTask(model="resnet18", num_classes=3),
              f"{_CALLBACK}, and {GROUP_NORM}.", replaced=True),
        _case("RegressionTask ViT", lambda t: t.RegressionTask(model="test_vit", num_outputs=1), f"{_CALLBACK}.",
              target="value"),
        _case("SemanticSegmentationTask", lambda t: t.SemanticSegmentationTask(
            model="unet", backbone="resnet18", num_classes=3), f"{_CALLBACK}, and {GROUP_NORM}.", target="mask",
              replaced=True),
        _case("SemanticSegmentationTask with BatchNorm", lambda t: t.SemanticSegmentationTask(
            model="unet", backbone="resnet18", num_classes=3), f"{_CALLBACK} and nothing else.", target="mask",
              refused="BatchNorm"),
        _case("SimCLRTask", lambda t: t.SimCLRTask(model="test_vit", size=_SIDE, layers=2, hidden_dim=8, output_dim=8),
              f"{_CALLBACK}, and {GROUP_NORM}.", replaced=True, refused="self.criterion.memory_bank.bank in place"),
        _case("MoCoTask", lambda t: t.MoCoTask(model="test_vit", size=_SIDE, hidden_dim=8, output_dim=8, layers=2),
              f"{_CALLBACK}.", refused="BatchNorm1d"),
        _case("BYOLTask", lambda t: t.BYOLTask(model="test_vit"), f"{_CALLBACK}.", refused="BatchNorm1d"),
    ),
)  # fmt: skip
