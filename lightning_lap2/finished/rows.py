"""The settings and sizes of a run, in words: the same rows for the page and for the text."""

from __future__ import annotations

import math

from lightning_lap2.accounting import FAMILIES
from lightning_lap2.report import PrivacyReport


def rows(report: PrivacyReport) -> list[tuple[str, str]]:
    """(what, value with its unit), what a reader asks for first to the front; unknown values are left out."""
    found = [
        ("releases (optimizer steps)", _steps(report)),
        ("mechanism", f"{report.mechanism}, bound {report.bound}"),
        ("clipping", _clipping(report)),
        ("noise multiplier", _number(report.noise_multiplier, ", scale / C")),
        ("noise scale", _number(report.scale, f", {_scale_name(report)}, in units of the gradient")),
        ("sampling", f"{report.sampling}, adjacency: {report.adjacency}"),
        ("sample rate q", _number(report.sample_rate)),
        ("expected batch size", _number(report.expected_batch_size, " examples")),
        ("training examples N", _number(report.num_examples)),
        ("trainable parameters n", _number(report.dimension)),
        ("engine", report.engine),
        ("views per example", None if report.augmentations == 1 else str(report.augmentations)),
        ("noise source", report.noise_source),
        ("precision", report.precision),
        ("processes", None if report.world_size in (None, 1) else str(report.world_size)),
    ]
    return [(what, value) for what, value in found if value is not None]


def _steps(report: PrivacyReport) -> str:
    planned = report.planned_steps
    if planned is None or math.isinf(planned):
        return f"{report.steps:,}"
    return f"{report.steps:,}, this fit planned {planned:,.0f}"


def _clipping(report: PrivacyReport) -> str:
    family = FAMILIES.get(report.mechanism)  # None: registered by the process that trained, not by this one
    kind = report.clipping if family is None else f"{report.clipping}, {family.norm}"
    if report.clipping_threshold is None:
        return f"{kind}, C = {report.max_grad_norm:g}"
    return f"{kind}, C from {report.max_grad_norm:g} to {report.clipping_threshold:.4g}"


def _scale_name(report: PrivacyReport) -> str:
    family = FAMILIES.get(report.mechanism)
    return "scale" if family is None else family.noise.scale_name


def _number(value: float | None, unit: str = "") -> str | None:
    if value is None:
        return None
    return (f"{value:,}" if isinstance(value, int) else f"{value:.6g}") + unit
