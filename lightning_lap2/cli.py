"""The ``lightning-lap2`` command: privacy accounting without training anything, and the audit of a training.

Arguments are named as in the callback and the accountant. Results go to stdout, one line or one table, or JSON
with ``--json``; warnings and errors go to stderr, an error as one line with exit status 2.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.accounting import (
    BOUNDS,
    MECHANISMS,
    MajorizedAccountant,
    UnsoundBoundWarning,
    calibrate_noise_multiplier,
    optimize_clip_and_scale,
)

COMPARED = (
    ("Lap2 tight", "laplace", "tight"),
    ("Lap2 joint", "laplace", "joint"),
    ("Lap2 published (not a valid bound)", "laplace", "published"),
    ("Gaussian", "gaussian", "tight"),
    ("Laplace l1 clipping", "laplace_l1", "tight"),
)

_OPTIONS: dict[str, tuple[Any, str]] = {
    "eps": (float, "privacy budget epsilon, in nats, in [0, inf]"),
    "delta": (float, "delta, a probability in [0, 1] (default: 1e-5)"),
    "noise-multiplier": (float, "noise scale over clipping norm: b/C (Laplace) or sigma/C (Gaussian), in [0, inf]"),
    "sample-rate": (float, "probability q that an example enters a step, in [0, 1]: expected batch size / N"),
    "steps": (None, "number of optimizer steps, an integer >= 0"),
    "dimension": (None, "number n of trainable scalars, an integer >= 0 or inf (overcounting is safe)"),
}

_CHOICES = {
    "bound": (BOUNDS, "tight (default); joint (valid, looser); published (Theorem III.7 as printed, NOT valid)"),
    "mechanism": (MECHANISMS, "laplace (default) and gaussian clip in l2, laplace_l1 in l1"),
}


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
        # the one command that trains: torch and Lightning are loaded for it alone
        from lightning_lap2.audit.command import main as audit

        return audit(given[1:])
    parser, commands = build_parser()
    try:
        config = parser.parse_args(given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    name = config.subcommand
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsoundBoundWarning)
        try:
            result, text = commands[name](config[name])
        except (TypeError, ValueError) as error:
            return _fail(str(error))
    for message in sorted({str(w.message) for w in caught}):
        print(f"lightning-lap2: warning: {message}", file=sys.stderr)
    print(json.dumps(_strict(result)) if config[name].json else text)
    return 0


def _fail(message: str) -> int:
    print(f"lightning-lap2: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


Result = tuple[Any, str]
Command = Callable[[Namespace], Result]


def build_parser() -> tuple[ArgumentParser, dict[str, Command]]:
    """The parser and the function behind each subcommand."""
    parser = _Parser(
        prog="lightning-lap2",
        description=(
            "Differential privacy accounting for Laplace noise with l2 clipping. Adjacency: add or remove one\n"
            "example. Example:\n\n"
            "  lightning-lap2 calibrate --eps 1 --delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
        ),
    )
    subcommands = parser.add_subcommands(required=True, dest="subcommand")
    commands: dict[str, Command] = {}
    for name, (run, help_text, needed, example) in _COMMANDS.items():
        sub = _Parser(description=f"{help_text}\n\nExample:\n  lightning-lap2 {name} {example}")
        for option in needed:
            _add(sub, option, several=(name == "compare" and option == "eps"))
        if name == "optimize":
            sub.add_argument(
                "--max-grad-norms",
                "--max_grad_norms",
                type=number,
                nargs="+",
                required=True,
                help="clipping norms C to tabulate, each in (0, inf)",
            )
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        subcommands.add_subcommand(name, sub, help=help_text)
        commands[name] = run
    # only for the list of commands: main hands it over before anything is parsed
    subcommands.add_subcommand("audit", _Parser(), help="empirical lower bound on epsilon for your model and data.")
    return parser, commands


def _add(parser: ArgumentParser, option: str, *, several: bool) -> None:
    names = dict.fromkeys([f"--{option}", f"--{option.replace('-', '_')}"])
    if option in _CHOICES:
        legal, text = _CHOICES[option]
        parser.add_argument(*names, choices=legal, default=legal[0], help=text)
        return
    _, text = _OPTIONS[option]
    extra: dict[str, Any] = {"default": 1e-5} if option == "delta" else {"required": True}
    if several:
        extra["nargs"] = "+"
    parser.add_argument(*names, type=number, help=text, **extra)


def number(text: Any) -> int | float:
    """An integer where the text is one (26010, 26_010, 1e9), else a float; ``inf`` and ``.inf`` are infinity."""
    if not isinstance(text, str):
        return text
    try:
        return int(text)
    except ValueError:
        value = float(text.replace(".inf", "inf"))
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _plan(config: Namespace) -> dict[str, Any]:
    return {"sample_rate": config.sample_rate, "dimension": config.dimension}


def _epsilon(config: Namespace) -> Result:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    accountant.step(noise_multiplier=config.noise_multiplier, steps=config.steps, **_plan(config))
    eps, order = accountant.epsilon(delta=config.delta), accountant.best_order(config.delta)
    result = {"epsilon": eps, "best_order": order, **_echo(config)}
    return result, f"epsilon = {_up(eps)} at delta = {config.delta:g} after {config.steps} steps"


def _calibrate(config: Namespace) -> Result:
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
    result = {"noise_multiplier": m, **_ratios(m, config.mechanism), "epsilon": eps, **_echo(config)}
    # printed upwards: a noise multiplier copied from the screen still meets the budget
    return result, f"noise multiplier = {_up(m)} (epsilon = {_up(eps)} at delta = {config.delta:g})"


def _steps(config: Namespace) -> Result:
    accountant = MajorizedAccountant(bound=config.bound, mechanism=config.mechanism)
    steps = accountant.steps_within(
        eps=config.eps, delta=config.delta, noise_multiplier=config.noise_multiplier, **_plan(config)
    )
    result = {"steps": steps, **_echo(config)}
    return result, f"steps = {steps} within epsilon = {config.eps:g} at delta = {config.delta:g}"


def _compare(config: Namespace) -> Result:
    warnings.simplefilter("ignore", UnsoundBoundWarning)  # the table says it; main restores the filters
    rows = []
    for eps in config.eps:
        for label, mechanism, bound in COMPARED:
            row: dict[str, Any] = {"eps": eps, "method": label, "mechanism": mechanism, "bound": bound}
            try:
                m = calibrate_noise_multiplier(
                    eps=eps,
                    delta=config.delta,
                    steps=config.steps,
                    bound=bound,
                    mechanism=mechanism,
                    **_plan(config),
                )
            except ValueError as error:
                if "finite noise multiplier" not in str(error):
                    raise
                m = math.inf
            rows.append({**row, "noise_multiplier": m, **_ratios(m, mechanism)})
    head = ["epsilon", "method", "noise multiplier", "std / C", "SNR C / scale"]
    cells = [
        [f"{r['eps']:g}", r["method"], _up(r["noise_multiplier"]), f"{r['std_over_clip']:.4g}", f"{r['snr']:.4g}"]
        for r in rows
    ]
    return {"rows": rows, **_echo(config)}, _markdown(head, cells)


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
        [f"{r.max_grad_norm:g}", f"{r.scale:.6g}", _up(r.noise_multiplier)]
        + [f"{v:.4g}" for v in (r.snr, r.total_snr, r.epsilon)]
        for r in rows
    ]
    return {"rows": [r.to_dict() for r in rows], **_echo(config)}, _markdown(head, cells)


def _ratios(m: float, mechanism: str) -> dict[str, float]:
    """Standard deviation of the noise over C, and C over its scale."""
    return {
        "std_over_clip": m if mechanism == "gaussian" else math.sqrt(2.0) * m,
        "snr": 1.0 / m if m > 0.0 else math.inf,
    }


def _echo(config: Namespace) -> dict[str, Any]:
    given = {k: v for k, v in config.as_dict().items() if k != "json" and not k.startswith("__")}
    return {"arguments": given}


def _up(value: float) -> str:
    """Six significant digits, rounded up."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.6g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return text if float(text) >= value else f"{float(text) + unit:.6g}"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in lines)


def _strict(value: Any) -> Any:
    """Infinities become the string "inf": JSON has none."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


_PLAN = ("delta", "sample-rate", "steps", "dimension")
_KIND = ("bound", "mechanism")
_SETTING = "--delta 1e-5 --sample-rate 0.0043 --steps 5860 --dimension 26010"
_COMMANDS: dict[str, tuple[Command, str, tuple[str, ...], str]] = {
    "epsilon": (
        _epsilon,
        "epsilon spent by a number of steps.",
        ("noise-multiplier", *_PLAN, *_KIND),
        f"--noise-multiplier 1.5 {_SETTING}",
    ),
    "calibrate": (
        _calibrate,
        "smallest noise multiplier that keeps a plan within epsilon.",
        ("eps", *_PLAN, *_KIND),
        f"--eps 1 {_SETTING}",
    ),
    "steps": (
        _steps,
        "number of steps affordable within epsilon.",
        ("eps", "noise-multiplier", "delta", "sample-rate", "dimension", *_KIND),
        "--eps 1 --noise-multiplier 1.5 --delta 1e-5 --sample-rate 0.0043 --dimension 26010",
    ),
    "compare": (
        _compare,
        "noise that Lap2 (three bounds), Gaussian and Laplace with l1 clipping need at equal epsilon.",
        ("eps", *_PLAN),
        f"--eps 0.13 0.88 3.42 {_SETTING}",
    ),
    "optimize": (
        _optimize,
        "the paper's Algorithm 1: the smallest scale for each clipping norm of a grid.",
        ("eps", *_PLAN, *_KIND),
        f"--eps 1 {_SETTING} --max-grad-norms 0.1 1 10",
    ),
}
