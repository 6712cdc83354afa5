"""Table II, CIFAR-10 with a pretrained vision transformer, at eps = 0.75 and 0.5.

    python paper/table2_vit.py --vit VIT --data CIFAR10 --cache features
    python paper/table2_vit.py --vit VIT --data CIFAR10 --cache features --mechanism gaussian
    python paper/table2_vit.py --vit VIT --data CIFAR10 --tune lora --subset 2000 --max-steps 20

``VIT`` is a folder of a transformers ViT or DINOv2 model, or an ONNX file of the latter (``vit.py``). ``CIFAR10`` is a
folder with ``train.zip`` and ``test.zip`` of ``class/name.jpg`` (or ``.png``).

``--tune head`` (default) trains a linear head on frozen features, which are computed once per image and kept in the
folder ``--cache`` (``chunks.py``: it can be stopped at any time): a function of each record alone. ``--tune lora`` and
``--tune full`` run the transformer in every step. Settings are chosen with ``--held-out N``: the last N of the training
images in their fixed order are tested on in place of the test set, and not trained on.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
from chunks import in_chunks
from data import Rows, loader
from jsonargparse import Namespace
from torch import Tensor, nn
from training import Row, fit, flags, held_out, summary, sweep
from tuning import Classifier, centred, prepare, test_accuracy, tuning_flags
from vit import load_vit

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, public


def read_images(file: Path, limit: int | None = None) -> Rows:
    """Images ``[N, 3, H, W]`` of unsigned bytes and labels ``[N]`` of a zip file with a folder for each class."""
    from PIL import Image

    with zipfile.ZipFile(file) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith((".jpg", ".png")))
        if not names:
            raise ValueError(f"{file} holds no class/name.jpg or .png")
        classes = sorted({name.split("/")[-2] for name in names})
        chosen = np.random.default_rng(0).permutation(len(names))[:limit].tolist()  # the same whatever the limit
        opened = [np.asarray(Image.open(io.BytesIO(archive.read(names[i]))).convert("RGB")) for i in chosen]
    images = torch.from_numpy(np.stack(opened)).permute(0, 3, 1, 2).contiguous()
    return Rows(images, torch.tensor([classes.index(names[i].split("/")[-2]) for i in chosen]))


def pooled(vit: nn.Module, images: Tensor, pixels: int) -> Tensor:
    """Class token beside the mean over the patches: bytes ``[B, 3, H, W]`` to ``[B, 2 D]``."""
    x = F.interpolate(images.float() / 255, size=(pixels, pixels), mode="bicubic", align_corners=False).clamp(0, 1)
    x = (x - x.new_tensor(MEAN)[:, None, None]) / x.new_tensor(STD)[:, None, None]
    tokens = vit(x).last_hidden_state  # [B, 1 + patches, D]
    return torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1).float()


@torch.no_grad()
def features(vit: nn.Module, images: Tensor, pixels: int) -> Tensor:
    """Features ``[N, 2 D]`` of images ``[N, 3, H, W]``, in bfloat16 arithmetic."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.autocast(device.type, torch.bfloat16):
        return torch.cat([pooled(vit.to(device), part.to(device), pixels).cpu() for part in images.split(32)])


class ViTClassifier(Classifier):
    """The head on a transformer that sees the images in every step."""

    def __init__(self, vit: nn.Module, pixels: int, **options: Any) -> None:
        super().__init__(2 * vit.config.hidden_size, backbone=vit, **options)
        self.pixels = pixels

    def features(self, inputs: list[Tensor]) -> Tensor:
        return centred(pooled(self.backbone, inputs[0], self.pixels))


def data_sets(args: Namespace) -> tuple[Rows, Rows]:
    """What is trained and what is tested on: images, or their features for ``--tune head``."""
    train = read_images(Path(args.data) / "train.zip", args.subset)
    test = None if args.held_out else read_images(Path(args.data) / "test.zip", args.test_subset)
    if args.tune == "head":
        vit = load_vit(args.vit, args.pixels)
        train = head_rows(vit, train, args, "train")
        test = test and head_rows(vit, test, args, "test")
    return (train, test) if test else held_out(train, args.held_out)


def head_rows(vit: nn.Module, rows: Rows, args: Namespace, what: str) -> Rows:
    key = {"vit": Path(args.vit).name, "data": Path(args.data).name, "pixels": args.pixels, "split": what}
    folder = f"{args.cache}/{what}" if args.cache else None
    found = in_chunks(folder, key, len(rows), lambda chosen: features(vit, rows.images[chosen], args.pixels))
    return Rows(centred(found), rows.labels)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = flags(
        "CIFAR-10 with a pretrained vision transformer, privately (Table II).",
        eps=(0.75, 0.5),
        csv_name="table2_vit.csv",
        **{"steps": 100, "batch_size": 8192, "max_grad_norm": 0.5, "lr": 0.1, "averaging": 0.9},
    )
    parser.add_argument("--vit", type=str, required=True, help="folder for transformers, or ONNX file of a Dinov2Model")
    parser.add_argument("--data", type=str, required=True, help="folder with train.zip and test.zip of class/name.jpg")
    parser.add_argument("--pixels", type=int, default=84, help="images are scaled up to this, a multiple of the patch")
    parser.add_argument("--test-subset", type=int, default=None, help="test on so many images")
    parser.add_argument("--held-out", type=int, default=0, help="test on so many training images (to choose settings)")
    tuning_flags(parser)
    args = parser.parse_args(argv)
    head = args.tune == "head"
    train, test = data_sets(args)
    classes = int(train.labels.max()) + 1

    def run(mechanism: str, eps: float, seed: int) -> Row:
        options = {"classes": classes, **{name: args[name] for name in ("lr", "optimizer", "schedule", "backbone_lr")}}
        if head:
            model = Classifier(train.images.shape[1], **options)
        else:
            model = ViTClassifier(
                prepare(load_vit(args.vit, args.pixels), args.tune, args.rank), args.pixels, **options
            )
        batches = loader(train, args.physical_batch or args.batch_size, shuffle=True)
        spent = fit(model, batches, args, mechanism, eps)
        return {**spent, "accuracy": test_accuracy(model, loader(test, 500))}

    settings = {"experiment": "cifar10", "weights": args.vit}
    names = ("tune", "rank", "pixels", "optimizer", "schedule", "backbone_lr", "test_subset", "held_out")
    rows = sweep(args, {**settings, **{name: args[name] for name in names}}, run)
    print(summary(rows, ["accuracy", "epsilon"]))
    return rows


if __name__ == "__main__":
    main()
