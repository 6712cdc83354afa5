"""``lightning-lap2 replay``: a neighbour replay of a training that is described like one for LightningCLI."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2._progress import progress_bar
from lightning_lap2.cli.parsing import Result, Subcommand
from lightning_lap2.cli.training import CONFIG, add_config, add_training, make_training

VIOLATED = 1
"""Exit status where a fault was found."""


def _add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--records",
        type=int,
        default=8,
        help="records left out, one run each, >= 1: those drawn most often, and one that was not drawn",
    )
    parser.add_argument("--steps", type=int, default=8, help="releases compared, >= 1, each kept in memory")
    parser.add_argument("--seed", type=int, default=0, help="of coins, noise and initial weights, >= 0")
    add_training(parser)


def _run(parser: ArgumentParser, config: Namespace) -> Result:
    from lightning_lap2.audit.neighbours import replay

    with progress_bar("replay") as progress:
        found = replay(
            make_training(parser, config),
            records=config.records,
            steps=config.steps,
            seed=config.seed,
            progress=progress,
        )
    return Result(found.to_dict(), str(found), VIOLATED if found.violated else 0)


SUBCOMMAND = Subcommand(
    run=_run,
    help="neighbour replay: what one record changes in your training.",
    add_arguments=_add_arguments,
    examples=("--config audit.yaml", "--config audit.yaml --records 32 --steps 20 --json"),
    details=f"""
Trains the beginning of your run again without one of its records, everything random held
fixed, and checks what the proof needs of every step: the release moves by at most C, nothing else changes.
{CONFIG}
Exit status: 0 where no fault was found, 1 where one was, 2 on an error.
Modules are looked for in the current folder too.""",
    loads_user_code=True,
)
