"""Charging during a fit, and the epsilon that is logged: microseconds a step, never below the truth."""

from __future__ import annotations

import math
from typing import Any

from lightning_lap2.accounting import EpsilonForecast
from lightning_lap2.callback.ledger import Ledger

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
        self._charge: dict[str, Any] = {}
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

    def forecast_for(self, charge: dict[str, Any]) -> None:
        """Plans the logged numbers for further charges like this one."""
        self._charge = charge
        self._reach = int(self._left) if math.isfinite(self._left) else max(_BLOCK, self._ledger.accountant.steps)
        self._since = 0
        self._forecast = self._ledger.accountant.forecast(delta=self._ledger.delta, steps=self._reach, **charge)

    def charge(self, charge: dict[str, Any], *, accounted: bool) -> None:
        """One release, before it happens."""
        self._ledger.charge(charge, accounted=accounted)
        if not accounted:
            return
        self._left -= 1
        self._since += 1
        if charge != self._charge or self._since > self._reach:
            self.forecast_for(charge)

    @property
    def epsilon(self) -> float:
        """An upper bound on what is spent, exact at the end of the plan; never decreases during a fit."""
        assert self._forecast is not None
        self._logged = max(self._logged, self._forecast.epsilon(self._since))
        return self._logged
