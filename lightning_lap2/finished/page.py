"""A finished run as one HTML page that holds everything it shows: it can be mailed, archived and opened offline."""

from __future__ import annotations

import math
import re
from html import escape

from lightning_lap2.finished.chart import Chart
from lightning_lap2.finished.rows import rows
from lightning_lap2.finished.run import FinishedRun, shared
from lightning_lap2.finished.style import STYLE
from lightning_lap2.report import GENERAL_CAVEATS, PrivacyReport, rounded_up

_SEEN = {
    "guarantee": "Differentially private",
    "nothing": "Nothing was released",
    "untrained": "Nothing was trained",
    "reproducible": "Not private: the noise is reproducible",
    "invalid": "Not a valid guarantee",
    "infinite": "No privacy guarantee",
}


def page(run: FinishedRun) -> str:
    """The page: the statement, epsilon over steps, C where it adapts, the caveats, the run's settings."""
    report = run.report
    body = "\n".join(
        part
        for part in (
            _head(report),
            _epsilon_chart(run),
            _threshold_chart(run),
            _caveats(report),
            _table(report),
            f"<footer>{escape(_versions(report))}<br>from {escape(run.source.name)}</footer>",
        )
        if part
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Privacy report: {escape(_SEEN[report.standing])}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: PrivacyReport) -> str:
    numbers = [
        ("ε spent", rounded_up(report.epsilon) if math.isfinite(report.epsilon) else "∞"),
        ("budget", f"{report.eps:g}" if math.isfinite(report.eps) else "none"),
        ("δ", f"{report.delta:g}"),
        ("releases", f"{report.steps:,}"),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers)
    return (
        f'<header class="{report.standing}">\n<p class="kicker">Privacy report</p>\n'
        f"<h1>{escape(_SEEN[report.standing])}</h1>\n<p>{_emphasised(report.statement())}</p>\n"
        f"<dl>{tiles}</dl>\n{_budget(report)}</header>"
    )


def _budget(report: PrivacyReport) -> str:
    """How much of the budget is spent, as a bar."""
    if not (math.isfinite(report.eps) and math.isfinite(report.epsilon) and report.eps > 0):
        return ""
    percent = min(100.0, 100 * report.epsilon / report.eps)
    return (
        f'<div class="bar" role="img" aria-label="{percent:.1f} % of the budget is spent">'
        f'<div style="width:{percent:.2f}%"></div></div>\n<p class="small">{percent:.1f} % of the budget is spent</p>\n'
    )


def _epsilon_chart(run: FinishedRun) -> str:
    if not run.epsilon:
        return (
            "<section><h2>Epsilon over steps</h2><p>No <code>privacy/epsilon</code> was found beside the report: "
            "neither in a TensorBoard event file nor in <code>metrics.csv</code>.</p></section>"
        )
    report = run.report
    points = tuple(point for point in run.epsilon if math.isfinite(point[1]))
    if not points:
        return "<section><h2>Epsilon over steps</h2><p>It was infinite at every step.</p></section>"
    level = (report.eps, f"budget {report.eps:g}") if math.isfinite(report.eps) else None
    chart = Chart("epsilon over steps", f"ε at δ = {report.delta:g}", points, level)
    return (
        f"<section><h2>Epsilon over steps</h2>\n{chart.svg()}\n<p class=small>As it was logged: an upper bound of what "
        f"had been spent after each step.{shared(run)}</p></section>"
    )


def _threshold_chart(run: FinishedRun) -> str:
    if not run.threshold:
        return ""
    chart = Chart("clipping threshold over steps", "C, units of the gradient", run.threshold)
    aim = run.report.target_quantile
    return (
        f"<section><h2>The clipping threshold</h2>\n{chart.svg()}\n<p class=small>C follows the "
        f"{'' if aim is None else f'{aim:g} '}quantile of gradient norms through noisy counts, which the guarantee "
        "includes.</p></section>"
    )


def _caveats(report: PrivacyReport) -> str:
    own = [caveat for caveat in report.caveats if caveat not in GENERAL_CAVEATS]
    general = [caveat for caveat in report.caveats if caveat in GENERAL_CAVEATS]
    parts = ["<section><h2>What this does not cover</h2>"]
    if own:
        parts.append(f"<h3>In this run, the gravest first</h3>\n{_items(own, 'own')}")
    if general:
        parts.append(f"<h3>In every run</h3>\n{_items(general, 'general')}")
    return "\n".join([*parts, "</section>"])


def _items(caveats: list[str], kind: str) -> str:
    return f'<ol class="{kind}">' + "".join(f"<li>{_emphasised(caveat)}</li>" for caveat in caveats) + "</ol>"


def _table(report: PrivacyReport) -> str:
    cells = "\n".join(f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in rows(report))
    return f"<section><h2>The run</h2>\n<table>\n{cells}\n</table></section>"


def _versions(report: PrivacyReport) -> str:
    return " · ".join(f"{name} {version}" for name, version in report.versions.items())


def _emphasised(markdown: str) -> str:
    """The report's own Markdown, which has nothing but bold."""
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(markdown))
