"""``lightning-lap2 plot``: the paper's figures that need no training, drawn or as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.cli.options import add_option, echo, spellings
from lightning_lap2.cli.parsing import Result, Subcommand, plain
from lightning_lap2.cli.text import number, tell
from lightning_lap2.figures import FIGURES, Figure, Setting, build
from lightning_lap2.figures.draw import FORMATS, check_matplotlib, draw
from lightning_lap2.figures.export import write_csv

_DEFAULT = Setting()
_PLAN = ("delta", "sample-rate", "steps", "dimension", "noise-multiplier")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--figure", choices=[*FIGURES, "all"], default="all", help="which (default: all)")
    parser.add_argument(
        "--out",
        type=str,
        default=None,
        help="file ending in .png or .svg for one figure; otherwise a folder, made if missing, that gets one file "
        "per figure, named after it",
    )
    parser.add_argument("--format", choices=FORMATS, default="png", help="of the files in a folder (default: png)")
    parser.add_argument("--csv", type=str, default=None, help="also write the data behind the curves to this file")
    for option in _PLAN:
        add_option(parser, option, default=getattr(_DEFAULT, option.replace("-", "_")), note=_USED.get(option, ""))
    parser.add_argument(
        *spellings("max-grad-norm"),
        type=number,
        default=_DEFAULT.max_grad_norm,
        help="clip: C at which the noise has --noise-multiplier; the scale is their product (default: 1)",
    )
    _add_range(parser, "eps-range", "wall, delta, snr: ends of the epsilon axis")
    _add_range(parser, "clip-range", "clip: ends of the C axis")
    parser.add_argument(
        *spellings("max-order"),
        type=number,
        default=_DEFAULT.max_order,
        help=f"moments: largest order, at most 4096 (default: {_DEFAULT.max_order})",
    )
    parser.add_argument(
        "--points", type=number, default=_DEFAULT.points, help=f"values per curve (default: {_DEFAULT.points})"
    )


_USED = {"noise-multiplier": "; moments and delta are drawn for it"}


def _add_range(parser: ArgumentParser, option: str, text: str) -> None:
    low, high = getattr(_DEFAULT, option.replace("-", "_"))
    parser.add_argument(
        *spellings(option),
        type=number,
        nargs=2,
        metavar=("LOW", "HIGH"),
        default=[low, high],
        help=f"{text} (default: {low:g} {high:g})",
    )


def _run(config: Namespace) -> Result:
    names = list(FIGURES) if config.figure == "all" else [config.figure]
    targets = _targets(config, names)
    setting = _setting(config)
    if targets:
        check_matplotlib()  # before the curves, which take a while
    figures = build(names, setting, tell)
    for figure in figures:
        if figure.name in targets:
            targets[figure.name].parent.mkdir(parents=True, exist_ok=True)
            draw(figure, targets[figure.name])
    files = [str(path) for path in targets.values()]
    if config.csv is not None:
        write_csv(figures, Path(config.csv))
        files.append(config.csv)
    return Result(_result(figures, files, config), "\n".join(f"wrote {file}" for file in files))


def _setting(config: Namespace) -> Setting:
    return Setting(
        delta=config.delta,
        sample_rate=config.sample_rate,
        steps=config.steps,
        dimension=config.dimension,
        noise_multiplier=config.noise_multiplier,
        max_grad_norm=config.max_grad_norm,
        eps_range=tuple(config.eps_range),
        clip_range=tuple(config.clip_range),
        max_order=config.max_order,
        points=config.points,
    )


def _targets(config: Namespace, names: list[str]) -> dict[str, Path]:
    """The file of each figure.

    Raises:
        ValueError: nothing was asked for, or several figures for one file.
    """
    if config.out is None:
        if not config.json and config.csv is None:
            raise ValueError("say where to draw with --out file.png, file.svg or folder, or ask for --json or --csv")
        return {}
    out = Path(config.out)
    suffix = out.suffix.lower().lstrip(".")
    if suffix in FORMATS and not out.is_dir():
        if len(names) > 1:
            raise ValueError(f"--out {config.out} is one file, but --figure all draws {len(names)}: give a folder")
        return {names[0]: out}
    if suffix and not out.is_dir():
        raise ValueError(f"--out must end in .png or .svg, or be a folder (without a suffix), got {config.out}")
    return {name: out / f"{name}.{config.format}" for name in names}


def _result(figures: list[Figure], files: list[str], config: Namespace) -> dict[str, Any]:
    return {"figures": [figure.to_dict() for figure in figures], "files": files, **echo(config)}


SUBCOMMAND = Subcommand(
    run=plain(_run),
    help="the paper's figures that need no training, as PNG, SVG, CSV or JSON.",
    add_arguments=_add_arguments,
    examples=("--figure clip --out clip.svg --noise-multiplier 1.5 --clip-range 0.1 3",),
    details="""
  moments  log M_k of one step against the order k, Lap2 and Gaussian at equal scale
  wall     first privacy wall: the slope |d log scale / d log epsilon| against epsilon
  delta    second privacy wall: delta at each epsilon, for one noise multiplier
  clip     epsilon against the clipping norm C at a fixed noise scale, with the best order
  snr      signal-to-noise ratio C / scale (and over all steps, q sqrt(T) C / scale) at equal epsilon
  all      all of them

Together they show what Figures 3 to 6 and 9 to 11 of the paper (arXiv 2602.23516) are about:
  lightning-lap2 plot --figure all --out figures
They are named by what they show. The default q, T, n and delta are those of the paper's MNIST setting; axes and
ranges are ours, so the curves need not be those printed there.

Each has a curve for every bound (tight, joint, and published, which is not a valid bound) and for Gaussian noise.
--json prints the data of every curve, --csv writes one row per point.""",
)
