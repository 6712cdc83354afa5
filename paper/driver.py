"""Runs a plan, a text file with one experiment's command line per line, several at once; it can be stopped at any time.

    python paper/driver.py paper/plans/table2_mnist.txt --workers 2 --commit docs/results

A line is a script of this folder and its flags; ``$NAME`` stands for an environment variable (a data folder, say).
An experiment skips rows that its CSV holds already, so a plan that was stopped goes on where it was. With ``--commit``
each result is committed to git as it ends.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from jsonargparse import ArgumentParser

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def commands(plan: str) -> list[list[str]]:
    """The lines of a plan, comments and blank lines left out.

    Raises:
        ValueError: an environment variable that a line names is not set, or its script does not exist.
    """
    out = []
    for line in plan.splitlines():
        words = [_expanded(word) for word in shlex.split(line, comments=True)]
        if not words:
            continue
        if not (HERE / words[0]).exists():
            raise ValueError(f"{words[0]!r} is no script of {HERE.name}/, in the line: {line}")
        out.append(words)
    return out


def _expanded(word: str) -> str:
    expanded = os.path.expandvars(word)
    if "$" in expanded:
        raise ValueError(f"{word} names an environment variable that is not set")
    return expanded


def run(words: list[str]) -> tuple[int, str]:
    """One experiment in a process of its own, with one thread and with freed memory kept for the next step."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        **os.environ,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / words[0]), *words[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def commit(folder: str, message: str) -> None:
    """Commits what changed in ``folder``, if anything did, and nothing else."""
    subprocess.run(["git", "add", "--", folder], cwd=ROOT, check=True)
    changed = subprocess.run(["git", "diff", "--cached", "--quiet", "--", folder], cwd=ROOT).returncode
    if changed:
        subprocess.run(["git", "commit", "--quiet", "--message", message, "--", folder], cwd=ROOT, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Runs the paper's experiments from a plan; resumable.")
    parser.add_argument("plan", type=str, help="text file: a script and its flags per line")
    parser.add_argument("--workers", type=int, default=1, help="experiments at once; one core each")
    parser.add_argument("--commit", type=str, default=None, help="folder whose changes are committed after each")
    args = parser.parse_args(argv)
    todo, failed, start = commands(Path(args.plan).read_text()), 0, time.perf_counter()
    with ThreadPoolExecutor(args.workers) as pool:
        running = {pool.submit(run, words): words for words in todo}
        for number, future in enumerate(as_completed(running), start=1):
            words = running[future]
            code, output = future.result()
            last = output.strip().splitlines()[-1:] if code == 0 else [output]
            minutes = (time.perf_counter() - start) / 60
            print(f"[{number}/{len(todo)}, {minutes:.1f} min] {shlex.join(words)}\n    {''.join(last)}", flush=True)
            failed += code != 0
            if args.commit and code == 0:
                commit(args.commit, f"Result: {''.join(last)}"[:200])
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
