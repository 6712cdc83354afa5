"""The audits pass the real thing and catch five planted faults, each in one run or a few short ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from benchmarks.faults import FAULTS
from lightning_lap2.audit import Training, audit
from tests.audit.nets import Net, pair, training

# One step in which every record takes part, and the l1 mechanism: one coordinate is then the worst case of all, and
# the claim is exact. A factor of two in noise or multiplicity doubles the true epsilon.
EXACT: dict[str, Any] = {"mechanism": "laplace_l1", "noise_multiplier": 1.0}
LAP2: dict[str, Any] = {"mechanism": "laplace", "noise_multiplier": 2.0}
SETTINGS = {
    "half_noise": EXACT,
    "drawn_twice": EXACT,
    "small_rate": EXACT,
    "bare_layer": LAP2,
    "clipped_mean": LAP2,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_run_catches_the_fault_and_passes_without_it(fault: str) -> None:
    honest = audit(training(**SETTINGS[fault]), seed=1)
    assert not honest.violated
    assert 0.05 < honest.epsilon < honest.claimed_epsilon
    with FAULTS[fault]():
        faulty = audit(training(**SETTINGS[fault]), seed=1)
    assert faulty.violated
    assert "VIOLATED" in str(faulty)
    assert faulty.claimed_epsilon == honest.claimed_epsilon or fault == "small_rate"


@pytest.mark.parametrize(
    "settings",
    [
        {"mechanism": "gaussian", "noise_multiplier": 1.0},
        {"mechanism": "laplace", "noise_multiplier": 1.0, "batch": 250, "steps": 4},
        {"mechanism": "laplace", "noise_multiplier": 1.0, "batch": 250, "steps": 4, "sampling": "none"},
        {"mechanism": "laplace", "noise_multiplier": 1.0, "batch": 125, "steps": 3, "engine": "loop"},
    ],
    ids=["gaussian", "poisson", "unsampled", "loop"],
)
def test_one_run_passes_the_real_thing(settings: dict[str, Any]) -> None:
    if settings.get("engine") == "loop":
        settings = {**settings, "records": 60, "batch": 15}
    result = audit(training(**settings), seed=2)
    assert not result.violated
    assert result.epsilon < result.claimed_epsilon
    in_, out = result.scores[result.included], result.scores[~result.included]
    assert in_.mean() > out.mean()


def test_many_runs_catch_a_bare_layer_and_pass_without_it() -> None:
    settings = {"noise_multiplier": 2.0}
    honest = audit(pair(**settings), method="many_runs", runs=60, seed=3)
    assert not honest.violated
    with FAULTS["bare_layer"]():
        faulty = audit(pair(**settings), method="many_runs", runs=60, seed=3)
    assert faulty.violated
    assert faulty.bound.canary == 0, "the canary that lies in the bare layer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("", {"mechanism": "gaussian", "noise_multiplier": 0.7}),
        ("half_noise", {"mechanism": "gaussian", "noise_multiplier": 0.7}),
        ("clipped_mean", {"noise_multiplier": 1.0, "records": 16, "batch": 16, "delta": 0.05}),
    ],
    ids=["honest", "half_noise", "clipped_mean"],
)
def test_many_runs_with_error_rates(fault: str, settings: dict[str, Any]) -> None:
    one: dict[str, Any] = {"canary": "one_coordinate", "canaries": 1} if fault == "clipped_mean" else {}
    with FAULTS[fault]() if fault else nullcontext():
        result = audit(pair(**settings), method="many_runs", runs=250, seed=7, confidence=0.99, **one)
    assert result.violated == bool(fault)


def test_several_runs_of_one_run_share_their_coins_and_everything_follows_from_the_seed() -> None:
    told: dict[str, Any] = {"runs": 3, "canaries": 20, "seed": 5}
    first, second = (audit(training(records=40, batch=20, **LAP2), **told) for _ in range(2))
    np.testing.assert_array_equal(first.scores, second.scores)
    assert (first.bound.canaries, first.scores.shape) == (60, (3, 20))
    assert len({tuple(row) for row in first.included.tolist()}) == 3
    other = audit(training(records=40, batch=20, **LAP2), **{**told, "seed": 6})
    assert (other.scores != first.scores).all()


def test_a_calibrated_training_is_claimed_at_its_budget_and_at_another_delta() -> None:
    result = audit(training(records=60, batch=20, steps=6, eps=2.0, delta=1e-3), runs=2, canaries=30, seed=7)
    assert 1.99 < result.claimed_epsilon <= 2.0
    assert result.delta == 1e-3
    other = audit(training(records=60, batch=20, steps=6, eps=2.0, delta=1e-3), canaries=30, seed=7, delta=1e-7)
    assert (other.delta, other.claim.delta) == (1e-7, 1e-3)
    assert other.claimed_epsilon > 2.5


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_mislabelled_records_are_found_by_their_loss_where_there_is_no_privacy_to_speak_of(engine: str) -> None:
    weak = training(records=120, batch=60, steps=120, noise_multiplier=0.01, max_grad_norm=10.0, engine=engine)
    result = audit(weak, canary="mislabelled", canaries=60, seed=8)
    assert result.scores.shape == (1, 60)
    assert np.median(result.scores[result.included]) > np.median(result.scores[~result.included])
    assert not result.violated


def test_results_are_plain_values_and_a_statement() -> None:
    result = audit(training(records=40, batch=20, engine="auto", **LAP2), seed=9)
    assert result.claim.engine == "vmap", "auto might have chosen ghost, which has no place for a gradient canary"
    told = result.to_dict()
    assert told["claimed_epsilon"] == result.claimed_epsilon
    assert told["evidence"]["canaries"] == 40
    assert told["training"]["steps"] == 1
    assert "It could not have been" in str(result)
    assert f"at delta = {result.delta:g}" in str(result)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"method": "three_runs"}, "method must be one of"),
        ({"canary": "bird"}, "canary must be one of"),
        ({"confidence": 1.0}, "confidence must lie strictly between"),
        ({"holdout": 0.0}, "holdout must lie strictly between"),
        ({"delta": 0.0}, "delta must lie strictly between"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"runs": 3, "method": "many_runs"}, "runs must be at least 4"),
        ({"guesses": 4, "method": "many_runs"}, "guesses=4 belongs to method='one_run'"),
        ({"canaries": 41}, "the train data has 40"),
        ({"canaries": 601}, "the model has 600"),
    ],
)
def test_refused_arguments(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(training(records=40, batch=20, **LAP2), **told)


def test_refused_trainings() -> None:
    with pytest.raises(ValueError, match="audit with engine='vmap'"):
        audit(training(engine="ghost", **LAP2))
    with pytest.raises(ValueError, match="clipping='automatic': audit with clipping='flat'"):
        audit(training(clipping="automatic", **LAP2))
    with pytest.raises(ValueError, match="there is nothing to audit"):
        audit(training(records=40, batch=20, noise_multiplier=0.0))
    with pytest.raises(ValueError, match="noise_seed=3 would give all runs one noise"):
        training(noise_seed=3)
    with pytest.raises(ValueError, match="sets the Trainer's callbacks, logger itself"):
        training(trainer={"logger": True, "callbacks": []})


def test_runs_that_differ_have_no_common_claim() -> None:
    told = training(records=40, batch=20, steps=2, **LAP2)
    made: list[Any] = []

    class Narrowing(Net):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            if len(made) > 1:
                self.net[0].weight.requires_grad_(False)

    with pytest.raises((RuntimeError, ValueError), match=r"differs from the first run's|trainable scalars in the fit"):
        audit(
            Training(model=Narrowing, loader=told.loader, privacy=told.privacy, trainer=told.trainer),
            canary="mislabelled",
            canaries=10,
            runs=2,
        )
