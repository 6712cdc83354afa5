"""Kills training processes by SIGKILL at random moments and resumes them: ``python -m tests.resume.kill --rounds 50``.

Several runs train at the same time and share a folder of checkpoints and journals. Each round kills one of them, which
then resumes from its newest checkpoint. Every process writes down what it finds in the ledger and every release it
makes. The ledger that a run's next process starts with must hold at least the releases that the run ever made, and no
noise vector and no draw may ever occur twice.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.callback.release import releases as releases_module
from tests.helpers import DELTA, LIGHTNING, classifier, loader, quiet_trainer

pl = LIGHTNING.pl
PATIENCE = 90.0  # seconds for one process


class Diary:
    """What the processes of one run write down, in files that outlive them."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.checkpoints = directory / "checkpoints"
        self._releases, self._starts, self.log = (
            directory / f"{name}.{kind}.txt" for kind in ("releases", "starts", "log")
        )
        for path in (self._releases, self._starts, self.log):
            path.touch()

    def write(self, path: Path, *values: object) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, (" ".join(map(str, values)) + "\n").encode())
        os.close(descriptor)

    def release(self, noise: Tensor, draw: str) -> None:
        self.write(self._releases, hashlib.sha1(noise.numpy().tobytes()).hexdigest(), draw)

    def start(self, callback: Any) -> None:
        """A process is about to train: the ledger it starts with, and the releases made before."""
        self.write(self._starts, callback.steps, callback.accountant.epsilon(delta=DELTA), self.released)

    @property
    def released(self) -> int:
        return len(self.releases())

    def releases(self) -> list[list[str]]:
        return [line.split() for line in self._releases.read_text().splitlines()]

    def starts(self) -> list[tuple[int, float, int]]:
        rows = (line.split() for line in self._starts.read_text().splitlines())
        return [(int(steps), float(epsilon), int(released)) for steps, epsilon, released in rows]

    def newest_checkpoint(self) -> Path | None:
        """The newest that is whole: a process may have died writing one."""
        for path in sorted(self.checkpoints.glob(f"{self.name}-*.ckpt"), key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                torch.load(path, weights_only=True)
            except Exception:
                continue
            return path
        return None


# The looser bound: its epsilon costs less time than the default's at every start.
NOISE = {"eps": 200.0, "noise_multiplier": 1.5, "bound": "joint"}
N, BATCH = 400, 20


def train(diary: Diary, noise_seed: int | None, last: int | None) -> None:
    """One process: trains on from the newest checkpoint until it is killed, or for ``last`` releases more."""
    callback = LIGHTNING.lap2(**NOISE, noise_seed=noise_seed)
    draws: list[str] = []

    class Witness(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            diary.start(callback)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            draws.append(hashlib.sha1(batch[0].numpy().tobytes()).hexdigest())

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if last is not None and len(draws) >= last:
                trainer.should_stop = True

    original = releases_module.release_

    def release_(total: Tensor, **options: Any) -> None:
        before = total.clone()
        original(total, **options)
        diary.release(total * options["normaliser"] - before, draws[-1])

    releases_module.release_ = release_  # type: ignore[assignment]
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=diary.checkpoints, filename=f"{diary.name}-{{step}}", every_n_train_steps=4
    )
    trainer = quiet_trainer(pl, callback, Witness(), checkpoint, max_epochs=100_000)
    trainer.fit(classifier(pl), loader(N, BATCH), ckpt_path=diary.newest_checkpoint())


def forked(diary: Diary, noise_seed: int | None, last: int | None = None) -> int:
    """The id of a new process that trains; forked, since importing torch and Lightning costs seconds."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(diary.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(diary, noise_seed, last)
        status = 0
    except BaseException as error:
        print(f"the training process failed: {error!r}", flush=True)
    finally:
        os._exit(status)


def kill_soon(pid: int, diary: Diary, chance: random.Random, *, at_least: int = 0) -> None:
    """SIGKILL after some more releases and a moment, or (one time in four) while it still starts up."""
    begun, deadline = diary.released, time.monotonic() + PATIENCE
    wanted = 0 if at_least == 0 and chance.random() < 0.25 else max(at_least, chance.randrange(1, 25))
    while diary.released < begun + wanted:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"status {status}; {diary.log.read_text()[-3000:]}")
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.02) if wanted else chance.uniform(0, 1.0))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def check(diary: Diary, kills: int) -> str:
    """Asserts what the module promises; returns a line about it."""
    starts, releases = diary.starts(), diary.releases()
    assert len(starts) > 1
    for steps, epsilon, released in starts:
        # A process may die between the charge and the release: at most one too many for each kill.
        assert released <= steps <= released + kills, f"{released} releases were made, the ledger holds {steps}"
        truth = MajorizedAccountant(bound="joint", mechanism="laplace")
        if released:
            truth.step(noise_multiplier=1.5, sample_rate=BATCH / N, dimension=8, steps=released)
        assert epsilon >= truth.epsilon(delta=DELTA) - 1e-12
    epsilons = [epsilon for _, epsilon, _ in starts]
    assert epsilons == sorted(epsilons)
    for column, what in enumerate(("noise", "draw")):
        found = [release[column] for release in releases]
        assert len(set(found)) == len(found), f"a {what} was repeated across a resume"
    counts = f"{kills} kills, {len(starts)} starts, {len(releases)} releases"
    return f"run {diary.name}: {counts}, ledger {starts[-1][0]} at the last start ({starts[-1][2]} made)"


def history(directory: Path, rounds: int, *, runs: int, noise_seed: int | None, chance: random.Random) -> list[str]:
    """About ``rounds`` kills of ``runs`` trainings that go on at the same time; each has a last life that ends in
    order."""
    directory.mkdir(parents=True, exist_ok=True)
    diaries = [Diary(directory, f"{number}") for number in range(runs)]
    alive: dict[int, int] = {}
    kills = [0] * runs

    def kill(victim: int) -> None:
        kill_soon(alive[victim], diaries[victim], chance, at_least=0 if kills[victim] else 6)
        del alive[victim]
        kills[victim] += 1
        assert diaries[victim].newest_checkpoint() is not None

    try:
        while sum(kills) + runs <= rounds:
            for number in range(runs):
                if number not in alive:
                    alive[number] = forked(diaries[number], noise_seed)
            kill(chance.randrange(runs))
        for victim in list(alive):
            kill(victim)
    finally:
        for pid in alive.values():  # where something failed
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for diary in diaries:
        _, status = os.waitpid(forked(diary, noise_seed, last=5), 0)
        assert status == 0, diary.log.read_text()[-3000:]
    return [check(diary, number) for diary, number in zip(diaries, kills, strict=True)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="kills of runs with default noise")
    parser.add_argument("--seeded-rounds", type=int, default=0, help="kills of other runs, with noise_seed=7")
    parser.add_argument("--runs", type=int, default=3, help="that share a folder")
    parser.add_argument("--directory", type=Path, help="kept; by default a temporary folder")
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # So that what is imported late is imported once, and not by every fork.
    quiet_trainer(pl, LIGHTNING.lap2(**NOISE), max_steps=2, max_epochs=-1).fit(classifier(pl), loader(N, BATCH))
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        for name, rounds, noise_seed in (("default", options.rounds, None), ("seeded", options.seeded_rounds, 7)):
            if rounds:
                lines = history(directory / name, rounds, runs=options.runs, noise_seed=noise_seed, chance=chance)
                print(f"{name}: {options.runs} runs in one folder", *lines, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
