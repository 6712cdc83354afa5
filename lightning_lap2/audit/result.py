"""What an audit found, for people and machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_lap2.audit.bounds import GuessesBound, RatesBound
from lightning_lap2.report import PrivacyReport, rounded_up


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """One audit.

    Attributes:
        method: ``"one_run"`` or ``"many_runs"``.
        canary: kind of the canaries.
        claim: the privacy report of the audited training.
        claimed_epsilon: what its ledger claims at ``delta``.
        delta: the claim's, or the one that was asked for.
        bound: the evidence, with its ``epsilon``: the lower bound.
        confidence: probability with which the lower bound is one.
        runs, canaries: runs made, canaries in each.
        seconds: wall time.
        seed: of everything random.
        scores, included: ``[runs, canaries]``, one score and one coin per run and canary.
    """

    method: str
    canary: str
    claim: PrivacyReport
    claimed_epsilon: float
    delta: float
    bound: RatesBound | GuessesBound
    confidence: float
    runs: int
    canaries: int
    seconds: float
    seed: int
    scores: npt.NDArray[np.float64] = field(repr=False)
    included: npt.NDArray[np.bool_] = field(repr=False)

    @property
    def epsilon(self) -> float:
        """The audited lower bound, at the claim's delta."""
        return self.bound.epsilon

    @property
    def violated(self) -> bool:
        """Whether the lower bound is above the claim: at most a probability of 1 - confidence if the claim is true."""
        return self.epsilon > self.claimed_epsilon

    def to_dict(self) -> dict[str, Any]:
        """Plain values; no score of a single run."""
        claim = self.claim.to_dict()
        kept = (
            "mechanism", "bound", "sampling", "max_grad_norm", "noise_multiplier", "sample_rate",
            "expected_batch_size", "num_examples", "dimension", "steps", "engine", "adjacency", "versions",
        )  # fmt: skip
        return {
            "claimed_epsilon": "inf" if math.isinf(self.claimed_epsilon) else self.claimed_epsilon,
            "epsilon_lower_bound": self.epsilon,
            "ceiling": self.bound.ceiling,
            "delta": self.delta,
            "confidence": self.confidence,
            "violated": self.violated,
            "method": self.method,
            "canary": self.canary,
            "runs": self.runs,
            "canaries": self.canaries,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "evidence": asdict(self.bound),
            "training": {key: claim[key] for key in kept},
        }

    def __str__(self) -> str:
        claim = self.claim
        verdict = (
            "VIOLATED: the audited lower bound is above the claimed epsilon. The training leaks more than it claims"
            if self.violated
            else "not refuted: the lower bound is at or below the claim (which does not prove the claim)"
        )
        if not self.violated and self.bound.ceiling <= self.claimed_epsilon:
            verdict += ". It could not have been: more runs or canaries, or a smaller delta, would show more"
        return "\n".join(
            [
                f"claimed epsilon      {rounded_up(self.claimed_epsilon)} at delta = {self.delta:g}",
                f"audited lower bound  {self.epsilon:.4f} at confidence {self.confidence:g} (at most "
                f"{self.bound.ceiling:.4g} with no error at all)",
                f"evidence             {_evidence(self.bound)}",
                f"method               {self.method}, {self.runs} run{'s' * (self.runs != 1)}, {self.canaries} "
                f"{self.canary} canar{'ies' if self.canaries != 1 else 'y'} each, seed {self.seed}",
                f"training             {claim.mechanism}, noise multiplier {claim.noise_multiplier:.6g}, q = "
                f"{claim.sample_rate:.6g}, {claim.steps} releases, n = {claim.dimension:,}, engine {claim.engine}",
                f"time                 {self.seconds:.1f} s",
                f"verdict              {verdict}.",
            ]
        )


def _evidence(bound: RatesBound | GuessesBound) -> str:
    if isinstance(bound, GuessesBound):
        side = "in or out" if bound.sides == "both" else "in"
        return f"{bound.correct} of {bound.guesses} guesses ({side}) right, among {bound.canaries} coins"
    t, f = bound.true, bound.false
    sign = ">=" if bound.direction == "in" else "<="
    return (
        f"score {sign} {bound.threshold:.4g} (canary {bound.canary}): {t.count} of {t.trials} runs that should "
        f"(at least {t.low:.4f}), {f.count} of {f.trials} that should not (at most {f.high:.4f})"
    )
