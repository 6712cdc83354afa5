"""Every pair of values of the Trainer's flags, in few fits; ``python -m tests.settings.pairwise --full`` for all."""

from __future__ import annotations

import json

import pytest

from tests.ddp.harness import Job, start
from tests.helpers import LIGHTNING_WARNINGS
from tests.settings import pairwise

pytestmark = [
    *LIGHTNING_WARNINGS,
    # Lightning: min_epochs or min_steps beside max_steps
    pytest.mark.filterwarnings("ignore:.*max_epochs.*was not set.*"),
]

CASES = {pairwise.name_of(case): case for case in pairwise.covering()}
ALONE = [name for name, case in CASES.items() if case["devices"] == 1]
ON_TWO = [name for name, case in CASES.items() if case["devices"] == 2]


def test_cover_is_small_and_complete() -> None:
    assert 12 <= len(CASES) <= 20
    assert len(ON_TWO) <= 6
    pairs = set().union(*(pairwise._pairs(case) for case in CASES.values()))
    assert pairs == set().union(*(pairwise._pairs(case) for case in pairwise._product()))


@pytest.mark.parametrize("name", ALONE)
def test_flags_on_one_process(name: str) -> None:
    pairwise.check(CASES[name], [pairwise.run(CASES[name])])


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Job:
    output = tmp_path_factory.mktemp("pairwise")
    numbered = {str(number): CASES[name] for number, name in enumerate(ON_TWO)}
    (output / "cases.json").write_text(json.dumps(numbered))
    job = start("tests.settings.pairwise_job", list(numbered), output, ranks=2)
    job.wait()
    return job


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO)
def test_flags_on_two_processes(on_two: Job, name: str) -> None:
    pairwise.check(CASES[name], on_two.results(str(ON_TWO.index(name)), 2))
