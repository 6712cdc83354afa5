"""Audits: an empirical lower bound on the epsilon of a training, to hold against the claimed one.

``bounds`` needs numpy and scipy alone; the rest runs the training and needs torch and Lightning, which is why the
names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lap2._lazy import lazy

if TYPE_CHECKING:
    from lightning_lap2.audit.auditing import audit
    from lightning_lap2.audit.bench import Training
    from lightning_lap2.audit.neighbours import replay
    from lightning_lap2.audit.plots import plot
    from lightning_lap2.audit.replay_result import ReplayResult
    from lightning_lap2.audit.result import AuditResult

__all__ = ["AuditResult", "ReplayResult", "Training", "audit", "plot", "replay"]

_HOMES = {
    "AuditResult": "lightning_lap2.audit.result",
    "Training": "lightning_lap2.audit.bench",
    "audit": "lightning_lap2.audit.auditing",
    "plot": "lightning_lap2.audit.plots",
    "ReplayResult": "lightning_lap2.audit.replay_result",
    "replay": "lightning_lap2.audit.neighbours",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
