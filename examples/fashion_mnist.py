"""The CNN of the Lap2 paper (its Table I setting) on Fashion-MNIST or MNIST.

    python examples/fashion_mnist.py --data /usr/share/datasets/fashion-mnist --eps 3.42
    python examples/fashion_mnist.py --data ... --eps 0.13 --mechanism gaussian --csv runs.csv
    python examples/fashion_mnist.py --data ... --augmentations 4 --shift 2 --flip true --engine ghost

``--data`` is a folder with the four idx files, gzipped or not (Debian: ``apt install dataset-fashion-mnist``).
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from data import Jittered, idx, loader
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import TensorBoardLogger
from steptime import StepTime
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lap2 import Lap2Privacy

Optimizer = Literal["adam", "sgd"]
Norm = Literal["none", "group"]
Schedule = Literal["constant", "linear"]


def scheduled(optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int | float) -> Any:
    """What ``configure_optimizers`` returns: with ``"linear"`` the learning rate falls to 0 at step ``steps``."""
    if schedule == "constant":
        return optimizer
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=int(steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


class StandardizedConv2d(nn.Conv2d):
    """Each filter is centred and scaled to unit length before it is used (weight standardization, Qiao et al. 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)  # [out, in, h, w]
        length = torch.linalg.vector_norm(weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / (length + 1e-6), self.bias)


class TutorialCNN(L.LightningModule):
    """The CNN of TF-Privacy's tutorial: 26,010 parameters.

    Args:
        norm: ``"group"`` puts a GroupNorm of 8 groups after each convolution (96 parameters more).
        standardize: weight standardization in the convolutions.
        centre: pixels in [0, 1] become (x - 0.5) / 0.25, with public constants: nothing is fitted on the images.
        schedule: ``"linear"`` lets the learning rate fall to 0 at the Trainer's last step.
        momentum: of ``"sgd"``.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        optimizer: Optimizer = "adam",
        weight_decay: float = 1e-4,
        label_smoothing: float = 0.15,
        momentum: float = 0.9,
        schedule: Schedule = "constant",
        norm: Norm = "none",
        standardize: bool = False,
        centre: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        conv = StandardizedConv2d if standardize else nn.Conv2d

        def after(channels: int) -> list[nn.Module]:
            return [nn.GroupNorm(8, channels)] if norm == "group" else []

        self.net = nn.Sequential(  # [B, 1, 28, 28]
            conv(1, 16, 8, stride=2, padding=3),  # [B, 16, 14, 14]
            *after(16),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),  # [B, 16, 13, 13]
            conv(16, 32, 4, stride=2),  # [B, 32, 5, 5]
            *after(32),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),  # [B, 32, 4, 4]
            nn.Flatten(),  # [B, 512]
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - 0.5) / 0.25 if self.hparams.centre else x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch  # [B, 1, 28, 28], [B]
        return F.cross_entropy(self(x), y, label_smoothing=self.hparams.label_smoothing)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(dim=1) == y).float().mean(), batch_size=len(y))

    def configure_optimizers(self) -> Any:
        hp = self.hparams
        if hp.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters(), lr=hp.lr, momentum=hp.momentum, weight_decay=hp.weight_decay
            )
        else:
            optimizer = torch.optim.Adam(self.parameters(), lr=hp.lr, weight_decay=hp.weight_decay)
        return scheduled(optimizer, hp.schedule, self.trainer.estimated_stepping_batches)


class IdxData(L.LightningDataModule):
    """q = 258 / 60,000 = 0.0043.

    Args:
        shift, flip: train images are shifted by up to so many pixels and mirrored, at random at each fetch.
    """

    def __init__(self, data: str, batch_size: int = 258, shift: int = 0, flip: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train, self.test = idx(data, "train"), idx(data, "t10k")
        if shift or flip:
            self.train = Jittered(self.train.images, self.train.labels, shift=shift, flip=flip)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.test, batch_size=1000)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description="The paper's CNN on Fashion-MNIST or MNIST, privately.")
    parser.add_argument("--data", type=str, required=True, help="folder with the four idx files, .gz or not")
    parser.add_argument("--eps", type=float, default=3.42, help="the budget (the paper: 0.13 to 3.42)")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--mechanism", type=str, default="laplace", help="laplace, gaussian or laplace_l1")
    parser.add_argument("--engine", type=str, default="vmap", help="vmap, ghost or loop")
    parser.add_argument("--steps", type=int, default=5860, help="the noise is calibrated for this many")
    parser.add_argument("--batch-size", type=int, default=258, help="expected: the sampling rate is this / N")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="C")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", type=Optimizer, default="adam")
    parser.add_argument("--augmentations", type=int, default=1, help="views per image, averaged before clipping")
    parser.add_argument("--shift", type=int, default=0, help="views are shifted by up to so many pixels")
    parser.add_argument("--flip", type=bool, default=False, help="views are mirrored half of the time")
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights; the noise ignores it")
    parser.add_argument("--out", type=str, default="runs", help="folder for the TensorBoard log and the report")
    parser.add_argument("--csv", type=str, default=None, help="append a row of results to this file")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec).*")

    L.seed_everything(args.seed, verbose=False)
    privacy = Lap2Privacy(
        args.eps,
        args.delta,
        args.max_grad_norm,
        mechanism=args.mechanism,
        engine=args.engine,
        augmentations=args.augmentations,
    )
    clock = StepTime()
    trainer = L.Trainer(
        max_steps=args.steps,
        check_val_every_n_epoch=5,
        callbacks=[privacy, clock],
        logger=TensorBoardLogger(args.out, name="fashion_mnist"),
        enable_model_summary=False,
    )
    model, data = TutorialCNN(args.lr, args.optimizer), IdxData(args.data, args.batch_size, args.shift, args.flip)
    trainer.fit(model, data)
    row = {
        **{
            key: args[key]
            for key in ("mechanism", "eps", "delta", "engine", "optimizer", "lr", "augmentations", "seed")
        },
        "noise_multiplier": privacy.noise_multiplier,
        "steps": privacy.steps,
        "epsilon": privacy.epsilon,
        "accuracy": trainer.validate(model, data, verbose=False)[0]["val_accuracy"],
        "seconds_per_step": clock.seconds,
    }
    for key, value in row.items():
        print(f"{key:17} {value:.6g}" if isinstance(value, float) else f"{key:17} {value}")
    print(f"{'report':17} {trainer.log_dir}/privacy_report.md")
    if args.csv:
        with Path(args.csv).open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
    return row


if __name__ == "__main__":
    main()
