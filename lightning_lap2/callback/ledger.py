"""What has been spent: the accountant, the number of releases, and what a checkpoint must hold to continue both.

A ledger is charged *before* the parameters change, so that a crash over-counts and never under-counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_lap2 import _validate
from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.adaptive import check_state
from lightning_lap2.callback.journal import FILE_NAME, Charge, Journal, has_run, is_open, releases_beyond
from lightning_lap2.callback.plan import check_summary
from lightning_lap2.callback.settings import Settings

STATE_VERSION = 2
SEARCH_CAVEAT = (
    "This run is one of a private search, which releases the best of them: the epsilon of this report is that of the "
    "run alone, that of the search is larger (search_report.md)."
)


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a state's canonical JSON: finds damage anywhere in it. No protection against forgery.

    Raises:
        TypeError: the state holds something that a ledger never writes.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Origin(NamedTuple):
    """The journal that a loaded checkpoint's run wrote; ``noted``: it had noted releases when that was saved."""

    path: Path
    run: str
    noted: bool


class Ledger:
    """Releases and charges since the first fit, across checkpoints.

    Attributes:
        accountant: every charge, with the parameters each was made with.
        releases: number of noised sums released; under ``sampling="none"`` more than the accountant's steps, since
            one unsampled release covers a whole pass over the data.
        reproducible: some release drew its noise from a seed, so whoever knows the seed can remove it.
        caveats: what this ledger's history lacks, for the report; grows only.
        plan: the last fit's plan, JSON-able, by which a resumed fit knows whether it is the same.
        clipping: where adaptive clipping stands, see :class:`~lightning_lap2.callback.adaptive.AdaptiveThreshold`.
    """

    def __init__(self, settings: Settings) -> None:
        self.accountant = MajorizedAccountant(bound=settings.bound, mechanism=settings.mechanism)
        self.delta = settings.delta
        self.sampling = settings.sampling
        self.releases = 0
        self.reproducible = False
        self.caveats: list[str] = []
        self.plan: dict[str, Any] = {}
        self.clipping: dict[str, float] = {}
        self._journal: Journal | None = None
        self._origin: Origin | None = None

    def add_caveat(self, text: str) -> bool:
        """Whether it is new."""
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

    def charge(self, charge: Charge, *, accounted: bool = True) -> None:
        """Notes one release, on disk first if a journal is open, then in memory.

        Args:
            charge: what :meth:`Mechanism.charge` says of the release.
            accounted: False for a release whose cost an earlier charge of the same pass already covers.

        Raises:
            OSError: the journal cannot be written; the release must not happen.
        """
        if self._journal is not None:
            self._journal.record(self.releases, {**charge, "accounted": accounted})
        if accounted:
            self.accountant.step(**charge)
        self.releases += 1

    # -- journal --------------------------------------------------------------------------------------------------

    def find_journal(self, folders: Iterable[Path]) -> bool:
        """Looks for the loaded checkpoint's journal: where it was written, else in ``folders`` (a run's folder may
        have been moved). False if it is lost: what the run released after the checkpoint cannot be known.

        Raises:
            ValueError: a journal is damaged.
        """
        if self._origin is None:
            return True
        path, run, noted = self._origin
        for candidate in (path, *(folder / FILE_NAME for folder in folders)):
            if has_run(candidate, run):
                self._origin = Origin(candidate, run, noted)
                return True
        return path.is_file() or not noted

    def owed(self) -> list[Charge]:
        """Releases that the loaded checkpoint's run made after it was written, from that run's journal.

        Raises:
            ValueError: the journal is there and damaged.
        """
        if self._origin is None:
            return []
        path, run, noted = self._origin
        return releases_beyond(path, run, self.releases, noted=noted)

    def settle(self, owed: list[Charge]) -> None:
        """Charges what :meth:`owed` found (on every rank the same)."""
        for item in owed:
            charge = dict(item)
            accounted = bool(charge.pop("accounted", True))
            if accounted:
                self.accountant.step(**charge)
            self.releases += 1

    def open_journal(self, directory: Path | None) -> None:
        """Starts the write-ahead file, or continues that of a run which did not end in order; one process only.

        The run is continued even where nothing was owed: this process may die before its first checkpoint, and the
        next one resumes from the same checkpoint as this one did.

        Args:
            directory: of a new file; ``None`` where nothing is ever saved.
        """
        origin, self._origin = self._origin, None
        if origin is not None and is_open(origin.path, origin.run):
            self._journal = Journal(origin.path, origin.run)
            self._journal.noted = True
        elif directory is not None:
            self._journal = Journal(directory / FILE_NAME)

    @property
    def has_journal(self) -> bool:
        return self._journal is not None

    def close_journal(self, *, completed: bool) -> None:
        if self._journal is not None:
            self._journal.close(completed=completed)
            self._origin = None if completed else Origin(self._journal.path, self._journal.run, self._journal.noted)

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain Python numbers and strings: loads under ``torch.load(weights_only=True)``."""
        journal = self._journal
        content = {
            "version": STATE_VERSION,
            "releases": self.releases,
            "accountant": self.accountant.state_dict(),
            "delta": self.delta,
            "sampling": self.sampling,
            "reproducible": self.reproducible,
            "caveats": list(self.caveats),
            "plan": dict(self.plan),
            "clipping": dict(self.clipping),
            "journal": None
            if journal is None
            else {"path": str(journal.path.resolve()), "run": journal.run, "noted": journal.noted},
        }
        return {**content, "checksum": checksum(content)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by what :meth:`state_dict` gave; all is checked before anything changes.

        Raises:
            ValueError: the state is damaged, or was kept under another mechanism, bound, adjacency or delta, whose
                charges cannot be continued here.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version {state['version']!r}, expected {STATE_VERSION}")
            if state["checksum"] != checksum({key: value for key, value in state.items() if key != "checksum"}):
                raise ValueError("it does not match its checksum")
            accountant = MajorizedAccountant.from_state_dict(state["accountant"])
            releases = _validate.integer("releases", state["releases"], minimum=0)
            delta = _validate.open_unit("delta", state["delta"])
            sampling = _validate.choice("sampling", state["sampling"], ("poisson", "none"))
            reproducible = _validate.boolean("reproducible", state["reproducible"])
            caveats, plan, journal = _texts(state["caveats"]), check_summary(dict(state["plan"])), state["journal"]
            if unknown := sorted(state.keys() - self.state_dict().keys()):
                raise ValueError(f"unknown entries {unknown}")
            clipping = check_state(dict(state["clipping"]))
            if releases < accountant.steps or (sampling == "poisson" and releases != accountant.steps):
                raise ValueError(f"{releases} releases but {accountant.steps} charges")
            origin = None
            if journal is not None:
                noted = _validate.boolean("noted", journal["noted"])
                origin = Origin(Path(journal["path"]), str(journal["run"]), noted)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the privacy ledger in the checkpoint is damaged: {error}") from error
        for name, here, there in (
            ("mechanism", self.accountant.mechanism, accountant.mechanism),
            ("bound", self.accountant.bound, accountant.bound),
            ("sampling", self.sampling, sampling),
            ("delta", self.delta, delta),
        ):
            if here != there:
                raise ValueError(
                    f"the checkpoint's ledger was kept with {name}={there!r} and cannot be continued with "
                    f"{name}={here!r}; pass {name}={there!r}"
                )
        if SEARCH_CAVEAT in caveats:
            raise ValueError(
                "the checkpoint is a run of a private search: its ledger knows that run alone, not what the search "
                "spent, and cannot be continued. Load its weights only (torch.load(path)['state_dict']), and add the "
                "epsilon and delta of the search's report to those of what you train from there"
            )
        self.accountant, self.releases, self.reproducible = accountant, releases, reproducible
        self.caveats, self.plan, self.clipping, self._origin = caveats, plan, clipping, origin


def _texts(found: Any) -> list[str]:
    """
    Raises:
        TypeError: not a list of strings.
    """
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"caveats must be a list of strings, got {found!r}")
    return list(found)
