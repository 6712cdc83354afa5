"""``lightning-lap2 search``, and what ``lightning-lap2 calibrate`` says of a search's price beforehand."""

from __future__ import annotations

import json
import math
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier
from lightning_lap2.accounting.selection import DISTRIBUTIONS, RunCount, plan_search
from lightning_lap2.commands.base import Result, echo, spellings
from lightning_lap2.commands.compare import ratios
from lightning_lap2.commands.text import markdown, number, strict, up

if TYPE_CHECKING:
    from lightning_lap2.selection.search import PrivateSearch

DESCRIPTION = """Hyperparameter search whose whole price is within epsilon (docs/private-search.md).

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
to be protected. A search that was killed goes on where it was when it is started again.

Example:
  lightning-lap2 search --config search.yaml

Exit status: 0, or 2 on an error. Modules are looked for in the current folder too."""

_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
_OWN = {*_QUIET, "callbacks", "default_root_dir", "barebones", "profiler", "plugins"}
_PARTS = ("model", "data", "trainer", "privacy")


def build_parser() -> ArgumentParser:
    import lightning.pytorch as pl

    from lightning_lap2.audit.config import Parser
    from lightning_lap2.lightning import Lap2Privacy
    from lightning_lap2.selection.search import PrivateSearch

    parser = Parser(prog="lightning-lap2 search", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")
    parser.add_argument("--score", type=str, required=True, help="name of a metric logged in validation_step")
    parser.add_argument("--space", type=dict[str, list[Any]], required=True, help="dotted name -> values")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_class_arguments(PrivateSearch, "search", skip={"callback", "privacy"}, instantiate=False)
    parser.add_subclass_arguments(pl.LightningModule, "model", required=True, help="the LightningModule")
    parser.add_subclass_arguments(
        pl.LightningDataModule, "data", required=False, help="the LightningDataModule; without one the module's loaders"
    )
    budget = {"eps", "delta", "noise_multiplier", "noise_seed"}
    parser.add_class_arguments(Lap2Privacy, "privacy", skip=budget, instantiate=False)
    parser.add_class_arguments(pl.Trainer, "trainer", skip=_OWN, instantiate=False)
    parser.set_defaults({"trainer.devices": 1})
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lightning-lap2 search argv`` and returns the exit status."""
    from lightning_lap2.audit.config import run_command

    parser = build_parser()
    return run_command(parser, argv, lambda config: _search(parser, config))


def _search(parser: ArgumentParser, config: Namespace) -> int:
    search, train = make_search(parser, config)
    search.run(train, config.space)
    report = search.report()
    print(json.dumps(strict(report.to_dict())) if config.json else report)
    return 0


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


# -- the price beforehand -----------------------------------------------------------------------------------------


def add_price_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        *spellings("mean-runs"),
        type=number,
        default=None,
        help="price of a private search with so many runs expected, beside that of one run and of naive composition",
    )
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default=DISTRIBUTIONS[0], help="of the number of runs")
    parser.add_argument(
        "--shape", type=number, default=0, help="of the negative binomial: 0 logarithmic (default), 1 geometric"
    )


def price(config: Namespace, plan: Mapping[str, Any]) -> Result:
    """Noise multipliers for one run, for the best of a random number of runs, and for that many runs composed."""
    runs = RunCount(config.mean_runs, config.distribution, config.shape)
    told = {"eps": config.eps, "delta": config.delta, "bound": config.bound, "mechanism": config.mechanism}
    count = math.ceil(config.mean_runs)
    one = calibrate_noise_multiplier(**told, **plan)
    search = plan_search(**told, runs=runs, **plan)
    naive = calibrate_noise_multiplier(**told, **{**plan, "steps": count * plan["steps"]})
    rows = [
        _row("one run", one, one, config, plan),
        _row(f"private search, {runs.name}, mean {config.mean_runs:g}", search.noise_multiplier, one, config, plan),
        _row(f"{count} runs, naive composition", naive, one, config, plan),
    ]
    head = ["", "noise multiplier", "times one run", "std / C", "epsilon of each run"]
    cells = [_cells(row) for row in rows]
    limit = {"points": search.limit.points, "divergences": search.limit.divergences}
    result = {"rows": rows, "search_epsilon": search.epsilon, "run_limit": limit, **echo(config)}
    return result, markdown(head, cells)


def _row(method: str, multiplier: float, one: float, config: Namespace, plan: Mapping[str, Any]) -> dict[str, Any]:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=multiplier, **plan)
    return {
        "method": method,
        "noise_multiplier": multiplier,
        "times_one_run": multiplier / one if one else 1.0,
        **ratios(multiplier, config.mechanism),
        "epsilon_of_each_run": accountant.epsilon(delta=config.delta),
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio, deviation = f"{row['times_one_run']:.3f}", f"{row['std_over_clip']:.4g}"
    return [row["method"], up(row["noise_multiplier"]), ratio, deviation, up(row["epsilon_of_each_run"])]
