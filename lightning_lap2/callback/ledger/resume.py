"""Beginning where a checkpoint ended: the Trainer's progress, and a ledger that misses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lap2.callback.ledger.journal import PATTERN, local_path
from lightning_lap2.callback.ledger.ledger import UNLINKED
from lightning_lap2.callback.run import Fit
from lightning_lap2.errors import UnsupportedSettingError

NO_JOURNAL = (
    "checkpoints are saved, but no folder of this run is on a local disk, so no journal of releases is kept: were the "
    "run killed, what it released after its last checkpoint would be missing from the ledger of a resumed run"
)


@dataclass(frozen=True)
class Resumed:
    """Progress of the Trainer in the checkpoint that a fit resumes from."""

    global_step: int
    epochs_done: int
    batches_done: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Resumed:
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        epoch = loops.get("epoch_progress", {}).get("current", {})
        batch = loops.get("epoch_loop.batch_progress", {}).get("current", {})
        processed = int(epoch.get("processed", 0))
        # Within an epoch one more is started than processed; after its end the batch counter is stale.
        inside = int(epoch.get("started", 0)) > processed
        return cls(
            global_step=int(checkpoint.get("global_step", 0)),
            epochs_done=processed,
            batches_done=int(batch.get("ready", 0)) if inside else 0,
        )


def accept_untracked(fit: Fit) -> None:
    """A checkpoint without our state: its training may have spent any amount.

    Raises:
        UnsupportedSettingError: unless ``assume_nothing_spent``, which the report then repeats.
    """
    if not fit.settings.assume_nothing_spent:
        raise UnsupportedSettingError(
            "the checkpoint holds no Lap2Privacy ledger, so what its training revealed about the data is unknown; "
            "resume from a checkpoint saved with this callback, or, if it was trained on other (public) data, pass "
            "assume_nothing_spent=True (the report then says so)"
        )
    fit.ledger.add_caveat("resumed from a checkpoint without a ledger, declared to have spent nothing")


def settle(fit: Fit) -> None:
    """Charges what killed runs released after the checkpoint, on every rank the same, and counts what other branches
    released.

    Raises:
        ValueError: a journal is there and damaged.
    """
    ledger = fit.ledger
    found = ledger.find(_beside(fit.trainer.ckpt_path)) if fit.trainer.is_global_zero else None
    found = fit.trainer.strategy.broadcast(found)
    ledger.settle(found)
    if found.lost:
        lost = (
            "the journal of the run that saved the checkpoint was not found; had that run been killed, what it "
            "released after the checkpoint would be missing from the ledger"
        )
        ledger.add_caveat(lost)
        fit.warn(f"{lost}. Keep {PATTERN} beside the checkpoints or in the folder above them")
    if found.owed:
        fit.say(
            f"{len(found.owed)} releases made after the checkpoint by a run that was killed are charged to the ledger"
        )
    if found.elsewhere:
        fit.say(
            f"{found.elsewhere} releases of other branches of this run exist: they are not charged here, and the "
            "report says so"
        )


def open_journal(fit: Fit, directory: Path | None) -> None:
    """The write-ahead journal lies beside the logs, or the checkpoints: in ``directory``."""
    if fit.trainer.is_global_zero and not fit.ledger.open_journal(directory):
        fit.warn(UNLINKED)


def keep_journal(fit: Fit) -> None:
    """A checkpoint is about to be saved: from now on releases must be in a journal, wherever it lies."""
    ledger, folder = fit.ledger, fit.trainer.default_root_dir
    if not fit.trainer.is_global_zero or ledger.has_journal:
        return
    ledger.open_journal(local_path(folder))
    if not ledger.has_journal and ledger.add_caveat(NO_JOURNAL):
        fit.warn(
            f"{NO_JOURNAL} (default_root_dir={str(folder)!r} is a URL too). Give a logger with a local folder, or "
            "Trainer(default_root_dir=...) on a local disk"
        )


def find_ledger(checkpoint: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The ledger in a checkpoint, under whatever name the callback's class had when it was saved.

    Raises:
        UnsupportedSettingError: several, none of them under ``key``.
    """
    states = checkpoint.get("callbacks") or {}
    if states.get(key):
        return dict(states[key])
    found = {
        name: dict(state) for name, state in states.items() if isinstance(state, Mapping) and state.keys() >= _ENTRIES
    }
    if len(found) > 1:
        raise UnsupportedSettingError(
            f"the checkpoint holds several privacy ledgers ({', '.join(map(str, found))}), none of them under the "
            f"state key {key!r}; give the callback the state_key of the one to go on from"
        )
    return next(iter(found.values()), None)


# by which a ledger is known
_ENTRIES = {"releases", "accountant", "delta", "sampling", "checksum"}


def _beside(checkpoint: Any) -> list[Path]:
    """Where a moved run's journal may lie: the checkpoint's folder and the one above."""
    path = None if checkpoint is None else local_path(checkpoint)
    return [] if path is None else list(path.resolve().parents[:2])
