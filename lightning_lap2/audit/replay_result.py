"""The verdict of a neighbour replay, as a table and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_lap2.choices import Norm
from lightning_lap2.report import PrivacyReport


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One record, and how the training without it differs. Lengths are in units of C, in the clipping norm.

    Attributes:
        record: its index in the data set.
        draws: releases in which it was drawn.
        moved: largest difference of a release in which it was drawn.
        moved_elsewhere: largest difference of the other releases.
        rounding: how far two equal sums may differ here, since the noise that cancels is rounded with them.
        changed: names of public quantities that differ; none may.
    """

    record: int
    draws: int
    moved: float
    moved_elsewhere: float
    rounding: float
    changed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What :func:`lightning_lap2.audit.replay` found. ``str()`` gives a table, ``to_dict()`` plain values.

    Attributes:
        claim: the privacy report of the run with all records, after ``steps`` releases.
        null: ``"absent"`` (the record was left out of its batches) or ``"zero"`` (its gradient was zeroed).
        norm: the clipping norm.
        steps: releases compared.
        slack: how far C may be exceeded, relative to it, by rounding in the engine.
        neighbours: one for each record.
        seed: as given.
    """

    claim: PrivacyReport
    null: str
    norm: Norm
    steps: int
    slack: float
    neighbours: tuple[Neighbour, ...]
    seed: int

    def faults(self, neighbour: Neighbour) -> tuple[str, ...]:
        """What this neighbour violates, in words."""
        found = [f"{name} changed" for name in neighbour.changed]
        allowed = self.slack + neighbour.rounding
        if not neighbour.moved <= 1 + allowed:  # also where it is nan
            found.append("a release moved by more than C")
        if not neighbour.moved_elsewhere <= allowed:
            found.append("a release moved in which the record was not drawn")
        return tuple(found)

    @property
    def violated(self) -> bool:
        """Whether any record shows a fault."""
        return any(self.faults(neighbour) for neighbour in self.neighbours)

    def to_dict(self) -> dict[str, Any]:
        return {
            "violated": self.violated,
            "null": self.null,
            "norm": self.norm,
            "steps": self.steps,
            "slack": self.slack,
            "seed": self.seed,
            "max_grad_norm": self.claim.max_grad_norm,
            "neighbours": [
                {**asdict(n), "changed": list(n.changed), "faults": list(self.faults(n))} for n in self.neighbours
            ],
        }

    def __str__(self) -> str:
        claim = self.claim
        how = "left out of its batches" if self.null == "absent" else "its gradient zeroed, since the step is random"
        who = "record" if claim.unit is None else "unit"
        rows = [
            f"| {n.record} | {n.draws} | {n.moved:.6f} | {n.moved_elsewhere:.2g} | {n.rounding:.1g} | "
            f"{'; '.join(self.faults(n)) or 'ok'} |"
            for n in self.neighbours
        ]
        verdict = (
            "VIOLATED: the training is not what its epsilon is computed for"
            if self.violated
            else "no fault found (which is no proof that there is none)"
        )
        return "\n".join(
            [
                f"Neighbour replay of {self.steps} releases, engine {claim.engine}, sampling {claim.sampling}, "
                f"clipping {claim.clipping}, C = {claim.max_grad_norm:g} in the {self.norm} norm, N = "
                f"{claim.num_examples}, seed {self.seed}; each {who} {how}",
                "",
                f"| {who} | draws | moved / C | moved elsewhere / C | rounding / C | verdict |",
                "|---|---|---|---|---|---|",
                *rows,
                "",
                verdict,
            ]
        )
