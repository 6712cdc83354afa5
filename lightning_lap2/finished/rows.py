"""The settings and sizes of a run, in words: the same rows for the page and for the text."""

from __future__ import annotations

import math

from lightning_lap2.report import PrivacyReport

_NOISE = {"laplace": "b of Laplace noise", "laplace_l1": "b of Laplace noise", "gaussian": "sigma of Gaussian noise"}


def rows(report: PrivacyReport) -> list[tuple[str, str]]:
    """(what, value with its unit), what a reader asks for first to the front; unknown values are left out."""
    found = [
        ("releases (optimizer steps)", _steps(report)),
        ("mechanism", f"{report.mechanism}, bound {report.bound}"),
        ("clipping", _clipping(report)),
        ("noise multiplier", _number(report.noise_multiplier, ", scale / C")),
        ("noise scale", _number(report.scale, f", {_NOISE.get(report.mechanism, 'scale')}, in units of the gradient")),
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
    norm = "l1" if report.mechanism == "laplace_l1" else "l2"
    if report.clipping_threshold is None:
        return f"{report.clipping}, {norm}, C = {report.max_grad_norm:g}"
    return f"{report.clipping}, {norm}, C from {report.max_grad_norm:g} to {report.clipping_threshold:.4g}"


def _number(value: float | None, unit: str = "") -> str | None:
    if value is None:
        return None
    return (f"{value:,}" if isinstance(value, int) else f"{value:.6g}") + unit
