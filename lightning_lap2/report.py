"""The privacy report: what is guaranteed, under which assumptions, and what is not."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_lap2._version import __version__

if TYPE_CHECKING:
    from lightning_lap2.callback.ledger import Ledger
    from lightning_lap2.callback.settings import Settings

JSON_NAME = "privacy_report.json"
MARKDOWN_NAME = "privacy_report.md"

_ALWAYS = (
    "The training loss and every metric logged from training_step are computed from the data without noise; they "
    "are not covered.",
    "Validation, checkpoint selection, early stopping and hyperparameter search on private data are not covered.",
    "The guarantee is for one example of the data set (not for a user with several, not for replacing one), and "
    "takes the number of examples and the batch size as public.",
    "The proof is in real arithmetic; outputs are floating point numbers (docs/guarantee.md says what that assumes).",
)


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """One fit's (or several fits') privacy statement. ``str()`` gives Markdown, ``to_dict()`` plain values.

    Fields carry the names of the callback's arguments and attributes; ``None`` where no fit has started.
    """

    eps: float
    epsilon: float
    delta: float
    mechanism: str
    bound: str
    adjacency: str
    sampling: str
    clipping: str
    max_grad_norm: float
    noise_multiplier: float | None
    scale: float | None
    sample_rate: float | None
    expected_batch_size: int | None
    num_examples: int | None
    dimension: int | None
    steps: int
    planned_steps: float | None
    best_order: float | None
    engine: str
    noise_source: str | None
    noise_seed: int | None
    precision: str | None
    world_size: int | None
    caveats: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, settings: Settings, ledger: Ledger, facts: dict[str, Any]) -> PrivacyReport:
        """The report of a ledger; ``facts`` as the callback gathered them when its fit was planned."""
        multiplier = facts.get("noise_multiplier", settings.noise_multiplier)
        return cls(
            eps=settings.eps,
            epsilon=ledger.epsilon(),
            delta=settings.delta,
            mechanism=settings.mechanism,
            bound=settings.bound,
            adjacency=settings.adjacency,
            sampling=settings.sampling,
            clipping=settings.clipping,
            max_grad_norm=settings.max_grad_norm,
            noise_multiplier=multiplier,
            scale=None if multiplier is None else settings.mechanism_with(multiplier).scale,
            sample_rate=facts.get("sample_rate"),
            expected_batch_size=facts.get("expected_batch_size"),
            num_examples=facts.get("num_examples"),
            dimension=facts.get("dimension"),
            steps=ledger.releases,
            planned_steps=facts.get("planned_steps"),
            best_order=ledger.accountant.best_order(settings.delta) if ledger.accountant.steps else None,
            engine=settings.engine,
            noise_source=facts.get("noise_source"),
            noise_seed=settings.noise_seed,
            precision=facts.get("precision"),
            world_size=facts.get("world_size"),
            caveats=tuple(_caveats(settings, ledger, facts)),
            versions=_versions(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values; infinities as the string ``"inf"``, so that the JSON is standard."""
        content = asdict(self)
        content["caveats"] = list(self.caveats)
        return {
            key: "inf" if isinstance(value, float) and math.isinf(value) else value for key, value in content.items()
        }

    def __str__(self) -> str:
        caveats = "\n".join(f"* {text}" for text in self.caveats)
        rows = "\n".join(
            f"| {key} | {value} |"
            for key, value in self.to_dict().items()
            if key not in ("caveats", "versions") and value is not None
        )
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            "# Privacy report\n\n"
            f"{self._statement()}\n\n"
            f"| | |\n|---|---|\n{rows}\n\n"
            f"## What this does not cover\n\n{caveats}\n\n"
            f"{versions}\n"
        )

    def _statement(self) -> str:
        if math.isinf(self.epsilon):
            return f"**No privacy guarantee**: epsilon is infinite after {self.steps} releases."
        if not self.steps:
            return "Nothing was released: epsilon = 0."
        guarantee = (
            f"({self.epsilon:.6g}, {self.delta:g})-differentially private under {self.adjacency}, of a budget of "
            f"{self.eps:g}"
        )
        if self.bound == "published":
            return f"**Not a valid guarantee.** The printed bound gives: {guarantee}."
        if self.noise_seed is not None:
            return f"**Not private: the noise is reproducible.** With secret noise the weights would be {guarantee}."
        return f"The weights after {self.steps} releases are {guarantee}."


def _caveats(settings: Settings, ledger: Ledger, facts: dict[str, Any]) -> list[str]:
    """Every caveat that applies, the gravest first."""
    found: list[str] = []
    if settings.noise_multiplier == 0:
        found.append("No noise was added: epsilon is infinite.")
    if settings.noise_seed is not None:
        found.append(
            f"noise_seed={settings.noise_seed} makes the noise and the draws reproducible: whoever knows the seed can "
            "remove them, so the run is not private."
        )
    if settings.bound == "published":
        found.append(
            "bound='published' is the paper's printed Theorem III.7. It is not a valid bound for Poisson sampling; "
            "the epsilon above is a reproduction, not a guarantee."
        )
    if settings.sampling == "none":
        found.append(
            "The data was not sampled: no amplification, and the guarantee is for zeroing one example out, not for "
            "adding or removing it."
        )
        if not facts.get("once_per_pass", True):
            found.append(
                "The data set cannot be checked for repeats: the guarantee assumes that each example enters an "
                "optimizer step at most once."
            )
    if facts.get("fast_dev_run"):
        found.append("fast_dev_run: a trial run, charged like any other.")
    return [*found, *ledger.caveats, *facts.get("caveats", ()), *_ALWAYS]


def _versions() -> dict[str, str]:
    found = {"lightning-lap2": __version__, "python": platform.python_version()}
    for name in ("torch", "lightning", "pytorch-lightning", "numpy", "scipy", "dp-accounting"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_report(report: PrivacyReport, directory: Path, *, warn: Callable[[str], object]) -> None:
    """Writes both files, each whole or not at all. A failure (a full disk) is a warning: training is over, and the
    report can still be had from ``callback.report()``."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (JSON_NAME, json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"),
            (MARKDOWN_NAME, str(report)),
        ):
            partial = directory / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, directory / name)
    except OSError as error:
        warn(f"Lap2Privacy: the privacy report could not be written to {directory}: {error}")
