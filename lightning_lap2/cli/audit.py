"""``lightning-lap2 audit``: the audit of a training that is described like one for LightningCLI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2._progress import progress_bar
from lightning_lap2.cli.parsing import Result, Subcommand
from lightning_lap2.cli.training import CONFIG, add_config, add_training, make_training

if TYPE_CHECKING:
    from lightning_lap2.audit.result import AuditResult

REFUTED = 1
"""Exit status where the lower bound is above the claim."""


def _add_arguments(parser: ArgumentParser) -> None:
    from lightning_lap2.audit.auditing import Method
    from lightning_lap2.audit.canaries import CanaryKind

    add_config(parser)
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
    add_training(parser)


def _run(parser: ArgumentParser, config: Namespace) -> Result:
    from lightning_lap2.audit.auditing import audit

    told = ("method", "canary", "runs", "canaries", "confidence", "delta", "guesses", "holdout", "seed")
    with progress_bar("audit") as progress:
        found = audit(make_training(parser, config), progress=progress, **{name: config[name] for name in told})
    text, notes = [str(found)], []
    if config.plot:
        written, note = _plot(found, config.plot)
        text += written
        notes += note
    if found.violated:
        notes.append(
            f"the training is not ({found.claimed_epsilon:.6g}, {found.delta:g})-differentially private: an attack "
            f"shows epsilon >= {found.epsilon:.4g} at confidence {found.confidence:g}"
        )
    return Result(found.to_dict(), "\n".join(text), REFUTED if found.violated else 0, tuple(notes))


def _plot(found: AuditResult, path: str) -> tuple[list[str], list[str]]:
    """Lines for stdout and stderr. The result stands without its picture: a failure is said, and is no failure of the
    audit."""
    from lightning_lap2.audit.plots import plot

    try:
        return [f"plot                 {plot(found, path)}"], []
    except (ImportError, ValueError, OSError) as error:
        return [], [f"warning: no plot: {error}"]


SUBCOMMAND = Subcommand(
    run=_run,
    help="empirical lower bound on epsilon for your own model and data.",
    add_arguments=_add_arguments,
    examples=(
        "--config audit.yaml",
        "--config audit.yaml --method many_runs --runs 1000",
        "--config audit.yaml --canary mislabelled --canaries 200",
    ),
    details=f"""{CONFIG}
Exit status: 0 where the claim is not refuted, 1 where the lower bound is above the claimed epsilon, 2 on an error.
Modules are looked for in the current folder too.""",
    loads_user_code=True,
)
