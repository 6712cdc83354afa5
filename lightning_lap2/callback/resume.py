"""Beginning where a checkpoint ended: the Trainer's progress, and a ledger that misses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lap2.callback.journal import PATTERN, local_path
from lightning_lap2.callback.ledger import Ledger
from lightning_lap2.callback.settings import Settings
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


def accept_untracked(settings: Settings, ledger: Ledger) -> None:
    """A checkpoint without our state: its training may have spent any amount.

    Raises:
        UnsupportedSettingError: unless ``assume_nothing_spent``, which the report then repeats.
    """
    if not settings.assume_nothing_spent:
        raise UnsupportedSettingError(
            "the checkpoint holds no Lap2Privacy ledger, so what its training revealed about the data is unknown; "
            "resume from a checkpoint saved with this callback, or, if it was trained on other (public) data, pass "
            "assume_nothing_spent=True (the report then says so)"
        )
    ledger.add_caveat("resumed from a checkpoint without a ledger, declared to have spent nothing")


def settle(ledger: Ledger, trainer: Any, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Charges what killed runs released after the checkpoint, on every rank the same, and counts what other branches
    released.

    Raises:
        ValueError: a journal is there and damaged.
    """
    found = ledger.find(_beside(trainer.ckpt_path)) if trainer.is_global_zero else None
    found = trainer.strategy.broadcast(found)
    ledger.settle(found)
    if found.lost:
        lost = (
            "the journal of the run that saved the checkpoint was not found; had that run been killed, what it "
            "released after the checkpoint would be missing from the ledger"
        )
        ledger.add_caveat(lost)
        warn(f"{lost}. Keep {PATTERN} beside the checkpoints or in the folder above them")
    if found.owed:
        say(f"{len(found.owed)} releases made after the checkpoint by a run that was killed are charged to the ledger")
    if found.elsewhere:
        say(
            f"{found.elsewhere} releases of other branches of this run exist: they are not charged here, and the "
            "report says so"
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
