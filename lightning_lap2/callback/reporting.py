"""What is said of a fit: a line when its plan stands, the privacy report with every caveat that applies."""

from __future__ import annotations

import math
import platform
from importlib import metadata

from lightning_lap2._registry import trusted
from lightning_lap2._version import __version__
from lightning_lap2.callback.adaptive import current_threshold
from lightning_lap2.callback.data import DataFacts
from lightning_lap2.callback.facts import RunFacts
from lightning_lap2.callback.ledger.ledger import Ledger
from lightning_lap2.callback.session import FitSession
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


def run_facts(session: FitSession) -> RunFacts:
    """What is known of a fit whose plan stands."""
    run, mechanism = session.run, session.releases.mechanism
    facts, trainer = run.facts, run.fit.trainer
    return RunFacts(
        noise_multiplier=run.plan.noise_multiplier,
        sample_rate=facts.sample_rate,
        expected_batch_size=facts.expected_batch_size,
        num_examples=facts.num_examples,
        num_records=facts.num_records,
        dimension=session.layout.numel,
        count_noise_scale=mechanism.count_noise_scale,
        rounding_margin=mechanism.margin if run.plan.noise_multiplier else None,
        planned_steps=run.planned_steps,
        noise_source=run.noise.name,
        world_size=run.fit.ranks.size,
        precision=str(trainer.precision),
        fast_dev_run=bool(trainer.fast_dev_run),
        once_per_pass=facts.once_per_pass,
        engine=run.fit.settings.engine,
    )


# what the report takes over as it is
_REPORTED = (
    "sample_rate", "expected_batch_size", "num_examples", "num_records", "dimension", "planned_steps", "noise_source",
    "world_size", "precision", "rounding_margin", "count_noise_scale",
)  # fmt: skip


def make_report(settings: Settings, ledger: Ledger, facts: RunFacts | None) -> PrivacyReport:
    """The report of what a ledger has been charged.

    Args:
        settings: the callback's arguments.
        ledger: releases and their epsilon, over all fits that it knows.
        facts: of the callback's latest fit; ``None`` before the first, whose values are then ``None`` in the report.

    Returns:
        The report; its caveats are those that apply, the gravest first, :data:`~lightning_lap2.report.GENERAL_CAVEATS`
        last. Epsilon is in nats, C and the noise scale in units of the gradient.
    """
    multiplier = settings.noise_multiplier if facts is None else facts.noise_multiplier
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
        unit=settings.unit_name,
        records_per_unit=None if settings.unit is None else settings.rows_per_unit,
        steps=ledger.releases,
        best_order=ledger.accountant.best_order(settings.delta) if ledger.accountant.steps else None,
        engine=settings.engine if facts is None else facts.engine,
        augmentations=settings.augmentations,
        noise_seed=settings.noise_seed,
        reproducible=ledger.reproducible,
        caveats=tuple(_caveats(settings, ledger, facts)),
        versions=_versions(),
        clipping_threshold=threshold if adaptive else None,
        target_quantile=settings.target_quantile or TARGET_QUANTILE if adaptive else None,
        clip_learning_rate=settings.clip_learning_rate or CLIP_LEARNING_RATE if adaptive else None,
        epsilon_without_count=ledger.epsilon_without_extra_blocks() if adaptive else None,
        **{name: getattr(facts, name, None) for name in _REPORTED},
    )


def _caveats(settings: Settings, ledger: Ledger, facts: RunFacts | None) -> list[str]:
    """Every caveat that applies, the gravest first."""
    found = [*_of_the_settings(settings, ledger, facts), *_of_the_ledger(ledger)]
    if settings.on_record_error == "zero":
        found.append(
            "on_record_error='zero': a record that cannot be read, or on which the step raises, counts as one "
            "without a gradient, and nothing says how many did"
        )
    if facts is not None:
        found += _of_the_fit(facts)
    if settings.unit is None:
        return [*found, *GENERAL_CAVEATS]
    general = [text for text in GENERAL_CAVEATS if text != ONE_EXAMPLE]
    return [*found, *general, _ONE_USER.format(unit=settings.unit_name)]


def _of_the_settings(settings: Settings, ledger: Ledger, facts: RunFacts | None) -> list[str]:
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
        if facts is not None and not facts.once_per_pass:
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
    return found


def _of_the_ledger(ledger: Ledger) -> list[str]:
    found = list(ledger.caveats)
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
    return found


def _of_the_fit(facts: RunFacts) -> list[str]:
    found = list(facts.caveats)
    if facts.noise_source == "torch":
        found.append(_TORCH_NOISE)
    if facts.rounding_margin:
        found.append(_floating_point(facts.rounding_margin))
    if facts.fast_dev_run:
        found.append("fast_dev_run: a trial run, charged like any other.")
    return found


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


def announcement(session: FitSession, ledger: Ledger, scale: float, threshold: float) -> str:
    """One line when the plan stands.

    Args:
        scale: of the noise on the next release.
        threshold: C of the next release.
    """
    run, settings, steps = session.run, session.run.fit.settings, session.run.planned_steps
    facts = run.facts
    return (
        f"eps={settings.eps:g}, delta={settings.delta:g}, {settings.mechanism} noise multiplier "
        f"{run.plan.noise_multiplier:.6g} (scale {scale:.6g}, C={threshold:g}"
        + ("" if settings.clipping == "flat" else f", {settings.clipping} clipping")
        + "), sample rate "
        f"{facts.sample_rate:.6g}, planned steps {'unlimited' if math.isinf(steps) else int(steps)}, "
        f"n={session.layout.numel:,} trainable parameters, engine {settings.engine!r}, noise source "
        f"{run.noise.name!r}"
        + (f", {settings.augmentations} views per example" if settings.augmentations > 1 else "")
        + _units_in_words(settings, facts)
        + (f", {ledger.releases} earlier releases" if ledger.releases else "")
        + (" [fast_dev_run: its step is charged too]" if run.fit.trainer.fast_dev_run else "")
    )


def _units_in_words(settings: Settings, facts: DataFacts) -> str:
    if settings.unit is None:
        return ""
    return (
        f", {facts.num_examples:,} units ({settings.unit_name}) of {facts.num_records:,} records, "
        f"{settings.rows_per_unit} shown of each drawn"
    )
