"""The two audits: many runs on neighbouring data sets, and one run with many canaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_lap2 import _validate
from lightning_lap2.accounting import family_of
from lightning_lap2.audit.bench import Bench, Training
from lightning_lap2.audit.bounds import guesses_bound, rates_bound
from lightning_lap2.audit.canaries import CANARIES, CanaryKind, Relabelled, make_directions, mislabelled
from lightning_lap2.audit.losses import LossWatch
from lightning_lap2.audit.probes import GradientProbe, LeaveOut, Tick
from lightning_lap2.audit.result import AuditResult
from lightning_lap2.choices import MECHANISMS
from lightning_lap2.sampling import Units, rebuild_loader
from lightning_lap2.sampling.units import unit_name

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Method = Literal["one_run", "many_runs"]
METHODS = ("one_run", "many_runs")
Progress = Callable[[float], None]

_RUNS = {"one_run": 1, "many_runs": 1000}
_DIGITS = 6
# canaries where no number is asked for
_ONE_RUN_CANARIES = 1000
_RECORD_CANARIES = 8


def audit(
    training: Training,
    *,
    method: Method = "one_run",
    canary: CanaryKind | None = None,
    runs: int | None = None,
    canaries: int | None = None,
    confidence: float = 0.999,
    delta: float | None = None,
    guesses: int | None = None,
    holdout: float = 0.3,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditResult:
    """An empirical lower bound on epsilon for a training, with canaries among its own records.

    Canaries take the places of records of the data set, so N, q, steps and claim are those of the training itself. Each
    is in by a fair coin; one that is out is dropped wherever it is drawn, which is the neighbouring data set of the
    same public N. With ``unit`` a gradient canary takes the place of a user with all records.

    Args:
        training: model, data, privacy and Trainer.
        method: ``"one_run"``: all coins are guessed from one run, by Steinke, Nasr and Jagielski (2023), see
            :func:`~lightning_lap2.audit.bounds.guesses_p_value`. ``"many_runs"``: error rates over many runs with
            Clopper-Pearson limits, see :func:`~lightning_lap2.audit.bounds.rates_bound`; sharper, at the price of as
            many trainings.
        canary: ``"one_coordinate"``, ``"even_spread"``, ``"gradient"`` (both), or ``"mislabelled"`` (black box).
            ``None``: ``"one_coordinate"`` for one run, ``"gradient"`` for many.
        runs: independent runs. ``None``: 1 or 1,000. Several runs of ``"one_run"`` have their coins judged together.
        canaries: in each run. ``None``: for one run up to 1,000 (no more than records, or than trainable scalars with
            one coordinate each); for many runs one coordinate of every parameter tensor and one even spread, or 8
            records.
        confidence: probability with which the result is a lower bound, whatever was tried on the way.
        delta: of the claim that is audited: the ledger's epsilon at this delta. ``None``: the training's own. One run
            can refute nothing unless delta is well below 1 - confidence (see ``ceiling`` of the result), so audit it
            at a smaller one.
        guesses: of ``"one_run"``; ``None``: seven numbers share the error probability.
        holdout: fraction of many runs on which canary and threshold are chosen.
        seed: of coins, noise, draws and initial weights.
        progress: called after each release with the fraction of the work that is done.

    Raises:
        TypeError, ValueError: an argument, by name.
    """
    _validate.choice("method", method, METHODS)
    canary = canary or ("one_coordinate" if method == "one_run" else "gradient")
    _validate.choice("canary", canary, CANARIES)
    _validate.open_unit("confidence", confidence)
    _validate.open_unit("holdout", holdout)
    _validate.integer("seed", seed, minimum=0)
    if delta is not None:
        _validate.open_unit("delta", delta)
    runs = _RUNS[method] if runs is None else _validate.integer("runs", runs, minimum=4 if method == "many_runs" else 1)
    if canaries is not None:
        _validate.integer("canaries", canaries, minimum=1)
    if guesses is not None and method == "many_runs":
        raise ValueError(f"guesses={guesses} belongs to method='one_run'; method='many_runs' has thresholds")
    started = time.perf_counter()
    bench = Bench(training, seed)
    place: _Records | _Gradients
    if canary == "mislabelled":
        place = _Records(bench, canaries, method)
    else:
        place = _Gradients(bench, canary, canaries, method)
    scores, included = [], []
    for run in range(runs):
        coins = bench.generator(run).random(len(place.slots)) < 0.5
        scores.append(place.run(run, coins, _ticker(progress, run, runs)))
        included.append(coins)
    assert bench.claim is not None
    all_scores, all_included = np.asarray(scores), np.asarray(included)
    delta, claimed = bench.claim_at(delta)
    bound: Any
    if method == "many_runs":
        # releases are fp32: what their last bits tell is no part of the claim, and would split ties
        rounded = np.round(all_scores, _DIGITS)
        bound = rates_bound(rounded, all_included, delta=delta, confidence=confidence, holdout=holdout)
    else:
        bound = guesses_bound(
            all_scores.ravel(),
            all_included.ravel(),
            delta=delta,
            confidence=confidence,
            guesses=guesses,
            groups=np.tile(place.groups, runs),
        )
    return AuditResult(
        method=method,
        canary=canary,
        claim=bench.claim,
        claimed_epsilon=claimed,
        delta=delta,
        bound=bound,
        confidence=confidence,
        runs=runs,
        canaries=all_scores.shape[1],
        seconds=time.perf_counter() - started,
        seed=seed,
        scores=all_scores,
        included=all_included,
    )


def _ticker(progress: Progress | None, run: int, runs: int) -> Tick | None:
    """What tells ``progress`` of a release of this run."""
    if progress is None:
        return None
    return lambda release, steps: progress((run + release / steps) / runs)


class _Gradients:
    """White box: gradient canaries, and the log likelihood ratio of all releases."""

    def __init__(self, bench: Bench, kind: CanaryKind, count: int | None, method: Method) -> None:
        training = bench.training
        if training.privacy.get("engine") == "ghost":
            raise ValueError(
                f"engine='ghost' holds no gradients of single examples, but canary={kind!r} is one: audit with "
                "engine='vmap' (the same clipped sums), or canary='mislabelled'"
            )
        if training.privacy.get("engine") == "auto":  # which may choose ghost
            bench.training = training = replace(training, privacy={**training.privacy, "engine": "vmap"})
        self.bench, self.reveal = bench, method == "many_runs"
        choose = np.random.default_rng([bench.seed, 2])
        layout, size = bench.layout(), num_units(training)
        if count is None and method == "one_run":
            count = min(_ONE_RUN_CANARIES, size, *([layout.numel] if kind == "one_coordinate" else []))
        norm = family_of(training.privacy.get("mechanism", MECHANISMS[0])).norm
        self.directions = make_directions(kind, count, layout, norm, choose)
        self.slots = choose_slots(size, len(self.directions), choose)
        self.groups = self.directions.tensors(layout)

    def run(self, run: int, coins: Bools, tick: Tick | None) -> Array:
        probe = GradientProbe(self.slots, coins, self.directions, reveal=self.reveal, tick=tick)
        self.bench.run(run, probe)
        return probe.scores


class _Records:
    """Black box: mislabelled records, and how much training lowered their loss."""

    def __init__(self, bench: Bench, count: int | None, method: Method) -> None:
        self.bench = bench
        if (unit := bench.training.privacy.get("unit")) is not None:
            raise ValueError(
                f"canary='mislabelled' replaces single records, but with unit={unit_name(unit)!r} a canary is a user: "
                "audit with canary='gradient' or 'one_coordinate'"
            )
        choose = np.random.default_rng([bench.seed, 2])
        loader = bench.training.loader
        size = num_examples(loader)
        if count is None:
            count = min(_ONE_RUN_CANARIES, size) if method == "one_run" else min(_RECORD_CANARIES, size)
        self.slots = choose_slots(size, count, choose)
        self.groups = np.zeros(count, dtype=np.int64)
        replaced = mislabelled(loader.dataset, self.slots, choose)
        self.records = [replaced[slot] for slot in self.slots]
        if loader.batch_sampler is None:
            raise ValueError("the train DataLoader has batch_size=None: give DataLoader(batch_size=...)")
        self.loader = rebuild_loader(loader, loader.batch_sampler, Relabelled(loader.dataset, replaced))

    def run(self, run: int, coins: Bools, tick: Tick | None) -> Array:
        watch = LossWatch(self.records, self.loader.collate_fn)
        probe = LeaveOut(self.slots, coins, tick=tick)
        self.bench.run(run, probe, loader=self.loader, callbacks=[watch.callback()])
        return watch.before - watch.after


def num_units(training: Training) -> int:
    """Users where the training is private for them, else N."""
    unit = training.privacy.get("unit")
    size = num_examples(training.loader)
    return size if unit is None else Units.of(training.loader.dataset, unit).count


def num_examples(loader: DataLoader[Any]) -> int:
    """N.

    Raises:
        ValueError: a data set without a length.
    """
    if not isinstance(loader.dataset, Sized):
        raise ValueError(
            f"the train data set {type(loader.dataset).__name__} has no length, but canaries take the places of its "
            "records: use a map-style data set"
        )
    return len(loader.dataset)


def choose_slots(size: int, count: int, rng: np.random.Generator) -> list[int]:
    """Indices of the records whose places the canaries take."""
    if count > size:
        raise ValueError(f"canaries={count} take the places of as many records, but the train data has {size}")
    return [int(index) for index in rng.choice(size, count, replace=False)]
