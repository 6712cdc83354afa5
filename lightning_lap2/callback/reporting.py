"""From settings, ledger and plan to the privacy report, with every caveat that applies."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from lightning_lap2._version import __version__
from lightning_lap2.callback.adaptive import current_threshold
from lightning_lap2.callback.ledger import Ledger
from lightning_lap2.callback.settings import CLIP_LEARNING_RATE, TARGET_QUANTILE, Settings
from lightning_lap2.report import PrivacyReport

SELECTION_CAVEAT = (
    "Validation, checkpoint selection, early stopping and hyperparameter search on private data are not covered."
)
_ALWAYS = (
    "The training loss and every metric logged from training_step are computed from the data without noise; they "
    "are not covered.",
    SELECTION_CAVEAT,
    "The guarantee is for one example of the data set (not for a user with several, not for replacing one), and "
    "takes the number of examples and the batch size as public.",
    "The proof is in real arithmetic, the outputs are floating point numbers: whoever knows all other records to the "
    "last bit and sees exact released sums can learn more than epsilon says (docs/guarantee.md, section 11).",
)


def make_report(settings: Settings, ledger: Ledger, facts: dict[str, Any]) -> PrivacyReport:
    """The report of a ledger; ``facts`` as the callback gathered them when its fit was planned."""
    multiplier = facts.get("noise_multiplier", settings.noise_multiplier)
    threshold = current_threshold(settings, ledger.clipping)
    adaptive = settings.clipping == "adaptive"
    return PrivacyReport(
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
        scale=None if multiplier is None else settings.mechanism_with(multiplier, max_grad_norm=threshold).scale,
        sample_rate=facts.get("sample_rate"),
        expected_batch_size=facts.get("expected_batch_size"),
        num_examples=facts.get("num_examples"),
        dimension=facts.get("dimension"),
        steps=ledger.releases,
        planned_steps=facts.get("planned_steps"),
        best_order=ledger.accountant.best_order(settings.delta) if ledger.accountant.steps else None,
        engine=facts.get("engine", settings.engine),
        augmentations=settings.augmentations,
        noise_source=facts.get("noise_source"),
        noise_seed=settings.noise_seed,
        reproducible=ledger.reproducible,
        precision=facts.get("precision"),
        world_size=facts.get("world_size"),
        caveats=tuple(_caveats(settings, ledger, facts)),
        versions=_versions(),
        clipping_threshold=threshold if adaptive else None,
        target_quantile=settings.target_quantile or TARGET_QUANTILE if adaptive else None,
        clip_learning_rate=settings.clip_learning_rate or CLIP_LEARNING_RATE if adaptive else None,
        count_noise_scale=facts.get("count_noise_scale"),
        epsilon_without_count=ledger.epsilon_without_extra_blocks() if adaptive else None,
    )


def _caveats(settings: Settings, ledger: Ledger, facts: dict[str, Any]) -> list[str]:
    """Every caveat that applies, the gravest first."""
    found: list[str] = []
    if settings.noise_multiplier == 0:
        found.append("No noise was added: epsilon is infinite.")
    if ledger.reproducible:
        found.append(
            "noise_seed makes the noise and the draws reproducible: whoever knows the seed can remove them, so the run "
            "is not private."
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
