"""LightningCLI with the examples' models: everything from YAML or the command line.

    python examples/cli.py fit --config examples/configs/digits.yaml
    python examples/cli.py fit --config examples/configs/fashion_mnist.yaml --data.data DIR
    python examples/cli.py fit --config examples/configs/digits.yaml --print_config
    python examples/cli.py fit --model Digits --data DigitsData --trainer.max_epochs 30 \\
        --trainer.callbacks+=Lap2Privacy --trainer.callbacks.eps=3.0 --trainer.callbacks.delta=1e-4
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from digits import Digits, DigitsData
from fashion_mnist import IdxData, TutorialCNN
from lightning.pytorch.cli import LightningCLI

from lightning_lap2 import Lap2Privacy

# Imported so that the command line knows them by their short names.
__all__ = ["Digits", "DigitsData", "IdxData", "Lap2Privacy", "TutorialCNN"]


def main(argv: Sequence[str] | None = None) -> LightningCLI:
    return LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1,
        args=None if argv is None else list(argv),
    )


if __name__ == "__main__":
    main()
