"""``lightning-lap2 epsilon``, ``calibrate``, ``steps`` and ``optimize``: what the accountant computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant, calibrate_noise_multiplier, optimize_clip_and_scale
from lightning_lap2.cli.compare import ratios
from lightning_lap2.cli.options import add_option, echo, spellings
from lightning_lap2.cli.parsing import Result, Subcommand, plain
from lightning_lap2.cli.price import add_price_arguments, price
from lightning_lap2.cli.text import markdown, number
from lightning_lap2.report import rounded_up


def _plan(config: Namespace) -> dict[str, Any]:
    return {"sample_rate": config.sample_rate, "dimension": config.dimension}


def _epsilon(config: Namespace) -> Result:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=config.noise_multiplier, steps=config.steps, **_plan(config))
    eps, order = accountant.epsilon(delta=config.delta), accountant.best_order(config.delta)
    result = {"epsilon": eps, "best_order": order, **echo(config)}
    return Result(result, f"epsilon = {rounded_up(eps)} at delta = {config.delta:g} after {config.steps} steps")


def _calibrate(config: Namespace) -> Result:
    config.sample_rate = _sample_rate(config)
    if config.mean_runs is not None:
        return price(config, {"steps": config.steps, **_plan(config)})
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
    result = {"noise_multiplier": m, **ratios(m, config.mechanism), "epsilon": eps, **echo(config)}
    whose = "" if config.units is None else f", add/remove one of {config.units} units with all its records"
    # printed upwards: a noise multiplier copied from the screen still meets the budget
    return Result(
        result, f"noise multiplier = {rounded_up(m)} (epsilon = {rounded_up(eps)} at delta = {config.delta:g}{whose})"
    )


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
    return Result(result, f"steps = {steps} within epsilon = {config.eps:g} at delta = {config.delta:g}")


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
        [f"{r.max_grad_norm:g}", f"{r.scale:.6g}", rounded_up(r.noise_multiplier)]
        + [f"{v:.4g}" for v in (r.snr, r.total_snr, r.epsilon)]
        for r in rows
    ]
    return Result({"rows": [r.to_dict() for r in rows], **echo(config)}, markdown(head, cells))


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
    add_price_arguments(parser)


_PLAN = ("delta", "sample-rate", "steps", "dimension")
_KIND = ("bound", "mechanism")
_SETTING = "--delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
SUBCOMMANDS: dict[str, Subcommand] = {
    "epsilon": Subcommand(
        run=plain(_epsilon),
        help="epsilon spent by a number of steps.",
        add_arguments=_with_options("noise-multiplier", *_PLAN, *_KIND),
        examples=(f"--noise-multiplier 1.5 {_SETTING}",),
    ),
    "calibrate": Subcommand(
        run=plain(_calibrate),
        help="smallest noise multiplier that keeps a plan within epsilon.",
        add_arguments=_calibrate_arguments,
        examples=(f"--eps 1 {_SETTING}",),
    ),
    "steps": Subcommand(
        run=plain(_steps),
        help="number of steps affordable within epsilon.",
        add_arguments=_with_options("eps", "noise-multiplier", "delta", "sample-rate", "dimension", *_KIND),
        examples=("--eps 1 --noise-multiplier 1.5 --delta 1e-5 --sample-rate 0.0043 --dimension 26010",),
    ),
    "optimize": Subcommand(
        run=plain(_optimize),
        help="the paper's Algorithm 1: the smallest scale for each clipping norm of a grid.",
        add_arguments=_with_options("eps", *_PLAN, *_KIND, more=_add_grid),
        examples=(f"--eps 1 {_SETTING} --max-grad-norms 0.1 1 10",),
        details="""
The accountant sees only C / b, so b is proportional to C and every row has the same signal-to-noise ratio: which C
to take is a question of utility. The paper takes a percentile of the norms of per-example gradients, measured on
public data: `lightning-lap2 norms`.""",
    ),
}
