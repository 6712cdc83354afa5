"""The plan in the loggers' hyperparameters, whatever they make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_lap2.callback.ledger.ledger import Ledger


def log_hyperparameters(
    loggers: Iterable[Any], values: Mapping[str, float], ledger: Ledger, warn: Callable[[str], None]
) -> None:
    """Hands ``values`` to every logger.

    Experiment trackers take a hyperparameter once and refuse to change it (MLflow raises). What a later fit of a ledger
    changed (a calibrated multiplier, say) therefore goes under a name of its own, with the release it holds from. A
    logger that raises all the same is warned of, and training goes on: the report has the values.
    """
    named = {
        name if ledger.logged.get(name, value) == value else f"{name}_from_release_{ledger.releases + 1}": value
        for name, value in values.items()
    }
    ledger.logged = {**values, **ledger.logged}
    refused = []
    for logger in loggers:
        try:
            logger.log_hyperparams(named)
        except Exception as error:  # whatever a tracker raises: it is not ours, and no reason to end a fit
            refused.append(f"{type(logger).__name__} ({type(error).__name__}: {error})")
    if refused:
        warn(f"hyperparameters could not be logged with {', '.join(refused)}; the privacy report has them")
