"""A short run of :mod:`tests.gradients.ghost.fuzz`."""

from __future__ import annotations

import pytest

from lightning_lap2.gradients import ParameterLayout
from tests.gradients.ghost.fuzz import error_of, programs


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_programs_in_which_every_size_is_that_of_the_batch(first: int) -> None:
    """Right within 1e-5, or refused; here none is refused."""
    for seed, program in programs(8, first):
        found = error_of(program, chunk=None if seed % 3 else 3)
        assert not isinstance(found, str), (seed, program.names, found)
        assert found < 1e-5, (seed, program.names)


@pytest.mark.parametrize("first", range(2000, 2300, 100))
def test_examples_by_themselves_as_where_parameters_are_in_shards(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a whole gradient has no room, so a batch of one goes by the rules too."""
    monkeypatch.setattr(ParameterLayout, "scattered", True)
    for seed, program in programs(8, first):
        found = error_of(program, chunk=1)
        assert not isinstance(found, str), (seed, program.names, found)
        assert found < 1e-5, (seed, program.names)
