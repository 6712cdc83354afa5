"""``lightning-lap2 norms``: percentiles of per-example gradient norms on public data, to choose C from."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.choices import NORMS
from lightning_lap2.cli.options import spellings
from lightning_lap2.cli.parsing import Result, Subcommand
from lightning_lap2.cli.text import markdown, number
from lightning_lap2.report import rounded_up

_PERCENTILES = [10, 25, 50, 75, 90, 95, 99]


def _add_arguments(parser: ArgumentParser) -> None:
    import lightning as L

    parser.add_argument("--config", action="config", help="YAML with these options; one of a LightningCLI will do")
    parser.add_argument(
        *spellings("data-is-public"),
        action="store_true",
        help="required: declares that no record measured here is private. Norms of private data are private",
    )
    parser.add_subclass_arguments(L.LightningModule, "model", required=True, help="the LightningModule")
    parser.add_argument(
        "--data",
        type=L.LightningDataModule | None,
        default=None,
        help="a LightningDataModule with PUBLIC data (default: the model's own dataloader)",
    )
    parser.add_argument(
        "--split", choices=["train", "val", "test"], default="train", help="which dataloader of it (default: train)"
    )
    parser.add_argument("--engine", choices=["vmap", "ghost", "loop"], default="vmap", help="as in the callback")
    parser.add_argument("--norm", choices=NORMS, default="l2", help="l1 only for mechanism laplace_l1")
    parser.add_argument(
        *spellings("max-examples"), type=int | None, default=None, help="stop after so many (default: all)"
    )
    parser.add_argument(
        "--percentiles", type=number, nargs="+", default=_PERCENTILES, help="in [0, 100] (default: 10 25 50 ... 99)"
    )
    parser.add_argument(
        *spellings("seed-everything"),
        type=int,
        default=0,
        help="seed of the initial weights, the shuffling and dropout",
    )
    for ignored in ("trainer", "optimizer", "lr_scheduler", "ckpt_path"):
        parser.add_argument(
            f"--{ignored}", type=dict | str | None, default=None, help="ignored; may stand in a LightningCLI config"
        )


def _run(parser: ArgumentParser, config: Namespace) -> Result:
    import lightning as L
    import torch

    from lightning_lap2.gradients.norms import gradient_norms, suggest_max_grad_norm

    L.seed_everything(config.seed_everything, verbose=False)
    built = parser.instantiate(config)
    norms = gradient_norms(
        built.model,
        _dataloader(built),
        data_is_public=config.data_is_public,
        engine=config.engine,
        norm=config.norm,
        max_examples=config.max_examples,
        progress=True,
    )
    finite = norms[torch.isfinite(norms)]
    values = suggest_max_grad_norm(norms, config.percentiles)
    result = {
        "examples": norms.numel(),
        "non_finite": norms.numel() - finite.numel(),
        "norm": config.norm,
        "percentiles": [{"percentile": p, "norm": v} for p, v in zip(config.percentiles, values, strict=True)],
        "mean": float(finite.mean()),
        "max": float(finite.max()),
    }
    return Result(result, _text(result))


def _dataloader(config: Namespace) -> Any:
    """The dataloader that was asked for.

    Raises:
        ValueError: there is none.
    """
    import lightning as L

    source = config.model if config.data is None else config.data
    if isinstance(source, L.LightningDataModule):
        source.prepare_data()
        source.setup("test" if config.split == "test" else "fit")
    try:
        return getattr(source, f"{config.split}_dataloader")()
    except Exception as error:
        if "must be implemented" not in str(error) and not isinstance(error, NotImplementedError):
            raise
        raise ValueError(f"--data must have a {config.split}_dataloader, {type(source).__name__} has none") from error


def _text(result: dict[str, Any]) -> str:
    cells = [[f"{entry['percentile']:g}", rounded_up(entry["norm"])] for entry in result["percentiles"]]
    table = markdown(["percentile", f"{result['norm']} norm"], cells)
    line = f"{result['examples']} examples, mean {result['mean']:.4g}, largest {result['max']:.4g}"
    if result["non_finite"]:
        line += f", {result['non_finite']} gradients not finite (training drops such examples)"
    return f"{table}\n{line}"


SUBCOMMAND = Subcommand(
    run=_run,
    help="percentiles of per-example gradient norms on PUBLIC data: a choice of max_grad_norm (C).",
    add_arguments=_add_arguments,
    examples=("--config public.yaml --data-is-public",),
    details="""
THE DATA MUST BE PUBLIC. A gradient norm of a private record is private, and so is a percentile of them: a C chosen
from the private training set voids the guarantee, and no report would show it. --data-is-public says that you know.

The config names the module and the data as LightningCLI does, for example:

  model: {class_path: my_package.MyModule, init_args: {hidden: 32}}
  data: {class_path: my_package.MyPublicData}

Norms are taken at the module's initial weights; they change in training. The median (percentile 50) is a common C:
it cuts half of the gradients at first. Tabulate several with
  lightning-lap2 optimize --max-grad-norms ... (the signal-to-noise ratio is the same for each).""",
    loads_user_code=True,
)
