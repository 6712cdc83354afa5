"""``docs/packages.md`` is what ``make field`` found, and all of it."""

from __future__ import annotations

import pytest

from benchmarks.field.cases import packages
from benchmarks.field.page import PAGE, page, results

RESULTS = results()


def test_page_is_made_from_the_results() -> None:
    assert PAGE.read_text() == page(), "run: python -m benchmarks.field --render"


def test_every_case_has_run() -> None:
    assert set(RESULTS) == {(package.name, case.model) for package in packages().values() for case in package.cases}


@pytest.mark.parametrize("result", RESULTS.values(), ids=["/".join(key) for key in RESULTS])
def test_outcomes_are_those_that_the_cases_say(result: dict[str, object]) -> None:
    case = packages()[str(result["package"])].case(str(result["model"]))
    assert result["expected"]
    assert result["outcome"] == ("trained" if case.refused is None else "refused")
    assert bool(result["message"]) == (case.refused is not None)
    if case.refused is None:
        assert result["releases"]
        assert (result["error"] is not None) == case.compared
