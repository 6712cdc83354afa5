"""Modules sharded by ``fully_shard`` (FSDP2) on 2 and 4 processes: as one process; noise once; nothing hangs."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from scipy import stats

from tests.ddp.harness import Job, start
from tests.helpers import LIGHTNING_WARNINGS
from tests.sharded import job as jobs
from tests.sharded.models import Sharded

PATIENCE = 1200.0  # seconds, on a machine that does much else; about a minute on two idle cores
pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE), *LIGHTNING_WARNINGS]

SAME = ["frozen_base", "trained_shards", "different_lengths", "pretrained_decoders"]
ALONE = [*SAME, "replicas_of_shards", "low_precision"]
TWO = [
    *SAME,
    "low_precision",
    "noise_once",
    "empty_draws",
    "one_rank_fails",
    "steps_refused",
    "settings_refused",
    "checkpoints",
    "budget",
    "largest_sum",
]
FOUR = ["replicas_of_shards", "noise_once", "empty_draws", "resumed_on_more"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    """Every scenario on 1, 2 and 4 ranks, finished; four ranks resume what two have left."""
    output = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2, 4)}
    jobs_of = {
        ranks: start("tests.sharded.job", names, output[ranks], ranks=ranks) for ranks, names in ((2, TWO), (1, ALONE))
    }
    for started in jobs_of.values():
        started.wait(PATIENCE)
    for checkpoint in output[2].glob("*-False.ckpt"):
        shutil.copytree(checkpoint, output[4] / checkpoint.name)
    jobs_of[4] = start("tests.sharded.job", FOUR, output[4], ranks=4)
    jobs_of[4].wait(PATIENCE)
    return jobs_of


def _equal(results: list[dict[str, Any]], name: str, *entries: str) -> dict[str, Any]:
    """The entry of all ranks, which must agree."""
    first = results[0][name]
    for other in results[1:]:
        for entry in entries:
            assert torch.equal(torch.as_tensor(first[entry]), torch.as_tensor(other[name][entry])), (name, entry)
    return first


# -- no noise: as many ranks as one likes are one process -------------------------------------------------------------


@pytest.mark.parametrize(("scenario", "ranks"), [*((name, 2) for name in SAME), ("replicas_of_shards", 4)])
def test_without_noise_ranks_end_with_the_weights_of_one_process(
    several: dict[int, Job], scenario: str, ranks: int
) -> None:
    alone, results = several[1].results(scenario, 1)[0], several[ranks].results(scenario, ranks)
    assert len(alone) > 1
    for name, expected in alone.items():
        found = _equal(results, name, "weights", "dimension", "threshold")
        assert {found[k] == expected[k] for k in ("engine", "dimension")} == {True}, name
        tolerance = 1e-6 if "fp32" in name else 1e-10
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=tolerance, msg=name)
        assert found["threshold"] == pytest.approx(expected["threshold"], rel=1e-12)
    assert len({tuple(found["weights"].tolist()) for found in alone.values()}) > 1


def test_engines_and_ways_of_sharding_agree(several: dict[int, Job]) -> None:
    """So the one process is no oracle of its own: three engines, and shardings that compute the same."""
    found = several[2].results("trained_shards", 2)[0]
    for name in ("vmap", "loop", "validated", "chunks", "kept after forward", "one group"):
        torch.testing.assert_close(found[name]["weights"], found["ghost"]["weights"], rtol=0, atol=1e-10)
    moved = found["ghost"]["weights"] - jobs.whole_weights(Sharded("all", double=True))
    assert float(moved.abs().max()) > 1e-3


def test_bf16(several: dict[int, Job]) -> None:
    """Bound by the rounding of weights and activations, which ranks do on other numbers than one process."""
    alone, results = several[1].results("low_precision", 1)[0], several[2].results("low_precision", 2)
    for name, expected in alone.items():
        torch.testing.assert_close(results[0][name], expected, rtol=0, atol=2e-3)
        assert torch.equal(results[0][name], results[1][name])


# -- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("trained", ["all", "lora, norms sharded"])
def test_every_coordinate_is_noised_once(several: dict[int, Job], ranks: int, trained: str) -> None:
    """Two noises would double the variance, none leave points of the grid around 0, a sum of several be no Laplace."""
    results = several[ranks].results("noise_once", ranks)
    noise, scale = results[0][trained], results[0][f"{trained} scale"]
    for other in results[1:]:
        assert torch.equal(noise, other[trained]), "ranks that hold the same, or that gather it, see one noise"
    # 60 releases of each coordinate: mean absolute value b, relative error of one coordinate 1/sqrt(60)
    each = noise.abs().mean(dim=0) / scale
    assert float(each.min()) > 0.4 and float(each.max()) < 2.0
    draws = (noise / scale).reshape(-1)
    assert stats.kstest(draws.numpy(), "laplace").pvalue > 1e-3
    # coordinates are independent, those at one place of different ranks' shards too
    for shift in range(1, noise.shape[1]):
        product = float((draws.reshape(noise.shape) * (draws.reshape(noise.shape)).roll(shift, 1)).mean())
        assert abs(product) < 6 * 2 / noise.numel() ** 0.5, shift
    # on the grid: sums are rounded once, after they are complete
    steps = noise / results[0][f"{trained} grid"]
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_waits_where_some_ranks_drew_nothing(several: dict[int, Job], ranks: int) -> None:
    results = several[ranks].results("empty_draws", ranks)
    for name in results[0]:
        counts = torch.tensor([found[name]["counts"] for found in results])
        assert bool(((counts == 0).any(dim=0) & (counts > 0).any(dim=0)).any()), "some step was empty on some ranks"
        first = _equal(results, name, "weights")
        assert bool(torch.isfinite(first["weights"]).all())
        assert {found[name]["ledger"] for found in results} == {first["ledger"]}
        assert {found[name]["logged"] for found in results} == {first["logged"]}


# -- what is refused, and how a rank that fails ends ------------------------------------------------------------------


def test_a_rank_that_fails_ends_the_step_on_all(several: dict[int, Job]) -> None:
    results = several[2].results("one_rank_fails", 2)
    for trained in ("lora", "all"):
        assert results[1][trained] == ["ArithmeticError: one rank fails"] * 2
        for message in results[0][trained]:
            assert message.startswith("OtherRankError: rank 1 failed in its step")
    # and the same processes can train on
    assert results[0]["after"] == results[1]["after"] == ""
    assert torch.equal(results[0]["weights"], results[1]["weights"])


def test_steps_that_use_shards_or_other_ranks_are_refused(several: dict[int, Job]) -> None:
    for result in several[2].results("steps_refused", 2):
        for name, message in result.items():
            what, engine = name.split()
            expected = {
                "full_tensor": "training_step calls full_tensor() on a parameter that fully_shard keeps in shards",
                "local": "training_step calls to_local() on a parameter that fully_shard keeps in shards",
                "block_penalty": ""
                if engine == "auto"
                else "computes with a parameter that fully_shard keeps in shards",
                "gathered": "calls a collective of torch.distributed",
                "unsharded": "",
            }[what]
            assert expected in message and bool(expected) == bool(message), (name, message)
            assert "UnsupportedModelError" in message or not message, name


def test_other_ways_of_sharding_are_refused_by_name(several: dict[int, Job]) -> None:
    for result in several[2].results("settings_refused", 2):
        assert "a DTensor that fully_shard does not manage" in result["distributed"]
        assert "on 1 of 2 ranks" in result["halves"]
        assert "CPUOffloadPolicy" in result["offload"]
        assert "tensor_parallel_size=2" in result["tensor parallel"]
        assert "the parameter model.blocks.0.qkv.a is not the same on ranks 0 and 1" in result["drifting"]


# -- checkpoints, budget, memory --------------------------------------------------------------------------------------


def test_checkpoints_resume_in_shards_whole_and_under_ddp(several: dict[int, Job]) -> None:
    results = several[2].results("checkpoints", 2)
    for name, found in results[0].items():
        if "ddp" in name:
            _equal(results, name, "weights", "steps", "epsilon")
            assert found["steps"] == (8 if "into" in name else 12)
            continue
        straight, resumed = found["straight"], found["resumed"]
        assert torch.equal(straight["weights"], resumed["weights"]), name
        assert straight["steps"] == resumed["steps"] == 8
        assert straight["epsilon"] == resumed["epsilon"] == pytest.approx(found["straight"]["epsilon"])
        assert torch.equal(resumed["weights"], results[1][name]["resumed"]["weights"])


def test_more_ranks_resume_what_two_have_left(several: dict[int, Job]) -> None:
    results = several[4].results("resumed_on_more", 4)
    for trained in ("lora", "all"):
        found = _equal(results, trained, "weights", "steps", "epsilon")
        # an epoch on two ranks, 4 steps of 4 of 16 records; then one on four, 2 steps of 8
        assert found["steps"] == 4 + 2
        assert bool(torch.isfinite(found["weights"]).all())


def test_the_budget_ends_the_run_and_the_report_knows_all(several: dict[int, Job]) -> None:
    results = several[2].results("budget", 2)
    for trained in ("lora", "all"):
        found = _equal(results, trained, "weights", "steps")
        assert found["steps"] == 7 and found["world_size"] == 2
        assert found["n"][0] == found["n"][1], "n is the whole model's"
        assert found["epsilon"][0] <= found["epsilon"][1]
        assert results[1][trained]["ledger"] == found["ledger"]


def test_no_rank_holds_the_whole_sum(several: dict[int, Job]) -> None:
    for result in several[2].results("largest_sum", 2):
        shards, whole = result["shards"], result["whole"]
        assert whole["held"] == whole["n"] == shards["n"] > 50_000
        # a little more than half for rows that do not split evenly
        assert shards["held"] < shards["n"] * 0.52


@pytest.mark.xfail(strict=False, reason="met at 0.9 to 1.4 times a whole sum, from a cause that is not known: issue 17")
def test_what_lives_while_sums_are_made_is_less_than_a_whole_sum(several: dict[int, Job]) -> None:
    for result in several[2].results("largest_sum", 2):
        shards, whole = result["shards"], result["whole"]
        # activations, gathered layers, half a sum
        assert shards["most"] < 4 * shards["n"] < whole["most"]
