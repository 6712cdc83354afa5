"""The ``lightning-lap2`` command: privacy accounting without training anything; audits and private searches.

Arguments are named as in the callback and the accountant. Results go to stdout, one line or one table, or JSON
with ``--json``; warnings and errors go to stderr, an error as one line with exit status 2.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2 import _validate
from lightning_lap2.accounting import (
    MajorizedAccountant,
    UnsoundBoundWarning,
    calibrate_noise_multiplier,
    optimize_clip_and_scale,
)
from lightning_lap2.commands import compare, norms, plot, report, search
from lightning_lap2.commands.base import Command, Result, Subcommand, add_option, echo, spellings
from lightning_lap2.commands.text import markdown, number, strict, up
from lightning_lap2.figures.draw import MissingMatplotlibError


class _Parser(ArgumentParser):
    """Errors are one line on stderr and exit status 2; the description is printed as written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise SystemExit(_fail(re.sub(r"\b[a-z]+\.([a-z_]+)", r"--\1", message)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["audit"]:
        # the commands that train: torch and Lightning are loaded for them alone
        from lightning_lap2.audit.command import main as audit

        return audit(given[1:])
    if given[:1] == ["replay"]:
        from lightning_lap2.audit.replay_command import main as replay

        return replay(given[1:])
    if given[:1] == ["search"]:
        return search.main(given[1:])
    parser, commands = build_parser(given)
    try:
        config = parser.parse_args(given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    name = config.subcommand
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsoundBoundWarning)
        try:
            result, text = commands[name](config[name])
        except (TypeError, ValueError, OSError, MissingMatplotlibError) as error:
            return _fail(str(error))
    for message in sorted({str(w.message) for w in caught}):
        print(f"lightning-lap2: warning: {message}", file=sys.stderr)
    print(json.dumps(strict(result)) if config[name].json else text)
    return 0


def _fail(message: str) -> int:
    print(f"lightning-lap2: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def build_parser(argv: Sequence[str] = ()) -> tuple[ArgumentParser, dict[str, Command]]:
    """The parser and the function behind each subcommand.

    Args:
        argv: the command line to come. A subcommand that loads user code has its options only if it is named.
    """
    parser = _Parser(
        prog="lightning-lap2",
        description=(
            "Differential privacy accounting for Laplace noise with l2 clipping. Adjacency: add or remove one\n"
            "example (one unit with all its records: calibrate --units). Example:\n\n"
            "  lightning-lap2 calibrate --eps 1 --delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
        ),
    )
    subcommands = parser.add_subcommands(required=True, dest="subcommand")
    commands: dict[str, Command] = {}
    for name, command in _COMMANDS.items():
        sub = _Parser(description=command.description(name))
        if name in argv or command.before_building is None:
            command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        subcommands.add_subcommand(name, sub, help=command.help)
        commands[name] = _building(sub, command)
    # only for the list of commands: main hands it over before anything is parsed
    subcommands.add_subcommand("audit", _Parser(), help="empirical lower bound on epsilon for your model and data.")
    subcommands.add_subcommand("replay", _Parser(), help="neighbour replay: what one record changes in your training.")
    subcommands.add_subcommand("search", _Parser(), help="hyperparameter search whose price is part of epsilon.")
    return parser, commands


def _building(parser: ArgumentParser, command: Subcommand) -> Command:
    """The subcommand's ``run``, where it wants them on the objects that the options describe."""
    prepare = command.before_building
    if prepare is None:
        return command.run

    def run(config: Namespace) -> Result:
        prepare(config)
        return command.run(parser.instantiate(config))

    return run


def _plan(config: Namespace) -> dict[str, Any]:
    return {"sample_rate": config.sample_rate, "dimension": config.dimension}


def _epsilon(config: Namespace) -> Result:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=config.noise_multiplier, steps=config.steps, **_plan(config))
    eps, order = accountant.epsilon(delta=config.delta), accountant.best_order(config.delta)
    result = {"epsilon": eps, "best_order": order, **echo(config)}
    return result, f"epsilon = {up(eps)} at delta = {config.delta:g} after {config.steps} steps"


def _calibrate(config: Namespace) -> Result:
    config.sample_rate = _sample_rate(config)
    if config.mean_runs is not None:
        return search.price(config, {"steps": config.steps, **_plan(config)})
    m = calibrate_noise_multiplier(
        eps=config.eps,
        delta=config.delta,
        steps=config.steps,
        bound=config.bound,
        mechanism=config.mechanism,
        **_plan(config),
    )
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=m, steps=config.steps, **_plan(config))
    eps = accountant.epsilon(delta=config.delta)
    result = {"noise_multiplier": m, **compare.ratios(m, config.mechanism), "epsilon": eps, **echo(config)}
    whose = "" if config.units is None else f", add/remove one of {config.units} units with all its records"
    # printed upwards: a noise multiplier copied from the screen still meets the budget
    return result, f"noise multiplier = {up(m)} (epsilon = {up(eps)} at delta = {config.delta:g}{whose})"


def _sample_rate(config: Namespace) -> float:
    """q as given, or of units: B / U.

    Raises:
        ValueError: neither, or both.
    """
    given = (config.sample_rate is not None, config.units is not None, config.batch_size is not None)
    if given == (True, False, False):
        return float(config.sample_rate)
    if given != (False, True, True):
        raise ValueError("give --sample-rate, or --units and --batch-size (expected units per step)")
    units = _validate.integer("--units", config.units, minimum=1)
    batch_size = _validate.integer("--batch-size", config.batch_size, minimum=1)
    if batch_size > units:
        raise ValueError(f"--batch-size {batch_size} is more than --units {units}: a sampling rate above 1")
    return batch_size / units


def _steps(config: Namespace) -> Result:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    steps = accountant.steps_within(
        eps=config.eps, delta=config.delta, noise_multiplier=config.noise_multiplier, **_plan(config)
    )
    result = {"steps": steps, **echo(config)}
    return result, f"steps = {steps} within epsilon = {config.eps:g} at delta = {config.delta:g}"


def _optimize(config: Namespace) -> Result:
    rows = optimize_clip_and_scale(
        eps=config.eps,
        delta=config.delta,
        steps=config.steps,
        bound=config.bound,
        mechanism=config.mechanism,
        max_grad_norms=config.max_grad_norms,
        **_plan(config),
    )
    head = ["C", "scale b", "noise multiplier", "SNR C / b", "q sqrt(T) C / b", "epsilon"]
    cells = [
        [f"{r.max_grad_norm:g}", f"{r.scale:.6g}", up(r.noise_multiplier)]
        + [f"{v:.4g}" for v in (r.snr, r.total_snr, r.epsilon)]
        for r in rows
    ]
    return {"rows": [r.to_dict() for r in rows], **echo(config)}, markdown(head, cells)


def _with_options(*options: str, more: Callable[[ArgumentParser], None] | None = None) -> Any:
    def add_arguments(parser: ArgumentParser) -> None:
        for option in options:
            add_option(parser, option)
        if more is not None:
            more(parser)

    return add_arguments


def _add_grid(parser: ArgumentParser) -> None:
    parser.add_argument(
        *spellings("max-grad-norms"),
        type=number,
        nargs="+",
        required=True,
        help="clipping norms C to tabulate, each in (0, inf); for one, percentiles of gradient norms on public data, "
        "as `lightning-lap2 norms` prints them",
    )


def _calibrate_arguments(parser: ArgumentParser) -> None:
    for option in ("eps", "delta"):
        add_option(parser, option)
    add_option(parser, "sample-rate", required=False, note="; or --units and --batch-size")
    add_option(parser, "units", required=False)
    add_option(parser, "batch-size", required=False)
    for option in ("steps", "dimension", *_KIND):
        add_option(parser, option)
    search.add_price_arguments(parser)


_PLAN = ("delta", "sample-rate", "steps", "dimension")
_KIND = ("bound", "mechanism")
_SETTING = "--delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
_COMMANDS: dict[str, Subcommand] = {
    "epsilon": Subcommand(
        _epsilon,
        "epsilon spent by a number of steps.",
        _with_options("noise-multiplier", *_PLAN, *_KIND),
        f"--noise-multiplier 1.5 {_SETTING}",
    ),
    "calibrate": Subcommand(
        _calibrate,
        "smallest noise multiplier that keeps a plan within epsilon.",
        _calibrate_arguments,
        f"--eps 1 {_SETTING}",
    ),
    "steps": Subcommand(
        _steps,
        "number of steps affordable within epsilon.",
        _with_options("eps", "noise-multiplier", "delta", "sample-rate", "dimension", *_KIND),
        "--eps 1 --noise-multiplier 1.5 --delta 1e-5 --sample-rate 0.0043 --dimension 26010",
    ),
    "compare": compare.SUBCOMMAND,
    "optimize": Subcommand(
        _optimize,
        "the paper's Algorithm 1: the smallest scale for each clipping norm of a grid.",
        _with_options("eps", *_PLAN, *_KIND, more=_add_grid),
        f"--eps 1 {_SETTING} --max-grad-norms 0.1 1 10",
        details="""
The accountant sees only C / b, so b is proportional to C and every row has the same signal-to-noise ratio: which C
to take is a question of utility. The paper takes a percentile of the norms of per-example gradients, measured on
public data: `lightning-lap2 norms`.""",
    ),
    "norms": norms.SUBCOMMAND,
    "plot": plot.SUBCOMMAND,
    "report": report.SUBCOMMAND,
}
