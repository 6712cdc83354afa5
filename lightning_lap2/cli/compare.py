"""``lightning-lap2 compare``: the noise that each mechanism and bound needs for the same guarantee."""

from __future__ import annotations

import math
import warnings
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2 import _validate
from lightning_lap2.accounting import UnsoundBoundWarning
from lightning_lap2.cli.options import add_option, echo, spellings
from lightning_lap2.cli.parsing import Result, Subcommand, plain
from lightning_lap2.cli.text import markdown, number
from lightning_lap2.figures.methods import (
    GAUSSIAN,
    LAP2,
    LAPLACE_L1,
    Method,
    deviation,
    signal_to_noise,
    smallest_multiplier,
)
from lightning_lap2.report import rounded_up

COMPARED = (*LAP2, GAUSSIAN, LAPLACE_L1)


def ratios(multiplier: float, mechanism: str) -> dict[str, float]:
    """Standard deviation of the noise over C, and C over its scale."""
    return {"std_over_clip": deviation(mechanism, multiplier), "snr": signal_to_noise(multiplier)}


def _add_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "eps", several=True)
    for option in ("delta", "sample-rate", "steps", "dimension"):
        add_option(parser, option)
    parser.add_argument(
        *spellings("max-grad-norm"),
        type=number,
        default=None,
        help="clipping norm C in (0, inf): adds the scale and the standard deviation in the units of the gradient",
    )


def _run(config: Namespace) -> Result:
    clip = config.max_grad_norm
    if clip is not None:
        _validate.positive("max_grad_norm", clip, finite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundBoundWarning)  # the table says it
        rows = [_row(config, eps, method) for eps in config.eps for method in COMPARED]
    return Result({"rows": rows, **echo(config)}, _table(rows))


def _row(config: Namespace, eps: float, method: Method) -> dict[str, Any]:
    m = smallest_multiplier(
        method,
        eps=eps,
        delta=config.delta,
        sample_rate=config.sample_rate,
        steps=config.steps,
        dimension=config.dimension,
    )
    row: dict[str, Any] = {"eps": eps, "method": method.label, "mechanism": method.mechanism, "bound": method.bound}
    row |= {"valid": method.valid, "noise_multiplier": m, **ratios(m, method.mechanism)}
    draws = config.sample_rate * math.sqrt(config.steps)
    row["total_snr"] = draws * row["snr"] if draws > 0.0 else 0.0
    if config.max_grad_norm is not None:
        scale = m * config.max_grad_norm
        row |= {"max_grad_norm": config.max_grad_norm, "scale": scale, "std": deviation(method.mechanism, scale)}
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["epsilon", "method", "noise multiplier", "std / C", "C / scale", "q sqrt(T) C / scale"]
    absolute = "scale" in rows[0]
    if absolute:
        head[3:3] = ["scale", "std"]
    cells = []
    for row in rows:
        line = [f"{row['eps']:g}", row["method"], rounded_up(row["noise_multiplier"])]
        line += [rounded_up(row["scale"]), f"{row['std']:.4g}"] if absolute else []
        cells.append(line + [f"{row[key]:.4g}" for key in ("std_over_clip", "snr", "total_snr")])
    return markdown(head, cells)


SUBCOMMAND = Subcommand(
    run=plain(_run),
    help="noise that Lap2 (three bounds), Gaussian and Laplace with l1 clipping need at equal epsilon.",
    add_arguments=_add_arguments,
    examples=("--eps 0.13 0.88 3.42 --delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010",),
    details="""
One row per epsilon and method:
  noise multiplier     scale / C: b/C for Laplace, sigma/C for Gaussian noise. Rounded up
  scale, std           with --max-grad-norm: the same times C, and the standard deviation of the noise
  std / C              what the gradients feel: sqrt(2) b/C for Laplace, sigma/C for Gaussian noise
  C / scale            signal-to-noise ratio of one step
  q sqrt(T) C / scale  of all steps together
Gaussian is accounted by moments and by its privacy-loss distribution, whichever is smaller. Under l1 clipping C
bounds the l1 norm, up to sqrt(n) times the l2 norm: that row cannot be compared with the others at equal C.""",
)
