"""What both fine-tuning examples share: a cache for the frozen part, the arguments, one run and its row of results."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from lightning.pytorch.loggers import TensorBoardLogger
from steptime import StepTime
from torch.utils.data import DataLoader

from lightning_lap2 import Lap2Privacy


def cached(path: str | None, key: list[Any], compute: Callable[[], Any]) -> Any:
    """``compute()``, or what an earlier run with the same ``key`` left in the file."""
    if path and Path(path).exists():
        found = torch.load(path, weights_only=True)
        if found["key"] != key:
            raise ValueError(f"{path} was made with {found['key']}, not {key}: delete it, or name another file")
        return found["value"]
    value = compute()
    if path:
        torch.save({"key": key, "value": value}, path)
    return value


def common_arguments(parser: ArgumentParser, **defaults: Any) -> None:
    """Those of both fine-tuning examples."""
    parser.add_argument("--private", action=ActionYesNo(no_prefix="no-"), default=True, help="or plain Lightning")
    parser.add_argument("--eps", type=float, default=1.0, help="the privacy budget")
    parser.add_argument("--delta", type=float, default=1e-5, help="below 1/N")
    parser.add_argument("--mechanism", type=Literal["laplace", "gaussian"], default="laplace")
    parser.add_argument("--steps", type=int, default=defaults["steps"], help="the noise is calibrated for these")
    parser.add_argument("--batch-size", type=int, default=defaults["batch_size"], help="expected: q = this / N")
    parser.add_argument("--max-grad-norm", type=float, default=defaults["max_grad_norm"], help="C")
    parser.add_argument("--lr", type=float, default=defaults["lr"])
    parser.add_argument("--engine", type=Literal["vmap", "ghost", "loop"], default=defaults["engine"])
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights; the noise ignores it")
    parser.add_argument("--out", type=str, default="runs", help="folder for the TensorBoard log and the report")
    parser.add_argument("--csv", type=str, default=None, help="append a row of results to this file")
    parser.add_argument("--cache", type=str, default=None, help="file for the output of the frozen part")


def fit(name: str, model: L.LightningModule, train: DataLoader, test: DataLoader, args: Namespace) -> dict[str, Any]:
    """Trains, tests, prints and returns the results."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*module.* in eval mode at the start of training.*")  # as intended: frozen
    names = ("eps", "delta", "max_grad_norm", "mechanism", "engine")
    privacy = Lap2Privacy(**{name: getattr(args, name) for name in names}) if args.private else None
    clock = StepTime()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=args.steps,
        max_epochs=-1,
        callbacks=[clock, *([privacy] if privacy else [])],
        logger=TensorBoardLogger(args.out, name=name),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train)
    row = {
        "mechanism": args.mechanism if privacy else "none",
        "eps": args.eps if privacy else float("inf"),
        "epsilon spent": privacy.epsilon if privacy else float("inf"),
        "noise multiplier": privacy.noise_multiplier if privacy else 0.0,
        "n": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": trainer.global_step,
        "seconds per step": clock.seconds,
        "accuracy": trainer.test(model, test, verbose=False)[0]["accuracy"],
        **{name: args[name] for name in ("batch_size", "max_grad_norm", "lr", "engine", "seed")},
    }
    for key, value in row.items():
        print(f"{key:17} {value:.6g}" if isinstance(value, float) else f"{key:17} {value}")
    print(f"{'report':17} {trainer.log_dir}/privacy_report.md" if privacy else "no privacy report: a plain run")
    if args.csv:
        new = not Path(args.csv).exists()
        with Path(args.csv).open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writerows([dict(zip(row, row, strict=True)), row] if new else [row])
    return row
