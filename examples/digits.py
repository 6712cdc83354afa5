"""Train a small network on scikit-learn's handwritten digits, first as usual, then with differential privacy.

    python examples/digits.py                                  # or: make demo
    python examples/digits.py --eps 1 --epochs 60 --engine ghost

``Digits`` is an ordinary LightningModule. The private run differs from the plain one by one callback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from data import digits, loader
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lap2 import Lap2Privacy


class Digits(L.LightningModule):
    """64 -> hidden -> 10."""

    def __init__(self, hidden: int = 32, lr: float = 0.02) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch  # [B, 64], [B]
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 256) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train, self.test = digits()

    def train_dataloader(self) -> DataLoader:
        return loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return loader(self.test, batch_size=len(self.test))


class PrintEpochs(L.Callback):
    """One line per epoch: what has been spent, and what it bought."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        print(
            f"epoch {trainer.current_epoch + 1:3d}   epsilon {metrics['privacy/epsilon']:.4f}   "
            f"accuracy {metrics['val_accuracy']:.1%}"
        )


def fit(name: str, out: str, epochs: int, batch_size: int, callbacks: list[L.Callback]) -> tuple[float, str]:
    """One run, plain or private: the accuracy at its end, and the folder of its log."""
    L.seed_everything(1, verbose=False)  # the same initial weights for both; the private noise ignores it
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=TensorBoardLogger(out, name=name),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), datamodule=DigitsData(batch_size))
    return trainer.callback_metrics["val_accuracy"].item(), trainer.logger.log_dir


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Digits without and with differential privacy.")
    parser.add_argument("--eps", type=float, default=3.0, help="the privacy budget")
    parser.add_argument("--delta", type=float, default=1e-4, help="below 1/N; N is 1,437 here")
    parser.add_argument("--epochs", type=int, default=30, help="of both runs")
    parser.add_argument("--batch-size", type=int, default=256, help="the expected batch size of the private run")
    parser.add_argument("--engine", type=str, default="auto", help="auto, ghost, vmap or loop")
    parser.add_argument("--mechanism", type=str, default="laplace", help="laplace, gaussian or laplace_l1")
    parser.add_argument("--clipping", type=str, default="flat", help="flat, automatic, per_layer or adaptive")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="C; with adaptive clipping where it starts")
    parser.add_argument("--out", type=str, default="demo_logs", help="folder for TensorBoard logs and the report")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec).*")

    print(f"\n--- plain: {args.epochs} epochs")
    plain, _ = fit("plain", args.out, args.epochs, args.batch_size, [])

    print(f"\n--- private: {args.epochs} epochs, epsilon at most {args.eps:g}")
    privacy = Lap2Privacy(
        eps=args.eps,
        delta=args.delta,
        max_grad_norm=args.max_grad_norm,
        mechanism=args.mechanism,
        clipping=args.clipping,
        engine=args.engine,
    )
    private, log_dir = fit("private", args.out, args.epochs, args.batch_size, [privacy, PrintEpochs()])

    print(
        f"""
             accuracy   epsilon
    plain      {plain:6.1%}       inf
    private    {private:6.1%}    {privacy.epsilon:.4f}   (delta {privacy.delta:g}, {privacy.steps} steps)

TensorBoard log  {log_dir}
    open it with {os.path.relpath(sys.executable)} -m tensorboard.main --logdir {args.out}
    and look for privacy/epsilon
privacy report   {log_dir}/privacy_report.md
"""
    )


if __name__ == "__main__":
    main()
