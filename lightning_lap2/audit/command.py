"""``lightning-lap2 audit``: the audit of a training that is described like one for LightningCLI."""

from __future__ import annotations

import json
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2._progress import progress_bar
from lightning_lap2.audit.auditing import Method, audit
from lightning_lap2.audit.canaries import CanaryKind
from lightning_lap2.audit.config import (
    Parser,
    add_training,
    make_training,
    run_command,
)
from lightning_lap2.audit.plots import plot
from lightning_lap2.audit.result import AuditResult

DESCRIPTION = """An empirical lower bound on epsilon for your own model and data.

The config names model, data, privacy and trainer as for LightningCLI; privacy holds the arguments of Lap2Privacy:

  model: {class_path: my_package.MyModule, init_args: {...}}
  data: {class_path: my_package.MyDataModule}
  privacy: {eps: 3.0, delta: 1.0e-5}
  trainer: {max_epochs: 30}

Examples:
  lightning-lap2 audit --config audit.yaml
  lightning-lap2 audit --config audit.yaml --method many_runs --runs 1000
  lightning-lap2 audit --config audit.yaml --canary mislabelled --canaries 200

Exit status: 0 where the claim is not refuted, 1 where the lower bound is above the claimed epsilon, 2 on an error.
Modules are looked for in the current folder too."""

REFUTED = 1


def build_parser() -> ArgumentParser:
    parser = Parser(prog="lightning-lap2 audit", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")
    parser.add_argument(
        "--method",
        type=Method,
        default="one_run",
        help="one_run: many canaries in one training, all guessed (default); many_runs: error rates over many "
        "trainings with Clopper-Pearson limits",
    )
    parser.add_argument(
        "--canary",
        type=CanaryKind | None,
        default=None,
        help="one_coordinate, even_spread, gradient (both): white box; mislabelled: black box (default: one_coordinate "
        "for one_run, gradient for many_runs)",
    )
    parser.add_argument("--runs", type=int | None, default=None, help="trainings (default: 1 or 1000 by method)")
    parser.add_argument("--canaries", type=int | None, default=None, help="canaries in each training (default: chosen)")
    parser.add_argument("--confidence", type=float, default=0.999, help="that the result is a lower bound, in (0, 1)")
    parser.add_argument(
        "--delta", type=float | None, default=None, help="audit the claim at this delta (default: that of privacy)"
    )
    parser.add_argument("--guesses", type=int | None, default=None, help="of one_run (default: seven are tried)")
    parser.add_argument(
        "--holdout", type=float, default=0.3, help="part of many runs that only chooses canary and threshold, in (0, 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of coins, noise, draws and initial weights, >= 0")
    parser.add_argument(
        "--plot", type=str | None, default="audit.png", help="picture to write (.png, .svg, .pdf); null for none"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_training(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lightning-lap2 audit argv`` and returns the exit status."""
    parser = build_parser()
    return run_command(parser, argv, lambda config: _audit(parser, config))


def _audit(parser: ArgumentParser, config: Namespace) -> int:
    result = _run(parser, config)
    print(json.dumps(result.to_dict()) if config.json else result)
    if config.plot:
        _plot(result, config.plot, quiet=config.json)
    if result.violated:
        print(
            f"lightning-lap2: the training is not ({result.claimed_epsilon:.6g}, {result.delta:g})-differentially"
            f" private: an attack shows epsilon >= {result.epsilon:.4g} at confidence {result.confidence:g}",
            file=sys.stderr,
        )
        return REFUTED
    return 0


def _run(parser: ArgumentParser, config: Namespace) -> AuditResult:
    told = ("method", "canary", "runs", "canaries", "confidence", "delta", "guesses", "holdout", "seed")
    with progress_bar("audit") as progress:
        return audit(make_training(parser, config), progress=progress, **{name: config[name] for name in told})


def _plot(result: AuditResult, path: str, *, quiet: bool) -> None:
    """The result stands without its picture: a failure is said, and is no failure of the audit."""
    try:
        written = plot(result, path)
    except (ImportError, ValueError, OSError) as error:
        print(f"lightning-lap2: warning: no plot: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"plot                 {written}")
