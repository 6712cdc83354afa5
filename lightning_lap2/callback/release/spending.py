"""Charging during a fit, and the epsilon that is logged: microseconds a step, never below the truth."""

from __future__ import annotations

import math

from lightning_lap2.accounting import EpsilonForecast, Release
from lightning_lap2.accounting.forecast import build_forecast
from lightning_lap2.callback.ledger.ledger import Ledger

# A run without a last step is forecast this far ahead, then again.
_BLOCK = 1000


class Spending:
    """The ledger seen from one fit.

    Args:
        charges: how many further charges this fit may make; ``inf`` without a budget.
    """

    def __init__(self, ledger: Ledger, charges: float) -> None:
        self._ledger = ledger
        self._left = charges
        self._release: Release | None = None
        self._forecast: EpsilonForecast | None = None
        self._reach = 0
        self._since = 0
        self._logged = 0.0

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def limit(self, charges: float) -> None:
        """Further charges affordable, judged anew; never more than were planned."""
        self._left = min(self._left, charges)

    def forecast_for(self, release: Release) -> None:
        """Plans the logged numbers for further releases like this one."""
        self._release = release
        self._reach = int(self._left) if math.isfinite(self._left) else max(_BLOCK, self._ledger.accountant.steps)
        self._since = 0
        spent = self._ledger.accountant.composition
        self._forecast = build_forecast(spent, release, self._reach, self._ledger.delta)

    def charge(self, release: Release, *, accounted: bool) -> None:
        """One release, before it happens."""
        self._ledger.charge(release, accounted=accounted)
        if not accounted:
            return
        self._left -= 1
        self._since += 1
        if release != self._release or self._since > self._reach:
            self.forecast_for(release)

    @property
    def epsilon(self) -> float:
        """An upper bound on what is spent, exact at the end of the plan; never decreases during a fit."""
        assert self._forecast is not None
        self._logged = max(self._logged, self._forecast.epsilon(self._since))
        return self._logged
