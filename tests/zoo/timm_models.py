"""The zoo's comparison on models of timm: ``python -m tests.zoo.timm_models [name ...]``.

A command of its own, since timm needs torchvision: ``pip install timm torchvision``. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import warnings

import torch

from lightning_lap2.gradients import UnsupportedModelError
from lightning_lap2.gradients.engines import ENGINES, make_engine
from tests.zoo.compare import worst_error
from tests.zoo.heads import Task, classification

# name -> image side
MODELS = {
    "vit_tiny_patch16_224": 32,
    "deit_tiny_distilled_patch16_224": 32,
    "convnext_atto": 64,
    "mixer_s32_224": 64,
    "resnet18": 64,
    "efficientnet_lite0": 64,
    "swin_tiny_patch4_window7_224": 224,
}
COUNT = 3


def build(name: str, side: int) -> Task:
    """In evaluation mode: BatchNorm frozen, dropout and drop-path off."""
    import timm

    torch.manual_seed(0)
    sized = any(word in name for word in ("vit", "deit", "mixer"))
    options = {"img_size": side} if sized else {}
    return Task(timm.create_model(name, pretrained=False, num_classes=5, **options), classification).eval()


def main(names: list[str]) -> int:
    """Prints a line per model and engine; the number of engines that were wrong."""
    warnings.simplefilter("ignore")
    wrong = 0
    for name in names or list(MODELS):
        side = MODELS[name]
        batch = (torch.randn(COUNT, 3, side, side), torch.arange(COUNT) % 5)
        for engine in ENGINES:
            module = build(name, side)
            try:
                error = worst_error(make_engine(engine, module), module, batch, COUNT, each=False)
                wrong += error >= 1e-5
                print(f"{name:34} {engine:6} largest relative error {error:.1e}", flush=True)
            except UnsupportedModelError as refusal:
                print(f"{name:34} {engine:6} refused: {str(refusal)[:150]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
