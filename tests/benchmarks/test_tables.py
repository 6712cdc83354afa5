"""The tables that go into the documentation, from figures that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import memory_table, target_table
from benchmarks.document import replace_block
from benchmarks.measure import Timing
from benchmarks.methods import METHODS, available
from benchmarks.sharded import table


def timing(**seconds: float) -> Timing:
    return Timing({method.replace("_", "-"): [value] * 3 for method, value in seconds.items()})


def test_targets_met_and_missed() -> None:
    timings = {
        "cnn": timing(plain=1.0, ghost=1.4, vmap=1.9, opacus_ew=2.0),
        "vit": timing(plain=2.0, ghost=2.6, vmap=2.5, opacus_ew=2.4),
        "mlp": timing(plain=1.0, ghost=2.0),
    }
    peaks: dict[str, dict[str, float | None]] = {
        "cnn": {"plain": 10.0, "ghost": 12.0, "vmap": 30.0, "opacus-ew": 11.0},
        "vit": {"plain": 10.0, "ghost": 12.0, "vmap": 30.0, "opacus-ew": None},
    }
    lines = target_table(timings, peaks).splitlines()
    assert lines[0] == "| | cnn | vit | mlp |"
    assert lines[3] == "| reached, better engine | 1.40 (ghost) | **1.25 (vmap)** | **2.00 (ghost)** |"
    assert lines[4] == "| lowest peer, same run | 2.00 (opacus-ew) | 1.20 (opacus-ew) | – |"
    assert lines[5] == "| peak MiB, that engine | **12** | 30 | – |"
    assert lines[6] == "| leanest peer | 11 (opacus-ew) | – | – |"
    assert lines[7] == "| that engine's peak over plain's | 1.20 | 3.00 | – |"
    assert memory_table(peaks).splitlines()[-1] == "| opacus-ew | 11 | fails |"


def test_memory_and_time_of_ranks() -> None:
    memory = {"plain, DDP": {"resting": 164.4, "peak": 600.0}, "ghost, FSDP2": {"resting": 82.0, "peak": 250.0}}
    times = {"plain, DDP": [[1.0, 0.5], [3.0, 0.7], [2.0, 0.6]], "ghost, FSDP2": [[2.5, 1.25]]}
    lines = table(memory, times).splitlines()
    assert lines[0] == "| | MiB between steps | MiB at most | CPU s per step | s per step |"
    assert lines[2:] == ["| plain, DDP | 164 | 600 | 0.60 | 2.00 |", "| ghost, FSDP2 | 82 | 250 | 1.25 | 2.50 |"]


def test_a_block_is_replaced_in_place_and_only_there(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("above\n<!-- it: begin -->\nold\n<!-- it: end -->\nbelow\n")
    for text in ("new", "newer\n"):
        replace_block(path, "it", text)
        assert path.read_text() == f"above\n<!-- it: begin -->\n\n{text.strip()}\n\n<!-- it: end -->\nbelow\n"
    for content in ("", "<!-- it: end --><!-- it: begin -->", "<!-- it: begin -->" * 2 + "<!-- it: end -->"):
        path.write_text(content)
        with pytest.raises(ValueError, match="once each"):
            replace_block(path, "it", "x")
        assert path.read_text() == content


def test_the_documentation_holds_the_blocks_that_the_commands_write() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    for name in ("python -m benchmarks", "python -m benchmarks.overhead", "python -m benchmarks.sharded"):
        assert page.read_text().count(f"<!-- {name}: begin -->") == 1
        assert page.read_text().count(f"<!-- {name}: end -->") == 1


def test_a_method_is_offered_where_its_package_is() -> None:
    assert all(available(method) for method in ("plain", "ghost", "vmap", "loop"))
    assert {method.partition("-")[0] for method in METHODS if "-" in method} == {"opacus", "fastdp"}
