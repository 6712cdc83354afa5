"""What has been spent: the accountant, the number of releases, and what a checkpoint must hold to continue both.

A ledger is charged *before* the parameters change, so that a crash over-counts and never under-counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant, Release
from lightning_lap2.callback.adaptive import threshold_state
from lightning_lap2.callback.facts import RunFacts
from lightning_lap2.callback.ledger.branches import Found, search
from lightning_lap2.callback.ledger.journal import Charge, Journal, Origin
from lightning_lap2.callback.plan import KeptPlan
from lightning_lap2.callback.settings import Settings
from lightning_lap2.choices import SAMPLINGS

STATE_VERSION = 3
_NEW_IN_3: dict[str, Any] = {"unprotected": [], "runs": {}, "elsewhere": 0, "changes": [], "logged": {}}
SEARCH_CAVEAT = (
    "This run is one of a private search, which releases the best of them: the epsilon of this report is that of the "
    "run alone, that of the search is larger (search_report.md)."
)
UNLINKED = (
    "the journal of the run that this one goes on from cannot be written: were this run killed before its first "
    "checkpoint, its releases would be missing from the ledger of another run resumed from the same checkpoint"
)


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a state's canonical JSON: finds damage anywhere in it. No protection against forgery.

    Raises:
        TypeError: the state holds something that a ledger never writes.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass
class Account:
    """A callback's ledger, and what its last fit was planned with. Copies of a callback share it: packages copy the
    callbacks they are given, and whoever holds the original wants to know what the copy has spent."""

    ledger: Ledger
    facts: RunFacts | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Account:
        return self


class Ledger:
    """Releases and charges since the first fit, across checkpoints.

    Attributes:
        accountant: every charge, with the parameters each was made with.
        releases: number of noised sums released; under ``sampling="none"`` more than the accountant's steps, since
            one unsampled release covers a whole pass over the data.
        reproducible: some release drew its noise from a seed, so whoever knows the seed can remove it.
        caveats: what this ledger's history lacks, for the report; grows only.
        plan: the last fit's plan, by which a resumed fit knows whether it is the same.
        changes: arguments that changed between the fits, as sentences; grows only.
        clipping: where adaptive clipping stands, see :class:`~lightning_lap2.callback.adaptive.AdaptiveThreshold`.
        unprotected: attributes of the module that hold values of records without noise; a step must not read them.
        elsewhere: releases known to exist in other branches of this ledger's runs, which it does not hold.
        logged: hyperparameters as they were first logged.
    """

    def __init__(self, settings: Settings) -> None:
        self.accountant = MajorizedAccountant(bound=settings.bound, mechanism=settings.mechanism)
        self.delta = settings.delta
        self.sampling, self.unit = settings.sampling, settings.unit_name
        self.releases = 0
        self.reproducible = False
        self.caveats: list[str] = [] if settings.run_limit is None else [SEARCH_CAVEAT]
        self.plan: KeptPlan | None = None
        self.changes: list[str] = []
        self.clipping: dict[str, float] = {}
        self.unprotected: list[str] = []
        self.elsewhere = 0
        self.logged: dict[str, float] = {}
        self._runs: dict[str, tuple[str, int]] = {}
        self._journal: Journal | None = None
        self._origin: Origin | None = None
        self._loaded = False  # from a checkpoint since the last fit, so journals may know more
        self._resumed_at = 0

    def branched_off(self, before: int) -> str | None:
        """A caveat where this ledger came from a checkpoint and holds fewer releases than were counted before it was
        loaded; its text if it is new."""
        text = (
            f"{before} releases had been counted before the checkpoint with {self.releases} was loaded; the ledger "
            "goes on from the checkpoint, as another branch. Whoever sees both branches' results knows both"
        )
        return text if before > self.releases and self.add_caveat(text) else None

    def add_caveat(self, text: str) -> bool:
        """Notes ``text`` for the report; False where it was noted before."""
        if text in self.caveats:
            return False
        self.caveats.append(text)
        return True

    def epsilon(self) -> float:
        """Spent so far. May take seconds where the slow route wins; the logged number is cheaper."""
        return self.accountant.epsilon(delta=self.delta)

    def epsilon_without_extra_blocks(self) -> float:
        """What the same releases would have cost without what was released beside the gradients."""
        return self.accountant.without_extra_blocks().epsilon(delta=self.delta)

    def charge(self, release: Release, *, accounted: bool = True) -> None:
        """Notes one release, on disk first if a journal is open, then in memory.

        Args:
            release: what it is to the accountant.
            accounted: False for a release whose cost an earlier charge of the same pass already covers.

        Raises:
            OSError: the journal cannot be written; the release must not happen.
        """
        if self._journal is not None:
            self._journal.record(self.releases, Charge(release, accounted))
        if accounted:
            self.accountant.charge(release)
        self.releases += 1

    def absorb(self, other: Ledger) -> None:
        """Adds what another ledger holds: one module was put together of parts that were trained under both.

        Composition does not depend on the order of releases (each with its parameters), so the accountants add up.
        """
        total = self.accountant.copy()
        for release, steps in other.accountant.composition.counts:
            total.charge(release, steps)
        self.accountant = total
        self.releases += other.releases
        self.reproducible |= other.reproducible
        self.elsewhere += other.elsewhere
        for text in other.caveats:
            self.add_caveat(text)
        self.changes += other.changes
        self._runs.update(other._runs)

    # -- journal --------------------------------------------------------------------------------------------------

    def find(self, folders: Iterable[Path]) -> Found:
        """What the journals tell of releases beyond this ledger; to be settled on every rank.

        Args:
            folders: where a run's files may lie now, if they were moved.

        Raises:
            ValueError: a journal is damaged.
        """
        if self._origin is None:
            return Found(known=dict(self._runs))
        if not self._loaded:
            held = {self._origin.run: (str(self._origin.path), self.releases)}
            return Found(known={**self._runs, **held}, origin=self._origin)
        return search(self._origin, self.releases, self._runs, folders)

    def settle(self, found: Found) -> None:
        """Charges what :meth:`find` found (on every rank the same), and remembers where it was found."""
        self._resumed_at = self.releases
        for charge in found.owed:
            if charge.accounted:
                self.accountant.charge(charge.release)
            self.releases += 1
        self.elsewhere = max(self.elsewhere, found.elsewhere)
        self._runs, self._origin, self._loaded = found.known, found.origin, False

    def open_journal(self, directory: Path | None) -> bool:
        """Starts this run's write-ahead file; one process only.

        Args:
            directory: of the file; ``None`` where nothing is ever saved: then that of the run that this one goes on
                from, whose checkpoint may be resumed once more.

        Returns:
            False if that run's journal cannot be told of this one (a caveat then says so).
        """
        parent, linked = self._origin, True
        if parent is not None and not parent.path.parent.is_dir():
            parent = None  # gone with its checkpoints, or moved away from them, which settling has told
        if parent is not None and not os.access(parent.path if parent.path.exists() else parent.path.parent, os.W_OK):
            parent, linked = None, not self.add_caveat(UNLINKED)
        folder = directory if directory is not None or parent is None else parent.path.parent
        if folder is not None:
            self._journal = Journal(folder, parent, self._resumed_at)
        return linked

    @property
    def has_journal(self) -> bool:
        return self._journal is not None

    @property
    def run(self) -> str | None:
        """Identity of the run whose journal is open, or was last."""
        origin = self._current()
        return None if origin is None else origin.run

    def _current(self) -> Origin | None:
        return self._origin if self._journal is None else self._journal.origin

    def close_journal(self, *, completed: bool) -> None:
        if self._journal is not None:
            try:
                self._journal.close(completed=completed)
            finally:
                self._origin, self._journal = self._journal.origin, None

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain Python numbers and strings: loads under ``torch.load(weights_only=True)``."""
        journal = self._current()
        content = {
            "version": STATE_VERSION,
            "releases": self.releases,
            "accountant": self.accountant.state_dict(),
            "delta": self.delta,
            "sampling": self.sampling,
            "unit": self.unit,
            "reproducible": self.reproducible,
            "caveats": list(self.caveats),
            "plan": {} if self.plan is None else self.plan.to_dict(),
            "changes": list(self.changes),
            "clipping": dict(self.clipping),
            "unprotected": list(self.unprotected),
            "elsewhere": self.elsewhere,
            "logged": dict(self.logged),
            "runs": {run: list(known) for run, known in self._runs.items()},
            "journal": None
            if journal is None
            else {"path": str(journal.path), "run": journal.run, "noted": journal.noted},
        }
        return {**content, "checksum": checksum(content)}

    def load_state_dict(self, state: Mapping[str, Any], *, of: str = "the checkpoint") -> None:
        """Replaces everything by what :meth:`state_dict` gave; all is checked before anything changes.

        Args:
            of: whose ledger this is, for messages.

        Raises:
            ValueError: the state is damaged, or was kept under another mechanism, bound, adjacency or delta, whose
                charges cannot be continued here, or by a private search.
        """
        try:
            if state["version"] not in (2, STATE_VERSION):
                raise ValueError(f"version {state['version']!r}, expected {STATE_VERSION}")
            if state["checksum"] != checksum({key: value for key, value in state.items() if key != "checksum"}):
                raise ValueError("it does not match its checksum")
            if state["version"] == 2:
                state = {**_NEW_IN_3, **state}
            state = {"unit": None, **state}
            accountant = MajorizedAccountant.from_state_dict(state["accountant"])
            releases = _validate.integer("releases", state["releases"], minimum=0)
            delta = _validate.open_unit("delta", state["delta"])
            sampling = _validate.choice("sampling", state["sampling"], SAMPLINGS)
            unit = None if state["unit"] is None else _validate.text("unit", state["unit"])
            reproducible = _validate.boolean("reproducible", state["reproducible"])
            caveats, changes = (
                _validate.texts("caveats", state["caveats"]),
                _validate.texts("changes", state["changes"]),
            )
            plan, journal = KeptPlan.from_dict(dict(state["plan"])), state["journal"]
            if unknown := sorted(state.keys() - self.state_dict().keys()):
                raise ValueError(f"unknown entries {unknown}")
            clipping = threshold_state(dict(state["clipping"]))
            unprotected = _validate.texts("unprotected", state["unprotected"])
            elsewhere = _validate.integer("elsewhere", state["elsewhere"], minimum=0)
            logged = {str(name): _validate.real(name, value) for name, value in dict(state["logged"]).items()}
            runs = {
                str(run): (_validate.text("runs", path), _validate.integer("runs", held, minimum=0))
                for run, (path, held) in dict(state["runs"]).items()
            }
            if releases < accountant.steps or (sampling == "poisson" and releases != accountant.steps):
                raise ValueError(f"{releases} releases but {accountant.steps} charges")
            origin = None
            if journal is not None:
                noted = _validate.boolean("noted", journal["noted"])
                origin = Origin(Path(journal["path"]), str(journal["run"]), noted)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the privacy ledger in {of} is damaged: {error}") from error
        self._check_search(caveats, of)
        self._check_same(accountant.mechanism, accountant.bound, sampling, unit, delta, of)
        self.accountant, self.releases, self.reproducible = accountant, releases, reproducible
        self.caveats, self.plan, self.changes, self.clipping = caveats, plan, changes, clipping
        self.elsewhere, self.logged, self._runs = elsewhere, logged, runs
        self._origin, self._loaded, self.unprotected = origin, True, unprotected

    def check_continues(self, other: Ledger, *, of: str) -> None:
        """Whether the charges of ``other`` can be continued here.

        Raises:
            ValueError: they were kept under another mechanism, bound, adjacency or delta, or by a private search.
        """
        self._check_search(other.caveats, of)
        kept = other.accountant
        self._check_same(kept.mechanism, kept.bound, other.sampling, other.unit, other.delta, of)

    def _check_same(self, mechanism: str, bound: str, sampling: str, unit: str | None, delta: float, of: str) -> None:
        for name, here, there in (
            ("mechanism", self.accountant.mechanism, mechanism),
            ("bound", self.accountant.bound, bound),
            ("sampling", self.sampling, sampling),
            ("unit", self.unit, unit),
            ("delta", self.delta, delta),
        ):
            if here != there:
                raise ValueError(
                    f"the ledger of {of} was kept with {name}={there!r} and cannot be continued with "
                    f"{name}={here!r}; pass {name}={there!r}"
                )

    def _check_search(self, caveats: Iterable[str], of: str) -> None:
        """A run of a private search starts from weights on which nothing was spent, and nothing goes on from it.

        Raises:
            ValueError: this ledger, or the one that holds ``caveats``, is that of such a run.
        """
        if SEARCH_CAVEAT in self.caveats:
            raise ValueError(
                f"a run of a private search starts from fresh weights, but {of} has a ledger of its own: build the "
                "module within train, and fit it without ckpt_path"
            )
        if SEARCH_CAVEAT in caveats:
            raise ValueError(
                f"the ledger of {of} is that of one run of a private search: it does not know what the search spent, "
                "and cannot be continued. Load the weights alone into a new module (load_state_dict), and add the "
                "epsilon and delta of the search's report to those of what you train from there"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For pickles, which are like checkpoints: an open file stays with its process, a copy elsewhere goes on as a
        run of its own, once it has asked the journals what was released since."""
        return {**vars(self), "_journal": None, "_origin": self._current(), "_loaded": True}
