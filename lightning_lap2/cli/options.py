"""The options that subcommands share."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.accounting import BOUNDS, MECHANISMS
from lightning_lap2.cli.text import number

_OPTIONS: dict[str, str] = {
    "eps": "privacy budget epsilon, in nats, in [0, inf]",
    "delta": "delta, a probability in [0, 1] (default: 1e-5)",
    "noise-multiplier": "noise scale over clipping norm: b/C (Laplace) or sigma/C (Gaussian), in [0, inf]",
    "sample-rate": "probability q that an example enters a step, in [0, 1]: expected batch size / N",
    "steps": "number of optimizer steps, an integer >= 0",
    "units": "number U of units of privacy (users): with --batch-size in place of --sample-rate",
    "batch-size": "expected units per optimizer step, an integer in [1, U]",
    "dimension": "number n of trainable scalars, an integer >= 0 or inf (overcounting is safe)",
}

_CHOICES = {
    "bound": (BOUNDS, "tight (default); joint (valid, looser); published (Theorem III.7 as printed, NOT valid)"),
    "mechanism": (MECHANISMS, "laplace (default) and gaussian clip in l2, laplace_l1 in l1"),
}


def spellings(option: str) -> list[str]:
    """``--sample-rate`` and ``--sample_rate``."""
    return list(dict.fromkeys([f"--{option}", f"--{option.replace('-', '_')}"]))


def add_option(
    parser: ArgumentParser,
    option: str,
    *,
    several: bool = False,
    default: float | None = None,
    required: bool = True,
    note: str = "",
) -> None:
    """Adds one of the options that commands share. Without a ``default`` it is ``required`` (but delta is 1e-5)."""
    if option in _CHOICES:
        legal, text = _CHOICES[option]
        parser.add_argument(*spellings(option), choices=legal, default=legal[0], help=text)
        return
    text = _OPTIONS[option] + note
    if default is not None:
        text += f" (default: {default:g})" if option != "delta" else ""
    extra: dict[str, Any] = {"nargs": "+"} if several else {}
    if default is None and option == "delta":
        default = 1e-5
    extra |= {"required": True} if default is None and required else {"default": default}
    parser.add_argument(*spellings(option), type=number, help=text, **extra)


def echo(config: Namespace) -> dict[str, Any]:
    """The arguments, for the JSON result."""
    given = {k: v for k, v in config.as_dict().items() if k != "json" and not k.startswith("__")}
    return {"arguments": given}
