"""anomalib: its models and Folder data, trained by its Engine, which makes the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import image

_IMAGES, _SIDE = 12, 64
_TRAIN = 10
"""What ``Folder`` leaves of them for training."""


def _folder(run: Run) -> Any:
    """Images on disk, as anomalib reads them: those in ``good`` train, those in ``bad`` do not."""
    from anomalib.data import Folder
    from PIL import Image
    from torchvision.transforms.v2 import Resize

    home = Path("images").absolute()
    for kind, count in (("good", _IMAGES), ("bad", 2)):
        (home / kind).mkdir(parents=True, exist_ok=True)
        for k in range(count):
            pixels = (255 * image(k, _SIDE).permute(1, 2, 0)).byte().numpy()
            Image.fromarray(pixels).save(home / kind / f"{k:02}.png")
    return Folder(
        name="made up", root=home, normal_dir="good", abnormal_dir="bad", train_batch_size=run.batch_size,
        num_workers=0, augmentations=Resize((_SIDE, _SIDE)), normal_split_ratio=0.0, test_split_mode="from_dir",
        val_split_mode="same_as_test", seed=0,
    )  # fmt: skip


def _case(kind: str, wrote: str = "", *, name: str = "", refused: str | None = None, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        import anomalib.models
        from anomalib.engine import Engine
        from anomalib.pre_processing import PreProcessor
        from torchvision.transforms.v2 import Resize

        made = getattr(anomalib.models, kind)(
            pre_processor=PreProcessor(transform=Resize((_SIDE, _SIDE))), evaluator=False, visualizer=False,
            pre_trained=False, backbone="resnet18", **options,
        )  # fmt: skip
        if wrote:
            made.pre_processor = None
        engine = Engine(
            callbacks=list(run.callbacks), accelerator="cpu", max_epochs=-(-run.max_steps * run.batch_size // _TRAIN),
            limit_val_batches=0, num_sanity_val_steps=0, enable_progress_bar=False,
        )  # fmt: skip
        engine.fit(model=made, datamodule=_folder(run))

    callback = "`Engine(callbacks=[Lap2Privacy(eps=8.0)]).fit(model, datamodule=Folder(...))`"
    return Case(name or kind, fit, f"{callback}{wrote}", records=_TRAIN, refused=refused)


_ALONE = (
    ", `model.pre_processor = None` and `Folder(..., augmentations=Resize(...))`: images are resized one by one, not "
    "in a hook that gets a whole batch"
)

PACKAGE = Package(
    name="anomalib",
    environment="vision",
    requires=("anomalib",),
    torch=TORCH_WITH_VISION,
    notes="Networks below these models are not pretrained, since nothing was downloaded. Models that are fitted "
    "without gradients (Padim, PatchCore) are not for this library: what they keep of the images gets no noise.",
    cases=(
        _case("Fastflow", _ALONE, flow_steps=2),
        _case("Fre", _ALONE, layer="layer1", input_dim=4096, latent_dim=16),
        _case("Fre", name="Fre, resized in a hook", layer="layer1", input_dim=4096, latent_dim=16,
              refused=r"the batch was changed in a hook .*PreProcessor\.on_train_batch_start"),
    ),
)  # fmt: skip
