"""What the commands that train share: a training described like one for LightningCLI."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from lightning_lap2.audit.bench import Training

CONFIG = """
The config names model, data, privacy and trainer as for LightningCLI; privacy holds the arguments of Lap2Privacy:

  model: {class_path: my_package.MyModule, init_args: {...}}
  data: {class_path: my_package.MyDataModule}
  privacy: {eps: 3.0, delta: 1.0e-5}
  trainer: {max_epochs: 30}
"""


def add_config(parser: ArgumentParser) -> None:
    """``--config``."""
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")


def add_training(parser: ArgumentParser) -> None:
    """``model``, ``data``, ``privacy`` and ``trainer``."""
    import lightning.pytorch as pl

    from lightning_lap2.audit.bench import QUIET
    from lightning_lap2.lightning import Lap2Privacy

    parser.add_subclass_arguments(pl.LightningModule, "model", required=True, help="the LightningModule")
    parser.add_subclass_arguments(
        pl.LightningDataModule,
        "data",
        required=False,
        help="the LightningDataModule; without one the module's train_dataloader is used",
    )
    parser.add_class_arguments(Lap2Privacy, "privacy", skip={"noise_seed"}, instantiate=False)
    parser.add_class_arguments(
        pl.Trainer, "trainer", skip={*QUIET, "callbacks", "barebones", "profiler", "plugins"}, instantiate=False
    )
    parser.set_defaults({"trainer.devices": 1})


def make_training(parser: ArgumentParser, config: Namespace) -> Training:
    """The training that ``config`` describes; each call of its ``model`` makes a fresh module."""
    from lightning_lap2.audit.bench import Training

    def model() -> Any:
        return parser.instantiate(Namespace(model=config.model.clone())).model

    return Training(
        model=model,
        loader=_loader(parser, config, model),
        privacy=config.privacy.as_dict(),
        trainer=config.trainer.as_dict(),
    )


def _loader(parser: ArgumentParser, config: Namespace, model: Callable[[], Any]) -> Any:
    """The train loader of the data module, or of the module."""
    if config.get("data") is not None:
        source = parser.instantiate(Namespace(data=config.data.clone())).data
    else:
        source = model()
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()
