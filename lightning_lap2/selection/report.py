"""The report of a search: what is guaranteed of its result, and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_lap2.accounting.selection import RunCount
from lightning_lap2.report import rounded_up, write_files

JSON_NAME = "search_report.json"
MARKDOWN_NAME = "search_report.md"

CAVEATS = (
    "The score must be a function of the run's weights and of public data (or of data that the guarantee is not "
    "about). A score from private records, such as accuracy on the training set or on a private validation set, is not "
    "covered.",
    "Only the best run may be seen: its weights, configuration and score. What train wrote outside the run's folder "
    "(prints, files, remote loggers, caches) must be deleted for every run, and of the best one's log what holds "
    "metrics of the training data.",
    "The number of runs is secret, and so is what tells it: the time that the search took, its progress, and the logs "
    "of the process.",
    "The configurations, how many runs are expected, and the train function must not depend on the private data. train "
    "must not carry anything from one run to the next, and must stay as it is when a search is resumed.",
    "A search that was stopped or begun anew because of what one of its runs showed (also an error that the data "
    "caused) has released more than the best run. Every search that was begun is paid for by itself.",
)


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """``str()`` gives Markdown, ``to_dict()`` plain values.

    Attributes:
        eps: the budget of the search.
        epsilon: its price at ``delta``, however many runs were drawn.
        adjacency: what the neighbouring data set is.
        distribution, mean_runs, shape, mode: of the search.
        points: (epsilon, delta) of one run that the price follows from.
        divergences: (order, Renyi divergence) of one run that the price follows from.
        finished: whether the search is over.
        score, config: of the best run; ``None`` before, and where no run was drawn.
        run: the best run's own report, whose epsilon is that of the run alone.
        caveats: what is not covered.
    """

    eps: float
    epsilon: float
    delta: float
    adjacency: str
    distribution: str
    mean_runs: float
    shape: float
    mode: str
    points: tuple[tuple[float, float], ...]
    divergences: tuple[tuple[float, float], ...]
    finished: bool
    score: float | None
    config: Any
    run: dict[str, Any] | None
    caveats: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for standard JSON: infinities as strings, objects in a configuration by ``repr``."""
        text = json.dumps(asdict(self), default=repr)
        plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: name.replace("Infinity", "inf"))
        return plain

    def __str__(self) -> str:
        rows = {
            "score": self.score,
            "configuration": self.config,
            "mean number of runs": self.mean_runs,
            "distribution": RunCount(self.mean_runs, self.distribution, self.shape).name,  # type: ignore[arg-type]
            "best is": {"max": "the largest score", "min": "the smallest score"}[self.mode],
            "one run is": "; ".join(f"({rounded_up(e)}, {d:.6g})-DP" for e, d in self.points),
            "its Renyi divergence": "; ".join(f"{rounded_up(d)} at order {order:g}" for order, d in self.divergences),
        }
        wanted = ("mechanism", "noise_multiplier", "max_grad_norm", "clipping", "sample_rate", "dimension", "steps")
        rows |= {f"best run's {key}": (self.run or {}).get(key) for key in wanted}
        table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value not in (None, ""))
        caveats = "\n".join(f"* {text}" for text in self.caveats)
        return (
            f"# Search report\n\n{self._statement()}\n\n| | |\n|---|---|\n{table}\n\n"
            f"## What this does not cover\n\n{caveats}\n"
        )

    def _statement(self) -> str:
        if not self.finished:
            return "The search is not over: nothing of it may be released yet."
        guarantee = (
            f"({rounded_up(self.epsilon)}, {self.delta:g})-differentially private under {self.adjacency}, of a budget "
            f"of {self.eps:g}"
        )
        if self.score is None:
            return f"No run was drawn, so there is nothing to release. That this happened is {guarantee}."
        return f"The best run of a secret number (its weights, configuration and score) is {guarantee}."

    def write(self, folder: Path, *, warn: Callable[[str], object]) -> None:
        """Writes ``search_report.json`` and ``.md``; a failure is a warning."""
        files = {JSON_NAME: json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", MARKDOWN_NAME: str(self)}
        write_files(
            files, folder, warn=lambda error: warn(f"the search report could not be written to {folder}: {error}")
        )
