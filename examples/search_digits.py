"""Search hyperparameters of the digits example with the price of the search inside epsilon.

    python examples/search_digits.py
    python examples/search_digits.py --mean-runs 30 --distribution poisson

The held-out digits play the part of public data: half of them score the runs, the other half judges the best one,
beside the choice that examples/digits.py makes by hand, trained with all of epsilon (as if that choice were free).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from data import Rows, digits, loader
from digits import Digits
from jsonargparse import ArgumentParser

from lightning_lap2 import Lap2Privacy
from lightning_lap2.selection import PrivateSearch

SPACE = {
    "hidden": [16, 32, 64],
    "lr": [0.005, 0.01, 0.02, 0.05],
    "batch_size": [128, 256, 512],
    "epochs": [15, 30, 60],
    "privacy.max_grad_norm": [0.3, 1.0, 3.0],
}
BY_HAND = {"hidden": 32, "lr": 0.02, "batch_size": 256, "epochs": 30}


def fit(config: dict[str, Any], privacy: Lap2Privacy, train: Rows, folder: Any = None) -> Digits:
    """One private training; it writes nothing but checkpoints, and those to ``folder``."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=config["epochs"],
        callbacks=[privacy],
        default_root_dir=folder,
        enable_checkpointing=folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(hidden=config["hidden"], lr=config["lr"])
    trainer.fit(model, loader(train, config["batch_size"], shuffle=True))
    return model


def accuracy(model: Digits, rows: Rows) -> float:
    with torch.no_grad():
        return (model.net(rows.images).argmax(dim=1) == rows.labels).float().mean().item()


def halves(rows: Rows) -> tuple[Rows, Rows]:
    middle = len(rows) // 2
    return Rows(rows.images[:middle], rows.labels[:middle]), Rows(rows.images[middle:], rows.labels[middle:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="A private search on the digits, against a choice made by hand.")
    parser.add_argument("--eps", type=float, default=3.0, help="of the whole search")
    parser.add_argument("--delta", type=float, default=1e-4, help="below 1/N; N is 1,437 here")
    parser.add_argument("--mean-runs", type=float, default=10.0, help="expected number of runs")
    parser.add_argument("--distribution", type=str, default="negative_binomial", help="or poisson")
    parser.add_argument("--shape", type=float, default=1.0, help="of the negative binomial: 0 logarithmic, 1 geometric")
    parser.add_argument("--out", type=str, default="digits_search", help="folder for the state and the result")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec).*")
    train, held_out = digits()
    scoring, judging = halves(held_out)

    def run(config: dict[str, Any], privacy: Any) -> float:
        return accuracy(fit(config, privacy, train, privacy.folder), scoring)

    search = PrivateSearch(
        eps=args.eps,
        delta=args.delta,
        mean_runs=args.mean_runs,
        distribution=args.distribution,
        shape=args.shape,
        folder=args.out,
        plan={"sample_rate": 256 / len(train), "steps": 180, "dimension": 2410},
    )
    best = search.run(run, SPACE)
    by_hand = fit(BY_HAND, Lap2Privacy(args.eps, args.delta), train)
    print(f"\n             accuracy   (epsilon {args.eps:g} each, {len(judging)} digits that scored no run)")
    print(f"    by hand    {accuracy(by_hand, judging):6.1%}   {BY_HAND}, its choice not paid for")
    if best is None:
        print("    searched        -   the Poisson distribution gave no run")
        return
    state = torch.load(best.checkpoints[-1], weights_only=True)["state_dict"]
    found = Digits(hidden=best.config["hidden"])
    found.load_state_dict(state)
    print(f"    searched   {accuracy(found, judging):6.1%}   {best.config}")
    print(f"\nreport   {os.path.join(args.out, 'search_report.md')}")


if __name__ == "__main__":
    main()
