"""Registrations end with the test that made them."""

from __future__ import annotations

import pytest

from lightning_lap2 import _registry
from lightning_lap2.batches import containers
from lightning_lap2.noise import quantile


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in _registry.REGISTRIES:
        monkeypatch.setattr(registry, "_added", dict(registry._added))
    monkeypatch.setattr(containers, "_REGISTERED", dict(containers._REGISTERED))
    quantile.magnitude_of.cache_clear()
