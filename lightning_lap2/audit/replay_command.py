"""``lightning-lap2 replay``: a neighbour replay of a training that is described like one for LightningCLI."""

from __future__ import annotations

import json
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2._progress import progress_bar
from lightning_lap2.audit.config import (
    Parser,
    add_training,
    make_training,
    run_command,
)
from lightning_lap2.audit.neighbours import replay

DESCRIPTION = """Trains the beginning of your run again without one of its records, everything random held
fixed, and checks what the proof needs of every step: the release moves by at most C, nothing else changes.

The config names model, data, privacy and trainer as for LightningCLI; privacy holds the arguments of Lap2Privacy:

  model: {class_path: my_package.MyModule, init_args: {...}}
  data: {class_path: my_package.MyDataModule}
  privacy: {eps: 3.0, delta: 1.0e-5}
  trainer: {max_epochs: 30}

Examples:
  lightning-lap2 replay --config audit.yaml
  lightning-lap2 replay --config audit.yaml --records 32 --steps 20 --json

Exit status: 0 where no fault was found, 1 where one was, 2 on an error.
Modules are looked for in the current folder too."""

VIOLATED = 1


def build_parser() -> ArgumentParser:
    parser = Parser(prog="lightning-lap2 replay", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")
    parser.add_argument(
        "--records",
        type=int,
        default=8,
        help="records left out, one run each, >= 1: those drawn most often, and one that was not drawn",
    )
    parser.add_argument("--steps", type=int, default=8, help="releases compared, >= 1, each kept in memory")
    parser.add_argument("--seed", type=int, default=0, help="of coins, noise and initial weights, >= 0")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_training(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lightning-lap2 replay argv`` and returns the exit status."""
    parser = build_parser()
    return run_command(parser, argv, lambda config: _replay(parser, config))


def _replay(parser: ArgumentParser, config: Namespace) -> int:
    with progress_bar("replay") as progress:
        result = replay(
            make_training(parser, config),
            records=config.records,
            steps=config.steps,
            seed=config.seed,
            progress=progress,
        )
    print(json.dumps(result.to_dict()) if config.json else result)
    return VIOLATED if result.violated else 0
