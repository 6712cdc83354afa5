"""What the experiments on pretrained networks and on language share: their flags, a resumable sweep, one fit."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import _path  # noqa: F401
import lightning as L
from data import Rows
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from recording import ACCOUNTING, ClippingName, Results, parser, versions
from torch.utils.data import DataLoader

from lightning_lap2 import Lap2Privacy

Row = dict[str, Any]
SETTINGS = ("delta", "batch_size", "max_grad_norm", "clipping", "lr", "averaging", "subset")


def flags(description: str, *, eps: Sequence[float], csv_name: str, **defaults: Any) -> ArgumentParser:
    """Those of every experiment of this kind; ``defaults`` gives steps, batch_size, max_grad_norm, lr, averaging."""
    out = parser(description, eps=eps, csv_name=csv_name)
    out.add_argument("--private", action=ActionYesNo(no_prefix="no-"), default=True, help="or plain Lightning")
    out.add_argument("--steps", type=int, default=defaults["steps"], help="the noise is calibrated for so many")
    out.add_argument("--max-steps", type=int, default=None, help="plan at most these (for small machines)")
    out.add_argument("--subset", type=int, default=None, help="train on so many records (for small machines)")
    out.add_argument("--batch-size", type=int, default=defaults["batch_size"], help="expected: q = this / N")
    out.add_argument("--physical-batch", type=int, default=None, help="of one backward; accumulated to --batch-size")
    out.add_argument("--max-grad-norm", type=float, default=defaults["max_grad_norm"], help="C, in l2 norm")
    out.add_argument("--clipping", type=ClippingName, default="flat", help="flat, automatic, per_layer or adaptive")
    out.add_argument("--lr", type=float, default=defaults["lr"])
    out.add_argument(
        "--averaging", type=float, default=defaults["averaging"], help="decay of the weights' moving average"
    )
    out.add_argument(
        "--engine",
        type=Literal["auto", "ghost", "vmap", "loop"],
        default="auto",
        help="auto: ghost, and vmap for laplace_l1, whose l1 norms ghost does not compute",
    )
    return out


def sweep(args: Namespace, settings: Row, run: Callable[[str, float, int], Row]) -> list[Row]:
    """``run(mechanism, eps, seed)`` for all that the CSV file lacks; every row that was asked for, old and new.

    Args:
        settings: what tells this experiment's runs apart, beside the common flags; becomes columns.
        run: trains, and returns the columns of results.
    """
    if args.batch_size % (args.physical_batch or args.batch_size):
        raise ValueError(f"--batch-size {args.batch_size} is no multiple of --physical-batch {args.physical_batch}")
    quiet(args.progress)
    results, asked = Results(Path(args.csv)), []
    runs = [(m, eps, seed) for m in args.mechanism for eps in args.eps for seed in args.seeds]
    for number, (mechanism, eps, seed) in enumerate(runs if args.private else plain(args.seeds), start=1):
        common = {name: args[name] for name in SETTINGS}
        common |= {"planned_steps": planned(args), "accounting": ACCOUNTING}
        key = {**settings, "mechanism": mechanism, "eps": eps, "seed": seed, **common}
        asked.append(key)
        title = f"[{number}] {settings['experiment']} {mechanism} eps={eps:g} seed={seed}"
        if results.has(key):
            print(f"{title}: in {args.csv} already")
            continue
        print(f"{title}: {planned(args)} steps ...", flush=True)
        start, busy = time.perf_counter(), time.process_time()
        L.seed_everything(seed, verbose=False)
        found = run(mechanism, eps, seed)
        used = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        results.add({**key, **found, **used, "versions": versions()})
        print(f"{title}: {', '.join(f'{name} {shown(value)}' for name, value in found.items())}", flush=True)
    return [row for key in asked if (row := results.find(key))]


def plain(seeds: Sequence[int]) -> list[tuple[str, float, int]]:
    return [("none", math.inf, seed) for seed in seeds]


def quiet(progress: bool) -> None:
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec|not resumable).*")
    warnings.filterwarnings("ignore", ".*module.* in eval mode at the start of training.*")  # frozen, as intended
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO if progress else logging.ERROR)


def planned(args: Namespace) -> int:
    return args.steps if args.max_steps is None else min(args.steps, args.max_steps)


def shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def held_out(rows: Rows, number: int) -> tuple[Rows, Rows]:
    """All but the last ``number`` training records, and those: settings are chosen on records, not on a test set."""
    return Rows(rows.images[:-number], rows.labels[:-number]), Rows(rows.images[-number:], rows.labels[-number:])


def clipping_norm(mechanism: str, max_grad_norm: float, dimension: int) -> float:
    """C for the mechanism's own norm.

    For l1 clipping it is ``C sqrt(2 n / pi)``: about the l1 norm of a vector of n independent normal coordinates whose
    l2 norm is C, so that both clip alike where gradients are spread evenly.
    """
    return max_grad_norm * math.sqrt(2 * dimension / math.pi) if mechanism == "laplace_l1" else max_grad_norm


def privacy_for(
    args: Namespace, mechanism: str, eps: float, dimension: int, augmentations: int = 1
) -> Lap2Privacy | None:
    """The callback; ``None`` for the run without privacy."""
    if mechanism == "none":
        return None
    engine = args.engine
    if engine == "auto":
        engine = "vmap" if mechanism == "laplace_l1" else "ghost"
    norm = clipping_norm(mechanism, args.max_grad_norm, dimension)
    options = {"mechanism": mechanism, "engine": engine, "clipping": args.clipping}
    return Lap2Privacy(eps, args.delta, norm, augmentations=augmentations, **options)


def averaged(decay: float) -> list[L.Callback]:
    """What averages the weights while they are trained; nothing for a decay of 0.

    Raises:
        ValueError: Lightning is too old to average weights.
    """
    if not decay:
        return []
    if not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"):
        raise ValueError(f"averaging={decay} needs Lightning 2.6, but this is {L.__version__}; use averaging=0")
    return [L.pytorch.callbacks.EMAWeightAveraging(decay=decay)]


def fit(
    model: L.LightningModule,
    train: DataLoader[Any],
    args: Namespace,
    mechanism: str,
    eps: float,
    validation: DataLoader[Any] | None = None,
    *,
    augmentations: int = 1,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> Row:
    """Trains for the planned steps; the columns that say what was spent. ``options`` are the Trainer's."""
    dimension = sum(p.numel() for p in model.parameters() if p.requires_grad)
    privacy = privacy_for(args, mechanism, eps, dimension, augmentations)
    trainer = L.Trainer(
        max_steps=planned(args),
        max_epochs=-1,
        accumulate_grad_batches=args.batch_size // (args.physical_batch or args.batch_size),
        callbacks=[*([privacy] if privacy else []), *averaged(args.averaging), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=args.progress,
        enable_model_summary=False,
        **options,
    )
    start = time.perf_counter()
    trainer.fit(model, train, validation)
    return {
        "train_records": len(train.dataset),
        "dimension": dimension,
        "steps": trainer.global_step,
        "epsilon": privacy.epsilon if privacy else math.inf,
        "noise_multiplier": privacy.noise_multiplier if privacy else 0.0,
        "clipping_norm": privacy.max_grad_norm if privacy else math.inf,
        "fit_seconds": time.perf_counter() - start,
    }


def summary(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """A Markdown table: for each mechanism and eps the mean over seeds (smallest to largest)."""
    lines = [f"| mechanism | eps | runs | {' | '.join(metrics)} |", f"|{'---|' * (3 + len(metrics))}"]
    for pair in dict.fromkeys((row["mechanism"], row["eps"]) for row in rows):
        chosen = [row for row in rows if (row["mechanism"], row["eps"]) == pair]
        cells = [spread([float(row[metric]) for row in chosen if row[metric] != ""]) for metric in metrics]
        lines.append(f"| {' | '.join(pair)} | {len(chosen)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """``mean (smallest to largest)``."""
    if not values:
        return ""
    return f"{sum(values) / len(values):.5g} ({min(values):.5g} to {max(values):.5g})"
