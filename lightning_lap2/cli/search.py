"""``lightning-lap2 search``: a hyperparameter search whose whole price is within epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.cli.parsing import Result, Subcommand
from lightning_lap2.cli.training import add_config

if TYPE_CHECKING:
    from lightning_lap2.selection.search import PrivateSearch

_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
_OWN = {*_QUIET, "callbacks", "default_root_dir", "barebones", "profiler", "plugins"}
_PARTS = ("model", "data", "trainer", "privacy")


def _add_arguments(parser: ArgumentParser) -> None:
    import lightning.pytorch as pl

    from lightning_lap2.lightning import Lap2Privacy
    from lightning_lap2.selection.search import PrivateSearch

    add_config(parser)
    parser.add_argument("--score", type=str, required=True, help="name of a metric logged in validation_step")
    parser.add_argument("--space", type=dict[str, list[Any]], required=True, help="dotted name -> values")
    parser.add_class_arguments(PrivateSearch, "search", skip={"callback", "privacy"}, instantiate=False)
    parser.add_subclass_arguments(pl.LightningModule, "model", required=True, help="the LightningModule")
    parser.add_subclass_arguments(
        pl.LightningDataModule, "data", required=False, help="the LightningDataModule; without one the module's loaders"
    )
    budget = {"eps", "delta", "noise_multiplier", "noise_seed"}
    parser.add_class_arguments(Lap2Privacy, "privacy", skip=budget, instantiate=False)
    parser.add_class_arguments(pl.Trainer, "trainer", skip=_OWN, instantiate=False)
    parser.set_defaults({"trainer.devices": 1})


def _run(parser: ArgumentParser, config: Namespace) -> Result:
    search, train = make_search(parser, config)
    search.run(train, config.space)
    report = search.report()
    return Result(report.to_dict(), str(report))


def make_search(parser: ArgumentParser, config: Namespace) -> tuple[PrivateSearch, Callable[[Any, Any], float]]:
    """The search that ``config`` describes, and the training of one of its configurations.

    Raises:
        ValueError: a name or a value of the space is not one of the config.
    """
    from lightning_lap2.selection.search import PrivateSearch

    for name, values in config.space.items():
        for value in values:
            _with(parser, config, {name: value})  # a wrong value is found before the first run, not in one of them

    def train(choice: Mapping[str, Any], privacy: Any) -> float:
        return _train(parser, _with(parser, config, choice), privacy)

    return PrivateSearch(**config.search.as_dict(), **config.privacy.as_dict()), train


def _with(parser: ArgumentParser, config: Namespace, choice: Mapping[str, Any]) -> Namespace:
    """The config with some values of the space in their places.

    Raises:
        ValueError: the config has no such entry, or the value does not fit.
    """
    changed = config.clone()
    for name, value in choice.items():
        if name.split(".")[0] not in _PARTS or name not in config:
            raise ValueError(
                f"space names {name!r}, which the config does not have: give dotted names below {', '.join(_PARTS)}, "
                "such as model.init_args.lr or trainer.max_epochs"
            )
        changed[name] = value
    try:
        parser.validate(changed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"space gives {dict(choice)}, which does not fit: {error}") from error
    return changed


def _train(parser: ArgumentParser, config: Namespace, privacy: Any) -> float:
    """One fit and one validation; no logger, so that nothing computed without noise is written."""
    import lightning.pytorch as pl

    from lightning_lap2.audit.bench import quiet

    model = parser.instantiate(Namespace(model=config.model)).model
    data = None if config.get("data") is None else parser.instantiate(Namespace(data=config.data)).data
    with quiet():
        trainer = pl.Trainer(
            **{**config.trainer.as_dict(), **_QUIET}, callbacks=[privacy], default_root_dir=privacy.folder
        )
        trainer.fit(model, datamodule=data)
        results = trainer.validate(model, datamodule=data, verbose=False)
    metrics = {name: value for found in results for name, value in found.items()}
    if config.score not in metrics:
        raise ValueError(
            f"--score {config.score}: validation_step logs no such metric, but {', '.join(metrics) or 'none'}"
        )
    return float(metrics[config.score])


SUBCOMMAND = Subcommand(
    run=_run,
    help="hyperparameter search whose price is part of epsilon.",
    add_arguments=_add_arguments,
    examples=("--config search.yaml",),
    details="""
The config names model, data, privacy and trainer as for LightningCLI; privacy holds arguments of Lap2Privacy, but
not the budget, which is the search's. space gives values for any of them by their dotted names; every combination is
equally likely:

  model: {class_path: my_package.MyModule, init_args: {lr: 0.1}}
  data: {class_path: my_package.MyDataModule}
  trainer: {max_epochs: 30}
  search: {eps: 3.0, delta: 1.0e-5, mean_runs: 10}
  score: val_accuracy
  space:
    model.init_args.lr: [0.01, 0.03, 0.1]
    privacy.max_grad_norm: [0.3, 1.0]

score is a metric that the module logs in validation_step; the VALIDATION DATA MUST BE PUBLIC, or not the data that is
to be protected. A search that was killed goes on where it was when it is started again (docs/private-search.md).

Exit status: 0, or 2 on an error. Modules are looked for in the current folder too.""",
    loads_user_code=True,
)
