"""Trainer flags in combination: every pair of values in few fits, or the full product.

``python -m tests.settings.pairwise`` prints the fits that cover all pairs, ``--full`` runs the whole product (about 800
fits, half of them on two processes; some minutes).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

from tests.ddp.harness import start
from tests.helpers import LIGHTNING, classifier, loader, quiet_trainer, watched_releases, weights

pl = LIGHTNING.pl
Case = dict[str, Any]

N, BATCH = 48, 4
FLAGS: dict[str, tuple[Any, ...]] = {
    "accumulate_grad_batches": (1, 3),
    "end": ("max_epochs", "max_steps"),
    "minimum": (None, "min_epochs", "min_steps"),
    "limit_train_batches": (1.0, 0.5, 4),
    "val_check_interval": (1.0, 0.5, 2),
    "reload_dataloaders_every_n_epochs": (0, 1),
    "persistent_workers": (False, True),
    "budget": ("calibrated", "ends early"),
    "devices": (1, 2),
}
MOST_ON_TWO = 6


def covering() -> list[Case]:
    """Few cases in which every pair of values of two flags occurs, at most six of them on two processes.

    Greedy: the case with the most pairs that are still missing, the first such. Two processes until six, then one.
    """
    cases = list(_product())
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        devices = 2 if len(chosen) < MOST_ON_TWO else 1
        best = max((c for c in cases if c["devices"] == devices), key=lambda c: len(missing & _pairs(c)))
        gained = missing & _pairs(best)
        assert gained, f"pairs that need two processes are left: {missing}"
        missing -= gained
        chosen.append(best)
    return chosen


def _product() -> Iterator[Case]:
    for values in product(*FLAGS.values()):
        yield dict(zip(FLAGS, values, strict=True))


def _pairs(case: Case) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def expected_releases(case: Case) -> int:
    """From Lightning's own rules, without looking at the callback."""
    batches = N // BATCH // case["devices"]
    limit = case["limit_train_batches"]
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    per_epoch = math.ceil(batches / case["accumulate_grad_batches"])
    planned = 3 * per_epoch if case["end"] == "max_epochs" else 5
    return planned if case["budget"] == "calibrated" else 3


def run(case: Case) -> dict[str, Any]:
    """One fit; what the test compares. On two processes it runs in both."""
    options: dict[str, Any] = {
        name: case[name]
        for name in (
            "accumulate_grad_batches",
            "limit_train_batches",
            "val_check_interval",
            "reload_dataloaders_every_n_epochs",
        )
    }
    options |= {"max_epochs": 3} if case["end"] == "max_epochs" else {"max_steps": 5, "max_epochs": -1}
    if case["minimum"]:
        # the largest that Lightning accepts beside the end
        options[case["minimum"]] = {"min_epochs": 3, "min_steps": 5}[case["minimum"]]
    if case["devices"] > 1:
        options |= {"strategy": "ddp", "devices": case["devices"]}
    workers = {"num_workers": 1, "persistent_workers": True} if case["persistent_workers"] else {}
    private: dict[str, Any] = {"eps": 2.0}
    if case["budget"] == "ends early":
        private = {"eps": _budget(case), "noise_multiplier": 1.5}
    callback, module = LIGHTNING.lap2(**private), classifier(pl)
    trainer = quiet_trainer(pl, callback, num_sanity_val_steps=0, **options)
    with watched_releases() as seen:
        trainer.fit(module, loader(N, BATCH, **workers), loader(8, 4))
    state = callback.state_dict()
    del state["journal"], state["checksum"]
    return {
        "releases": len(seen),
        "numbers": [release.number for release in seen],
        "steps": callback.steps,
        "charges": callback.accountant.steps,
        "global_step": trainer.global_step,
        "eps": callback.eps,
        "epsilon": callback.accountant.epsilon(delta=callback.delta),
        "ledger": json.dumps(state, sort_keys=True),
        "weights": weights(module),
    }


def _budget(case: Case) -> float:
    """Pays for exactly three steps."""
    from tests.helpers import budget_for

    rate = BATCH * case["accumulate_grad_batches"] * case["devices"] / N
    return budget_for(3, noise_multiplier=1.5, sample_rate=rate, dimension=8)


def check(case: Case, results: list[dict[str, Any]]) -> None:
    """``results``: one for each rank."""
    first = results[0]
    assert first["releases"] == first["steps"] == first["charges"] == first["global_step"] == expected_releases(case)
    assert first["numbers"] == list(range(first["releases"]))
    assert 0 < first["epsilon"] <= first["eps"]
    if case["budget"] == "calibrated":
        assert first["epsilon"] > 0.995 * first["eps"], "the noise was calibrated for more steps than were made"
    for other in results[1:]:
        assert other["ledger"] == first["ledger"]
        assert (other["weights"] == first["weights"]).all()


def name_of(case: Case) -> str:
    return ",".join(f"{name}={value}" for name, value in case.items())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="run the full product instead of printing the cover")
    if not parser.parse_args(arguments).full:
        for case in covering():
            print(name_of(case))
        return
    cases = list(_product())
    two = {str(number): case for number, case in enumerate(cases) if case["devices"] == 2}
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary)
        (output / "cases.json").write_text(json.dumps(two))
        job = start("tests.settings.pairwise_job", list(two), output, ranks=2)
        failed = 0
        for case in cases:
            if case["devices"] == 1:
                failed += _failed(case, [run(case)])
        job.wait(3600.0)
        for name, case in two.items():
            failed += _failed(case, job.results(name, 2))
    print(f"{len(cases)} fits, {failed} failed")
    sys.exit(bool(failed))


def _failed(case: Case, results: list[dict[str, Any]]) -> bool:
    try:
        check(case, results)
    except AssertionError as error:
        print(f"FAILED {name_of(case)}: {error}")
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
