"""The search: draws the number of runs and their configurations, makes the runs, keeps the best."""

from __future__ import annotations

import random
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from lightning_lap2 import _validate
from lightning_lap2._progress import progress_bar
from lightning_lap2.accounting.selection import Distribution, RunCount, RunLimit, plan_search
from lightning_lap2.batches.generators import seeded_generators
from lightning_lap2.callback.hooks import Lap2Hooks
from lightning_lap2.callback.ledger.ledger import SEARCH_CAVEAT
from lightning_lap2.report import SELECTION_CAVEAT
from lightning_lap2.selection.report import CAVEATS, SearchReport
from lightning_lap2.selection.run import drop_report, make_callback, score_of
from lightning_lap2.selection.space import Choice, Space
from lightning_lap2.selection.state import Best, State, check_same, load, only_one

Train = Callable[[Any, Any], float]
"""(configuration, callback) -> score."""

TYPICAL_PLAN = {"sample_rate": 0.01, "steps": 3000, "dimension": 30_000}
"""Whose limit is taken where none is given; see :func:`~lightning_lap2.accounting.selection.plan_search`."""

_RUN_PREFIX = "run-"
_BEST_FOLDER = "best"
_PRIVACY_PREFIX = "privacy."
_SET_BY_THE_SEARCH = ("eps", "delta", "noise_multiplier", "noise_seed")


@dataclass(frozen=True)
class BestRun:
    """What a search releases.

    Attributes:
        score: as ``train`` returned it.
        config: the configuration it was given.
        folder: what the run wrote to ``privacy.folder``.
    """

    score: float
    config: Any
    folder: Path

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints (``*.ckpt``) that the run wrote, sorted by path."""
        return sorted(self.folder.rglob("*.ckpt"))


class PrivateSearch:
    """Hyperparameter search by the best of a random number of runs; its whole price is within ``eps``.

    The number of runs is drawn from a public distribution and kept secret, each run's configuration is drawn from a
    public space with replacement, and only the best run is kept. Then the best costs little more than one run, whatever
    number was drawn (Papernot and Steinke 2022, arXiv 2110.03620; docs/private-search.md has the proof). Each run is
    held to a limit that is fixed beforehand, so configurations may differ in batch size, epochs or model.

    Args:
        eps: what the whole search may cost, positive and finite.
        delta: of the search, in (0, 1), and below 1/N.
        mean_runs: expected number of runs, >= 1 (> 0 for ``"poisson"``).
        distribution: ``"negative_binomial"``: at least one run; ``"poisson"``: may be none, far more even, dearer.
        shape: of the negative binomial, > -1: 0 is logarithmic (cheapest, most uneven), 1 geometric.
        mode: whether the best run is the one with the largest (``"max"``) or smallest (``"min"``) score.
        folder: for what must survive a kill, and for the result. A search that is found there is gone on with; one that
            has ended is not run again.
        seed: ``None``: all draws from the operating system's entropy. An integer makes the number of runs and their
            configurations reproducible (the noise is not), and the search not private to whoever knows it.
        plan: ``sample_rate``, ``steps`` and ``dimension`` of a typical run: its noise is then the least that serves.
            ``None``: a usual one, which takes somewhat more (docs/private-search.md: about 1 %, up to 6 % for Poisson).
        callback: ``Lap2Privacy`` of the Lightning namespace that ``train`` uses; ``None``: of ``lightning.pytorch``.
        privacy: further arguments of ``Lap2Privacy`` for every run, such as ``max_grad_norm``.

    Raises:
        TypeError, ValueError: an argument's type or value, by name.

    Example::

        def train(config, privacy):
            trainer = L.Trainer(max_epochs=10, callbacks=[privacy], default_root_dir=privacy.folder)
            model = MyModule(lr=config["lr"])
            trainer.fit(model, train_dataloader)
            return trainer.validate(model, public_dataloader)[0]["val_accuracy"]

        search = PrivateSearch(eps=2.0, delta=1e-5, mean_runs=10)
        best = search.run(train, {"lr": [0.01, 0.1, 1.0], "privacy.max_grad_norm": [0.1, 1.0]})
        print(best.score, best.config, best.checkpoints, search.report())
    """

    def __init__(
        self,
        eps: float,
        delta: float = 1e-5,
        mean_runs: float = 10.0,
        distribution: Distribution = "negative_binomial",
        shape: float = 0.0,
        *,
        mode: Literal["max", "min"] = "max",
        folder: str | Path = "private_search",
        seed: int | None = None,
        plan: Mapping[str, Any] | None = None,
        callback: type[Lap2Hooks] | None = None,
        **privacy: Any,
    ) -> None:
        self.eps = _validate.positive("eps", eps, finite=True)
        self.delta = _validate.open_unit("delta", delta)
        self.runs = RunCount(_validate.real("mean_runs", mean_runs), distribution, _validate.real("shape", shape))
        self.mode = _validate.choice("mode", mode, ("max", "min"))
        self.folder = Path(folder)
        self.seed = None if seed is None else _validate.integer("seed", seed, minimum=0)
        self.plan = dict(TYPICAL_PLAN if plan is None else plan)
        if set(self.plan) != set(TYPICAL_PLAN):
            raise ValueError(f"plan must hold {', '.join(TYPICAL_PLAN)}, got {sorted(self.plan)}")
        self._callback = _lightning_callback() if callback is None else callback
        self.privacy = privacy
        _check_settings(privacy, "PrivateSearch")
        if privacy.get("bound") == "published":
            raise ValueError("bound='published' is not a valid bound, so a search has no price under it: use 'tight'")
        self._settings = self._callback(self.eps, self.delta, **privacy).settings
        self._state: State | None = None
        self._space: Space | None = None

    @cached_property
    def limit(self) -> RunLimit:
        """What each run keeps. The price of the search follows from it."""
        settings = self._settings
        return _limit(self.eps, self.delta, self.runs, settings.bound, settings.mechanism, tuple(self.plan.items()))

    def run(
        self, train: Train, space: Mapping[str, Sequence[Any]] | Sequence[Any], *, progress: bool = True
    ) -> BestRun | None:
        """Makes the runs and returns the best.

        Args:
            train: called with a configuration and the callback of its run, for which it makes a Trainer and fits once;
                returns the score, a number that is not NaN. The score must be a function of the trained weights and of
                public data, or it is not covered. ``privacy.folder`` is the folder for all that it writes.
            space: public: a mapping from names to lists of values (a grid), or a list of configurations. Of a grid,
                ``train`` gets a dict; entries named ``privacy.<argument>`` are given to the run's callback, too.
            progress: a bar on stderr. It shows no numbers, but whoever sees it can count the runs.

        Returns:
            The best run (of equal ones the first); ``None`` if the Poisson distribution gave no run.

        Raises:
            RuntimeError: ``train`` did not use its callback, or its ledger exceeds the limit; another process is
                searching in ``folder``.
            TypeError, ValueError: a score that is no number or is NaN; a space that is not one; ``folder`` holds
                another search.
            OSError: ``folder`` cannot be written.
        """
        drawn = Space(space)
        for name in drawn.names:
            if name.startswith(_PRIVACY_PREFIX):
                _check_settings({name.removeprefix(_PRIVACY_PREFIX): None}, "space", "sampling", "bound")
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_one(self.folder), progress_bar("search", shown=progress) as bar:
            state = self._begin(drawn)
            self._state, self._space = state, drawn
            while state.pending:
                self._make_run(train, drawn, state)
                bar(1.0 - len(state.pending) / state.total)
            return self._end(state, drawn)

    def report(self) -> SearchReport:
        """What is guaranteed of the search, and what is not; the same as ``search_report.md`` in its folder.

        Raises:
            RuntimeError: :meth:`run` has not been called.
        """
        if self._state is None or self._space is None:
            raise RuntimeError("the report is known once run() has been called")
        state, best = self._state, self._state.best
        seeded = ["seed makes the number of runs reproducible: the search is not private to whoever knows it."]
        of_one_run = (SEARCH_CAVEAT, SELECTION_CAVEAT)
        own = [text for text in (best.run["caveats"] if best else []) if text not in of_one_run]
        return SearchReport(
            eps=self.eps,
            epsilon=state.limit.search_epsilon(self.runs, self.delta),
            delta=self.delta,
            adjacency=self._settings.adjacency,
            distribution=self.runs.distribution,
            mean_runs=self.runs.mean,
            shape=self.runs.shape,
            mode=self.mode,
            points=state.limit.points,
            divergences=state.limit.divergences,
            finished=state.finished,
            score=best.score if best and state.finished else None,
            config=self._space.config(best.choice) if best and state.finished else None,
            run=best.run if best and state.finished else None,
            caveats=(*(seeded if self.seed is not None else []), *state.notes, *CAVEATS, *own),
        )

    # -- one search -----------------------------------------------------------------------------------------------

    def _begin(self, space: Space) -> State:
        """The state in the folder, or a new one: the only place where anything is drawn."""
        told = self._told(space)
        state = load(self.folder)
        if state is not None:
            check_same(state.search, told, self.folder)
            self._clear(state)
            return state
        source = random.SystemRandom() if self.seed is None else random.Random(self.seed)
        pending: list[Choice] = [space.draw(source.randrange) for _ in range(self.runs.draw(source.random()))]
        state = State(search=told, limit=self.limit, pending=pending, total=len(pending))
        state.save(self.folder)
        return state

    def _told(self, space: Space) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "delta": self.delta,
            "mean_runs": self.runs.mean,
            "distribution": self.runs.distribution,
            "shape": self.runs.shape,
            "mode": self.mode,
            "seed": self.seed,
            "plan": self.plan,
            "privacy": {name: repr(value) for name, value in sorted(self.privacy.items())},
            "space": space.fingerprint(),
        }

    def _make_run(self, train: Train, space: Space, state: State) -> None:
        choice = state.pending[0]
        config = space.config(choice)
        folder = self.folder / f"{_RUN_PREFIX}{secrets.token_hex(8)}"  # names tell nothing of their order
        folder.mkdir()
        try:
            own = _own_settings(config) if space.names else {}
            privacy = make_callback(
                self._callback, folder, state.limit, **{"eps": self.eps, "delta": self.delta, **self.privacy, **own}
            )
            with seeded_generators(secrets.randbits(32)):  # initial weights and shuffling: runs must be alike in law
                score = score_of(privacy, train(config, privacy))
            drop_report(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if state.best is None or (score > state.best.score if self.mode == "max" else score < state.best.score):
            state.best = Best(folder=folder.name, score=score, choice=choice, run=privacy.report().to_dict())
        state.notes += [note for note in dict.fromkeys(privacy.notes) if note not in state.notes]
        state.pending = state.pending[1:]
        state.save(self.folder)
        self._clear(state)

    def _clear(self, state: State) -> None:
        """Deletes every run but the best."""
        for found in self.folder.glob(f"{_RUN_PREFIX}*"):
            if state.best is None or found.name != state.best.folder:
                shutil.rmtree(found)

    def _end(self, state: State, space: Space) -> BestRun | None:
        """Forgets the number of runs, names the best run's folder, writes the report; may be done again."""
        if not state.finished:
            state.finish()
            state.save(self.folder)
        best, named = state.best, self.folder / _BEST_FOLDER
        if best is not None and (self.folder / best.folder).is_dir():
            (self.folder / best.folder).rename(named)
        self.report().write(self.folder, warn=lambda text: warnings.warn(text, stacklevel=2))
        return None if best is None else BestRun(best.score, space.config(best.choice), named)


@lru_cache(maxsize=16)
def _limit(
    eps: float, delta: float, runs: RunCount, bound: str, mechanism: str, plan: tuple[tuple[str, Any], ...]
) -> RunLimit:
    """Seconds to find, so kept for a series of equal searches."""
    return plan_search(eps=eps, delta=delta, runs=runs, bound=bound, mechanism=mechanism, **dict(plan)).limit


def _lightning_callback() -> type[Lap2Hooks]:
    from lightning_lap2.lightning import Lap2Privacy

    return Lap2Privacy


def _own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that are for the callback."""
    return {
        name.removeprefix(_PRIVACY_PREFIX): value for name, value in config.items() if name.startswith(_PRIVACY_PREFIX)
    }


def _check_settings(found: Mapping[str, Any], where: str, *fixed: str) -> None:
    """
    Raises:
        ValueError: an argument of ``Lap2Privacy`` that the search sets itself, or that must be one for all runs.
    """
    own = sorted(set(found) & set(_SET_BY_THE_SEARCH))
    if own:
        raise ValueError(f"{where} gives {', '.join(own)}, which the search sets for every run itself: leave it out")
    alike = sorted(set(found) & set(fixed))
    if alike:
        raise ValueError(f"{where} gives {', '.join(alike)}, which must be one for all runs: give it to PrivateSearch")
