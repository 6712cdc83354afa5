"""Audits: an empirical lower bound on the epsilon of a training, to hold against the claimed one.

``bounds`` needs numpy and scipy alone; the rest runs the training and needs torch and Lightning, which is why the
names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_lap2.audit.auditing import audit
    from lightning_lap2.audit.bench import Training
    from lightning_lap2.audit.plots import plot
    from lightning_lap2.audit.result import AuditResult

__all__ = ["AuditResult", "Training", "audit", "plot"]

_HOMES = {
    "AuditResult": "lightning_lap2.audit.result",
    "Training": "lightning_lap2.audit.bench",
    "audit": "lightning_lap2.audit.auditing",
    "plot": "lightning_lap2.audit.plots",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
