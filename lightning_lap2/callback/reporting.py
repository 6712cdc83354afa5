"""From settings, ledger and plan to the privacy report, with every caveat that applies."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from lightning_lap2._registry import trusted
from lightning_lap2._version import __version__
from lightning_lap2.callback.adaptive import current_threshold
from lightning_lap2.callback.ledger import Ledger
from lightning_lap2.callback.settings import CLIP_LEARNING_RATE, TARGET_QUANTILE, Settings
from lightning_lap2.report import GENERAL_CAVEATS, ONE_EXAMPLE, PrivacyReport

_ONE_USER = (
    "The guarantee is for one user with all records that the data set's ids ({unit}) give to it (not for one with "
    "several ids, nor one that others' records speak of; not for replacing one), and takes the numbers of units and of "
    "records and the batch size as public."
)
_TORCH_NOISE = (
    "The noise is drawn from torch's generator, keyed anew by the operating system at each release. It is a "
    "statistical generator and not a cryptographic one: the guarantee holds if its output cannot be told from uniform "
    "bits. noise_source='aes' does not need that."
)


def make_report(settings: Settings, ledger: Ledger, facts: dict[str, Any]) -> PrivacyReport:
    """The report of what a ledger has been charged.

    Args:
        settings: the callback's arguments.
        ledger: releases and their epsilon, over all fits that it knows.
        facts: sizes and choices as the callback gathered them when its latest fit was planned; empty before the first
            fit, whose values are then ``None`` in the report.

    Returns:
        The report; its caveats are those that apply, the gravest first, :data:`~lightning_lap2.report.GENERAL_CAVEATS`
        last. Epsilon is in nats, C and the noise scale in units of the gradient.
    """
    multiplier = facts.get("noise_multiplier", settings.noise_multiplier)
    threshold = current_threshold(settings, ledger.clipping)
    adaptive = settings.clipping == "adaptive"
    return PrivacyReport(
        run=ledger.run,
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
        num_records=facts.get("num_records"),
        unit=settings.unit_name,
        records_per_unit=None if settings.unit is None else settings.rows_per_unit,
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
        rounding_margin=facts.get("rounding_margin"),
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
    if settings.public_state:
        found.append(
            f"public_state={list(settings.public_state)!r}: vouched for by whoever trained, not checked to be free "
            "of records"
        )
    if added := trusted():
        found.append(
            f"Registered in the process that trained, and believed like code of lightning-lap2: {', '.join(added)}. "
            "What was stated of them is not proven here."
        )
    found += ledger.caveats
    if ledger.elsewhere:
        found.append(
            f"{ledger.elsewhere} later releases of this run exist in other branches, which went on from an earlier "
            "checkpoint: they are not in this epsilon. Whoever sees the results of several branches sees the releases "
            "of all."
        )
    if ledger.changes:
        found.append(
            f"Arguments changed between the fits of this ledger ({_shortened(ledger.changes)}). Epsilon composes all "
            "releases as if their parameters had been fixed beforehand. Where they were chosen after looking at "
            "released weights or at metrics, that takes a Renyi filter (Feldman and Zrnic 2021, arXiv 2008.11193; "
            "Whitehouse et al. 2023, arXiv 2203.05481), which is not offered here."
        )
    if settings.on_record_error == "zero":
        found.append(
            "on_record_error='zero': a record that cannot be read, or on which the step raises, counts as one "
            "without a gradient, and nothing says how many did"
        )
    found += facts.get("caveats", ())
    if facts.get("noise_source") == "torch":
        found.append(_TORCH_NOISE)
    if facts.get("rounding_margin"):
        found.append(_floating_point(facts["rounding_margin"]))
    if facts.get("fast_dev_run"):
        found.append("fast_dev_run: a trial run, charged like any other.")
    if settings.unit is None:
        return [*found, *GENERAL_CAVEATS]
    general = [text for text in GENERAL_CAVEATS if text != ONE_EXAMPLE]
    return [*found, *general, _ONE_USER.format(unit=settings.unit_name)]


def _floating_point(margin: float) -> str:
    """What is proven of the floats that come out, and what is measured."""
    return (
        "Floating point: each sum has its noise added in float64 and is rounded once, to a grid; that costs no more "
        "than a shift of 2^-32 noise scales in each coordinate (proven: docs/guarantee.md, Theorem 8). How far the "
        "rounding of the sum itself can move it is measured, not proven. Both are paid for by a margin: gradients are "
        f"clipped to {1 - margin:.6g} of max_grad_norm, all of which is charged."
    )


def _shortened(sentences: list[str], shown: int = 3) -> str:
    """The latest of them, and how many there are besides."""
    more = [f"{len(sentences) - shown} earlier changes"] if len(sentences) > shown else []
    return "; ".join(more + sentences[-shown:])


def _versions() -> dict[str, str]:
    found = {"lightning-lap2": __version__, "python": platform.python_version()}
    for name in ("torch", "lightning", "pytorch-lightning", "numpy", "scipy", "dp-accounting"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
