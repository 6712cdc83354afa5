"""What the commands that train share: a training described like one for LightningCLI, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.audit.bench import QUIET, Training

FAILED = 2


class Parser(ArgumentParser):
    """Errors are one line on stderr and exit status 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise SystemExit(fail(message))


def find_local_modules() -> None:
    """User modules in the current folder are found, as by ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def add_training(parser: ArgumentParser) -> None:
    """``model``, ``data``, ``privacy`` and ``trainer``."""
    import lightning.pytorch as pl

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


def fail(message: str) -> int:
    """One line on stderr; the exit status."""
    print(f"lightning-lap2: error: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


def run_command(parser: ArgumentParser, argv: Sequence[str], work: Callable[[Namespace], int]) -> int:
    """Parses ``argv``, does ``work`` and returns the exit status: that of ``work``, or :data:`FAILED` on an error."""
    find_local_modules()
    try:
        config = parser.parse_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    try:
        return work(config)
    except (TypeError, ValueError, RuntimeError) as error:
        return fail(str(error))
