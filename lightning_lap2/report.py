"""The privacy report: what is guaranteed, under which assumptions, and what is not."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, Literal

NAME = "privacy_report"

Standing = Literal["guarantee", "nothing", "untrained", "reproducible", "invalid", "infinite"]

SELECTION_CAVEAT = (
    "Validation, checkpoint selection, early stopping and hyperparameter search on private data are not covered."
)
ONE_EXAMPLE = (
    "The guarantee is for one example of the data set (not for a user with several, see unit=; not for replacing one), "
    "and takes the number of examples and the batch size as public."
)
GENERAL_CAVEATS = (
    "The training loss and every metric logged from training_step are computed from the data without noise; they "
    "are not covered. A row whose loss is not finite has a gradient of zero, and is left out of logged means.",
    SELECTION_CAVEAT,
    ONE_EXAMPLE,
)
"""What no run's guarantee covers, the gravest first; a run's own caveats stand before them."""


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """One fit's (or several fits') privacy statement. ``str()`` gives Markdown, ``to_dict()`` plain values.

    Fields carry the names of the callback's arguments and attributes; ``None`` where no fit has started.

    Attributes:
        eps: the budget, in nats; ``inf`` for none.
        epsilon: what has been spent, in nats, at ``delta``; an upper bound under ``bound``.
        delta: the probability that goes with ``epsilon``.
        mechanism: ``"laplace"``, ``"gaussian"`` or ``"laplace_l1"``.
        bound: ``"tight"``, ``"joint"`` or ``"published"``, which is not valid.
        adjacency: what neighbouring data sets are: one example (or user) added or removed, or one zeroed out.
        sampling: ``"poisson"`` or ``"none"``.
        clipping: ``"flat"``, ``"automatic"``, ``"per_layer"`` or ``"adaptive"``.
        max_grad_norm: C, in units of the gradient; with adaptive clipping where C started.
        noise_multiplier: scale / C, without unit.
        scale: b of the Laplace noise or sigma of the Gaussian noise on the sum, in units of the gradient.
        sample_rate: q, the probability with which an example enters a release.
        expected_batch_size: the public number of examples that the noised sum is divided by.
        num_examples: N, examples of the training set; with ``unit`` U, its units.
        dimension: n, trainable scalars.
        steps: releases made, over all fits that the ledger knows.
        planned_steps: releases that the latest fit planned; ``inf`` without a last step or budget.
        best_order: Rényi order that gives the smallest epsilon by moments (lambda + 1 in the paper).
        engine: which engines computed gradients; it does not enter epsilon.
        augmentations: views of each example.
        noise_source: where the noise came from.
        noise_seed: ``None`` for the operating system's entropy.
        reproducible: any release came from a seeded generator: nothing is private from who knows the seed.
        precision: of the Trainer.
        world_size: number of processes.
        caveats: what the statement does not cover, the gravest first.
        versions: of this package and of those it computes with.
        rounding_margin: share of C that gradients are clipped below it, for what floating point adds.
        clipping_threshold: of adaptive clipping, C after the last release, in units of the gradient.
        target_quantile: of adaptive clipping, the fraction of gradients that C is to leave as they are.
        clip_learning_rate: of adaptive clipping, how fast log C moves.
        count_noise_scale: of adaptive clipping, the scale of the count's noise, in examples.
        epsilon_without_count: of adaptive clipping, what the same releases would have cost without their counts.
        run: the part of the names of the run's journal and report that no other run has; ``None`` without a journal.
        unit: name of the ids by which users are units; ``None``: an example is one.
        records_per_unit: records that a drawn unit shows.
        num_records: with ``unit`` N, the records of all units.

    Example:
        >>> report = PrivacyReport.from_dict(
        ...     dict.fromkeys(("noise_multiplier", "scale", "sample_rate", "expected_batch_size", "num_examples"))
        ...     | dict.fromkeys(("dimension", "planned_steps", "best_order", "noise_source", "noise_seed"))
        ...     | {"eps": 3.0, "epsilon": 2.5, "delta": 1e-5, "mechanism": "laplace", "bound": "tight"}
        ...     | {"adjacency": "add or remove one example", "sampling": "poisson", "clipping": "flat"}
        ...     | {"max_grad_norm": 1.0, "steps": 100, "engine": "vmap", "augmentations": 1, "reproducible": False}
        ...     | {"precision": "32-true", "world_size": 1, "caveats": [], "versions": {}}
        ... )
        >>> print(report.statement())
        The weights after 100 releases are (2.5, 1e-05)-differentially private under add or remove one example, \
of a budget of 3.
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
    augmentations: int
    noise_source: str | None
    noise_seed: int | None
    reproducible: bool
    precision: str | None
    world_size: int | None
    caveats: tuple[str, ...]
    versions: dict[str, str]
    rounding_margin: float | None = None
    clipping_threshold: float | None = None
    target_quantile: float | None = None
    clip_learning_rate: float | None = None
    count_noise_scale: float | None = None
    epsilon_without_count: float | None = None
    run: str | None = None
    unit: str | None = None
    records_per_unit: int | None = None
    num_records: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values; infinities as the string ``"inf"``, so that the JSON is standard."""
        content = asdict(self)
        content["caveats"] = list(self.caveats)
        return {
            key: "inf" if isinstance(value, float) and math.isinf(value) else value for key, value in content.items()
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PrivacyReport:
        """The report that :meth:`to_dict` (or a ``privacy_report.json``) holds. Keys of later versions are left out.

        Raises:
            TypeError: ``content`` is no mapping.
            ValueError: a field is missing, by name.
        """
        if not isinstance(content, Mapping):
            raise TypeError(f"a report is an object with named fields, got a {type(content).__name__}")
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - set(content)):
            raise ValueError(f"fields are missing: {', '.join(missing)}")
        values: dict[str, Any] = {
            key: math.inf if value == "inf" else value for key, value in content.items() if key in known
        }
        values["caveats"] = tuple(values["caveats"])
        return cls(**values)

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
            f"{self.statement()}\n\n"
            f"| | |\n|---|---|\n{rows}\n\n"
            f"## What this does not cover\n\n{caveats}\n\n"
            f"{versions}\n"
        )

    @property
    def standing(self) -> Standing:
        """What the numbers amount to: ``"guarantee"``; ``"nothing"`` released, or ``"untrained"``; or why they are
        none, the worst first: ``"infinite"`` epsilon, an ``"invalid"`` bound, ``"reproducible"`` noise."""
        if math.isinf(self.epsilon):
            return "infinite"
        if not self.steps:
            return "untrained" if self.planned_steps is None else "nothing"
        if self.bound == "published":
            return "invalid"
        return "reproducible" if self.reproducible else "guarantee"

    def statement(self) -> str:
        """What is guaranteed, or that nothing is, as one paragraph of Markdown."""
        return self._verdict() + self._of_the_threshold()

    def _verdict(self) -> str:
        guarantee = (
            f"({rounded_up(self.epsilon)}, {self.delta:g})-differentially private under {self.adjacency}, of a budget "
            f"of {self.eps:g}"
        )
        verdicts: dict[Standing, str] = {
            "infinite": f"**No privacy guarantee**: epsilon is infinite after {self.steps} releases.",
            "nothing": "Nothing was released: epsilon = 0.",
            "untrained": "This callback has not trained anything, so it knows of no releases. (A copy of it that "
            "trained in another process has a ledger of its own.)",
            "invalid": f"**Not a valid guarantee.** The printed bound gives: {guarantee}.",
            "reproducible": f"**Not private: the noise is reproducible.** With secret noise the weights would be "
            f"{guarantee}.",
            "guarantee": f"The weights after {self.steps} releases are {guarantee}.",
        }
        return verdicts[self.standing]

    def _of_the_threshold(self) -> str:
        if self.clipping_threshold is None or self.epsilon_without_count is None or math.isinf(self.epsilon):
            return ""
        return (
            f" The clipping threshold went from {self.max_grad_norm:g} to {self.clipping_threshold:.4g}, after the "
            f"{self.target_quantile:g} quantile of gradient norms. It follows from noisy counts that are part of the "
            f"guarantee; without them the same releases would have cost {rounded_up(self.epsilon_without_count)}."
        )


def rounded_up(value: float) -> str:
    """Six digits, never below ``value``: a stated epsilon must not be too small."""
    if math.isinf(value):
        return "inf"
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(value)):g}"


def write_report(report: PrivacyReport, directory: Path, *, warn: Callable[[str], object]) -> None:
    """Writes JSON and Markdown: ``privacy_report.*``, the latest run's in this folder, and with a ``run``
    ``privacy_report_<run>.*``, which no other run overwrites. Each file is whole or not there at all.

    A failure (a full disk) is a warning: training is over, and the report can still be had from ``callback.report()``.
    """
    texts = {".json": json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", ".md": str(report)}
    stems = [NAME] if report.run is None else [NAME, f"{NAME}_{report.run}"]
    files = {f"{stem}{suffix}": text for stem in stems for suffix, text in texts.items()}
    write_files(
        files, directory, warn=lambda error: warn(f"the privacy report could not be written to {directory}: {error}")
    )


def write_files(files: Mapping[str, str], directory: Path, *, warn: Callable[[OSError], object]) -> None:
    """Writes texts by name, in their order, each whole or not at all; the first failure ends it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _replace(directory / name, text)
    except OSError as error:
        warn(error)


def _replace(path: Path, text: str) -> None:
    # of this process alone: another run may be writing the same report
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
