"""Several processes, started by Lightning's own launcher: equal weights, noise once, one ledger, one stop, no hang."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from benchmarks.floating_point import OURS, certain
from lightning_lap2.callback.ledger.journal import PATTERN
from lightning_lap2.noise.grid import spacing
from tests.ddp import job as jobs
from tests.ddp.harness import Job, start
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = [pytest.mark.ddp, pytest.mark.slow, *LIGHTNING_WARNINGS]
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2

TWO = [
    "same_as_one_process",
    "several_views_of_each_example",
    "laplace_noise_once",
    "exact_releases",
    "adaptive_threshold",
    "budget_beats_minimums",
    "budget_beats_minimums_accumulating",
    "empty_draw_on_one_rank_only",
    "strategies_and_engines",
    "all_gather_in_training_step",
    "training_step_returns_none",
    "seeded_runs_match",
    "loggers_and_reports",
    "distributed_sampler_without_sampling",
    "iterable_without_sampling",
    "shards_of_their_own",
    "users",
    "resume_what_one_process_left",
    "resume_what_a_killed_run_owes",
]
THREE = [
    "same_as_one_process",
    "same_as_one_process_in_buckets",
    "same_as_one_process_accumulating",
    "laplace_noise_once",
    "exact_releases",
    "empty_draw_on_one_rank_only",
]


class _Interrupt(Exception):
    """Ends a run as a kill would: nothing is closed in order."""


def _interrupting(after: int) -> Any:
    class Interrupting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == after:
                raise _Interrupt

    return Interrupting()


def _leave_checkpoints(output: Path) -> None:
    """What the two resuming scenarios find: a finished run of one process, and one that was killed."""
    trainer = quiet_trainer(pl, Lap2Privacy(**jobs.RESUMABLE), max_epochs=1)
    trainer.fit(classifier(pl), loader(24, 2))
    trainer.save_checkpoint(output / "one.ckpt")
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=output / "killed", save_last=True, every_n_train_steps=5, save_top_k=0
    )
    trainer = quiet_trainer(pl, Lap2Privacy(**jobs.RESUMABLE), checkpoint, _interrupting(8), max_epochs=3)
    with pytest.raises(_Interrupt):
        trainer.fit(classifier(pl), loader(24, 2))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    """Both jobs, finished: every scenario that ends well, on 2 and on 3 ranks."""
    output = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (2, 3)}
    three = start("tests.ddp.job", THREE, output[3], ranks=3)
    _leave_checkpoints(output[2])
    two = start("tests.ddp.job", TWO, output[2], ranks=2)
    for job in (three, two):
        job.wait()
    return {2: two, 3: three}


@pytest.fixture
def two(several: dict[int, Job]) -> Job:
    return several[2]


def _all_equal(results: list[dict[str, Any]], *names: str) -> None:
    first, *others = results
    for other in others:
        for name in names:
            same = torch.equal if isinstance(first[name], Tensor) else lambda a, b: a == b
            assert same(first[name], other[name]), f"the ranks disagree on {name}"


# -- no noise: as many ranks as one likes are one process -------------------------------------------------------------


def _one_process(accumulate: int) -> dict[str, Any]:
    return jobs.same_as_one_process(jobs.Ranks(Path(), 1), accumulate=accumulate)


@pytest.mark.parametrize(
    ("scenario", "ranks", "accumulate"),
    [
        ("same_as_one_process", 2, 1),
        ("same_as_one_process", 3, 1),
        ("same_as_one_process_in_buckets", 3, 1),
        ("same_as_one_process_accumulating", 3, 2),
    ],
)
def test_without_noise_ranks_end_with_the_weights_of_one_process(
    several: dict[int, Job], scenario: str, ranks: int, accumulate: int
) -> None:
    results = several[ranks].results(scenario, ranks)
    alone = _one_process(accumulate)
    _all_equal(results, "weights", "steps", "q")
    assert results[0]["q"] == alone["q"] == 1
    assert results[0]["steps"] == alone["steps"] == 6
    assert not torch.equal(alone["weights"], jobs.weights(classifier(pl)))
    torch.testing.assert_close(results[0]["weights"], alone["weights"], rtol=0, atol=1e-6)


def test_all_views_of_an_example_are_on_one_rank(two: Job) -> None:
    results = two.results("several_views_of_each_example", 2)
    alone = jobs.several_views_of_each_example(jobs.Ranks(Path(), 1))
    _all_equal(results, "weights", "steps", "q")
    assert sum(result["rows"] for result in results) == alone["rows"] == 6 * 12 * 3
    torch.testing.assert_close(results[0]["weights"], alone["weights"], rtol=0, atol=1e-6)


# -- noise, once for the whole job ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scenario_8_noise_of_the_global_sum_has_scale_b_once(several: dict[int, Job], ranks: int) -> None:
    if ranks == 1:
        results = [jobs.laplace_noise_once(jobs.Ranks(Path(), 1))]
    else:
        results = several[ranks].results("laplace_noise_once", ranks)
    noise, scale = results[0]["noise"].double(), results[0]["scale"]
    assert scale == 1.5
    assert noise.shape == (6, 100_003)
    for rank in range(ranks):  # the slice that each rank noised
        part = noise[:, 100_003 * rank // ranks : 100_003 * (rank + 1) // ranks]
        assert part.abs().mean() == pytest.approx(scale, rel=0.02)
        assert part.square().mean().sqrt() == pytest.approx(math.sqrt(2) * scale, rel=0.02)
    assert noise.abs().mean() == pytest.approx(scale, rel=0.01)
    # Laplace, not a sum of Laplace draws: 100,000 values tell the two apart with certainty.
    assert stats.kstest(noise[0].numpy(), "laplace", args=(0, scale)).pvalue > 1e-4
    correlations = torch.corrcoef(noise) - torch.eye(6)
    assert correlations.abs().max() < 6 / math.sqrt(100_003)
    for rank in range(1, ranks):
        assert torch.equal(results[rank]["noise"].double(), noise[:, :1000])
    _all_equal(results, "weights", "ledger")


@pytest.mark.parametrize("ranks", [2, 3])
def test_exact_releases_of_several_ranks_give_nothing_away(several: dict[int, Job], ranks: int) -> None:
    """Summed first, then noised and rounded: grid points on every rank, none of which is impossible without an example.
    Noised slices that are added up in float32 are off the grid, by what the records are."""
    results = several[ranks].results("exact_releases", ranks)
    _all_equal(results, "released")
    released, values = results[0]["released"], results[0]["sum"].numpy()
    steps = released.double() / spacing(1.0)
    assert torch.equal(steps, steps.round())
    assert certain(OURS[0], values, 1 / 161, released.numpy()) == (0.0, 0.0)
    assert stats.kstest((released.numpy() - values).astype(float), "laplace").pvalue > 1e-4
    before = results[0]["noised before the sum"].double() / spacing(1.0)
    assert (before != before.round()).double().mean() > 0.5


def test_the_count_of_adaptive_clipping_is_noised_once(two: Job) -> None:
    results = two.results("adaptive_threshold", 2)
    _all_equal(results, "released", "threshold", "threshold_without_noise", "weights", "ledger")
    alone = jobs.adaptive_threshold(jobs.Ranks(Path(), 1))
    assert results[0]["threshold_without_noise"] == pytest.approx(alone["threshold_without_noise"], rel=1e-6)
    own = sum(result["own_counts"] for result in results)
    assert torch.equal(own, (2 * own).round() / 2), "halves"
    assert not torch.equal(results[0]["own_counts"], results[1]["own_counts"])
    noise, scale = results[0]["released"] - own, jobs.COUNTED["count_noise_scale"]
    # 300 draws: the mean absolute value is within 6 % of b for one draw a release, and 1.5 b for one on each rank
    assert noise.abs().mean() == pytest.approx(scale, rel=0.2)
    assert stats.kstest(noise.numpy(), "laplace", args=(0, scale)).pvalue > 1e-3
    assert '"extra_blocks": [[1, 6]]' in results[0]["ledger"]


def test_scenario_8_seeds(two: Job) -> None:
    results = two.results("seeded_runs_match", 2)
    _all_equal(results, "weights")
    seeded, again, entropy, other = results[0]["weights"]
    assert torch.equal(seeded, again)
    assert not torch.equal(entropy, other)
    assert not torch.equal(entropy, seeded)


# -- one stop, no hang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["budget_beats_minimums", "budget_beats_minimums_accumulating"])
def test_scenario_1_budget_beats_minimums_on_two_ranks(two: Job, scenario: str) -> None:
    results = two.results(scenario, 2)
    _all_equal(results, "steps", "global_step", "weights", "ledger", "resumed_steps", "resumed_global_step")
    result = results[0]
    assert result["steps"] == result["global_step"] == 7
    assert result["distinct_weights"] == 7
    assert 0 < result["epsilon"] <= result["eps"]
    assert "FINISHED" in result["status"]
    assert result["resumed_steps"] == result["resumed_global_step"] == 7
    assert result["warned"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_scenario_3_empty_draw_on_one_rank_only(several: dict[int, Job], ranks: int) -> None:
    results = several[ranks].results("empty_draw_on_one_rank_only", ranks)
    _all_equal(results, "steps", "weights", "ledger", "logged")
    assert results[0]["steps"] == 100
    assert results[0]["expected"] == ranks
    assert all(math.isfinite(value) for value in results[0]["logged"])
    assert 0 <= results[0]["logged"][1] <= 1
    counts = torch.tensor([result["counts"] for result in results])
    assert counts.shape == (ranks, 100)
    empty = (counts == 0).sum(0)
    assert ((empty > 0) & (empty < ranks)).sum() > 10, "no step was empty on one rank only"
    # 100 steps of Binomial(12, ranks / 12) in all: five standard deviations
    assert abs(counts.sum().item() - 100 * ranks) < 5 * math.sqrt(100 * ranks)


def test_scenario_12_training_step_returns_none_on_some_ranks(two: Job) -> None:
    results = two.results("training_step_returns_none", 2)
    _all_equal(results, "steps", "gradients", "weights", "ledger")
    assert results[0]["steps"] == 18
    # 0 is a point of the grid, met once in a hundred coordinates
    nothing = (results[0]["gradients"] == 0).sum(dim=1)
    assert nothing.max() <= 2, "a skipped batch was released without noise"


def test_engines_and_options_of_the_strategy_change_nothing(two: Job) -> None:
    results = two.results("strategies_and_engines", 2)
    assert len(results[0]) == 9
    _all_equal(results, *results[0])
    alone = _one_process(1)["weights"]
    for value in results[0].values():
        torch.testing.assert_close(value, alone, rtol=0, atol=1e-6)


def test_all_gather_in_training_step_is_refused_on_every_rank(two: Job) -> None:
    for result in two.results("all_gather_in_training_step", 2):
        assert len(result["messages"]) == 3
        assert all("self.all_gather" in message for message in result["messages"])


def test_loggers_and_report_on_two_ranks(two: Job) -> None:
    results = two.results("loggers_and_reports", 2)
    _all_equal(results, "directory", "world_size", "epsilon", "best")
    directory = Path(results[0]["directory"])
    assert results[0]["world_size"] == 2
    assert (directory / "privacy_report.json").is_file()
    assert (directory / "privacy_report.md").is_file()
    assert sum(_notes(path) for path in directory.glob(PATTERN)) >= 12
    assert Path(results[0]["best"]).is_file()


# -- sampling "none" --------------------------------------------------------------------------------------------------


def test_scenario_19_padding_distributed_sampler_is_refused(two: Job) -> None:
    results = two.results("distributed_sampler_without_sampling", 2)
    for result in results:
        assert len(result["messages"]) == 1
        assert "pads by repetition: 13 examples on 2 ranks" in result["messages"][0]
        assert "drop_last=True" in result["messages"][0]
        assert result["q"] == 1
        assert (result["steps"], result["charges"]) == (6, 2), "12 examples on 2 ranks: one charge per pass"
        assert (result["own_steps"], result["own_charges"]) == (6, 2)


def test_scenario_13_iterable_data_set_on_two_ranks_is_refused(two: Job) -> None:
    for result in two.results("iterable_without_sampling", 2):
        assert "IterableDataset on 2 ranks" in result["message"]


def test_shards_of_their_own_are_refused_on_every_rank(two: Job) -> None:
    for result in two.results("shards_of_their_own", 2):
        shard, split, same = result["messages"]
        assert "the ranks train on different data" in shard
        assert "the ranks train on different data" in split
        assert same == ""


def test_users_are_shared_out_and_ranks_agree_on_their_ids(two: Job) -> None:
    results, alone = two.results("users", 2), jobs.users(jobs.Ranks(Path(), 1))
    _all_equal(results, "weights", "steps", "q")
    assert (results[0]["steps"], results[0]["q"]) == (alone["steps"], alone["q"]) == (3, 1.0)
    assert sorted(results[0]["drawn"] + results[1]["drawn"]) == sorted(alone["drawn"]) == sorted([*range(12)] * 3)
    torch.testing.assert_close(results[0]["weights"], alone["weights"], rtol=0, atol=1e-6)
    for result in results:
        for message in result["messages"]:
            assert "the ranks train on different data" in message
            assert "with the same unit ids in the same order" in message
            assert "zaphod" not in message


# -- resume across numbers of ranks -----------------------------------------------------------------------------------


def test_scenario_5_resume_one_process_on_two_ranks_and_back(two: Job) -> None:
    results = two.results("resume_what_one_process_left", 2)
    _all_equal(results, "at_start", "steps", "q", "ledger")
    # 12 steps at q = 1/12 in one process, then epochs 2 to 4 of 6 steps each at q = 1/6
    assert results[0]["at_start"] == 12
    assert results[0]["steps"] == 12 + 3 * 6
    assert results[0]["q"] == pytest.approx(1 / 6)

    callback = Lap2Privacy(**jobs.RESUMABLE)
    trainer = quiet_trainer(pl, callback, max_epochs=5)
    trainer.fit(classifier(pl), loader(24, 2), ckpt_path=two.output / "several.ckpt")
    assert callback.steps == 12 + 3 * 6 + 12
    assert results[0]["epsilon"] < callback.accountant.epsilon(delta=callback.delta) <= callback.eps


def test_scenario_5_releases_of_a_killed_run_are_charged_on_every_rank_and_noted_once(two: Job) -> None:
    results = two.results("resume_what_a_killed_run_owes", 2)
    _all_equal(results, "at_start", "steps", "ledger")
    assert results[0]["at_start"] == 8, "the checkpoint holds 5 releases, the journal 3 more"
    # The Trainer stands at step 5 of epoch 0: 5 of 12 batches done, hence 1 of 6 on two ranks is left, and 2 epochs.
    remaining = results[0]["steps"] - 8
    notes = sum(_notes(path) for path in (two.output / "killed").glob(PATTERN))
    assert notes == 8 + remaining, "each release is noted by rank 0 alone"


def _notes(journal: Path) -> int:
    return sum(len(line) for line in journal.read_text().splitlines() if set(line) == {"."})


# -- a rank that fails ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Three jobs in which one rank raises or is killed; all processes of each have ended."""
    found = {
        scenario: start("tests.ddp.job", [scenario], tmp_path_factory.mktemp(scenario), ranks=2)
        for scenario in jobs.FATAL
    }
    _kill_rank_1(found["killed_from_outside"])
    for job in found.values():
        assert job.wait(ranks=2) != 0
    return found


def _kill_rank_1(job: Job) -> None:
    released = job.output / "released.1"
    while not released.exists() or released.stat().st_size < 23:
        assert job.process.poll() is None, job.printed()
        assert time.monotonic() < job.started + 100, job.printed()
        time.sleep(0.02)
    os.kill(int((job.output / "pid.1").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_on_one_rank_ends_the_other(failed: dict[str, Job], rank: int) -> None:
    job = failed[f"exception_on_rank_{rank}"]
    assert "one rank fails" in job.printed()
    result = job.result("failed", rank)
    assert result["patched"] == []
    released = (job.output / f"released.{rank}").stat().st_size
    assert result["steps"] == released == 6 + 4
    report = job.output / "checkpoints" / "privacy_report.json"
    if rank == 0:
        assert json.loads(report.read_text())["steps"] == released


# resumed on one rank, so the noise is calibrated anew for the little that is left
@pytest.mark.filterwarnings("ignore:Lap2Privacy. what is left of eps:UserWarning")
@pytest.mark.parametrize("scenario", jobs.FATAL)
def test_ledger_after_a_rank_failed_counts_every_release(failed: dict[str, Job], scenario: str) -> None:
    job = failed[scenario]
    # A release is one only where all ranks came to it; the failing rank may have left the other alone in the last.
    released = min((job.output / f"released.{rank}").stat().st_size for rank in (0, 1))
    last = max((job.output / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    callback = Lap2Privacy(eps=5.0)
    seen: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            seen.append(callback.steps)
            trainer.should_stop = True

    trainer = quiet_trainer(pl, callback, First(), max_epochs=100_000)
    trainer.fit(classifier(pl), loader(24, 2), ckpt_path=last)
    assert released <= seen[0] <= released + 2
