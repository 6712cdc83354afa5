"""Checks on a few real records before any data is spent (torch only; no Lightning)."""

from __future__ import annotations

from lightning_lap2.gradients.preflight.check import PreflightResult, preflight, unchecked_ghost
from lightning_lap2.gradients.preflight.state import untouched

__all__ = ["PreflightResult", "preflight", "unchecked_ghost", "untouched"]
