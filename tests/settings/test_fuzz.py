"""Random combinations of arguments, flags, modules and data; ``python -m tests.settings.fuzz`` is the long form."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from tests.settings.fuzz import construct, run
from tests.settings.fuzz_cases import Case, cases, constructors

# The same examples at every run of the suite; the long form draws new ones.
# Shrinking would take minutes of fits; a case is small as it is.
STEADY: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "phases": [Phase.explicit, Phase.generate],
}


@settings(max_examples=400, **STEADY)
@given(constructors)
def test_constructor_arguments_are_taken_or_refused_by_name(arguments: dict[str, Any]) -> None:
    construct(arguments)


@settings(max_examples=40, **STEADY)
@given(cases())
def test_fits_train_soundly_or_are_refused_by_name(case: Case) -> None:
    run(case)
