"""What is varied in :mod:`tests.settings.fuzz`: arguments, Trainer flags, modules and data, right and wrong.

A case is plain values only, so that hypothesis can print and shrink it.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

Case = dict[str, dict[str, Any]]

ANYTHING = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        10**400,
        0.0,
        -0.0,
        0.5,
        2.5,
        -3.5,
        5e-324,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
        "",
        "inf",
        "1.0",
        "vmap",
        "none",
        "tight",
        b"vmap",
        1 + 2j,
        Decimal("1.5"),
        Fraction(3, 2),
        np.float32(1.5),
        np.float64("nan"),
        np.int64(3),
        np.bool_(True),
        np.array([1.0, 2.0]),
        torch.tensor(1.5),
        torch.tensor([1.0, 2.0]),
        [],
        [1.0],
        (2,),
        {"a": 1},
        {1},
        object(),
        float,
        lambda: 1.0,
    ]
)

ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "eps": st.sampled_from([0.3, 2.0, 2, 40.0, 1e6, math.inf, "inf", Fraction(5, 2), np.float64(3.0)]),
    "delta": st.sampled_from([1e-5, 1e-3, 1e-40, 0.2, np.float64(1e-6)]),
    "max_grad_norm": st.sampled_from([1.0, 1, 1e-3, 50.0, 1e-20, 1e25, 1e-44, 3e38, 1e300, math.inf, np.float32(0.1)]),
    "noise_multiplier": st.sampled_from([None, 0.0, 0.4, 1.5, 3, 1e-30, 1e30, 1e300, np.float32(2.0)]),
    "mechanism": st.sampled_from(["laplace", "gaussian", "laplace_l1"]),
    "bound": st.sampled_from(["tight", "joint", "published"]),
    "sampling": st.sampled_from(["poisson", "none"]),
    "engine": st.sampled_from(["vmap", "ghost", "loop"]),
    "chunk_size": st.sampled_from([None, 1, 3, 10**9, np.int64(2)]),
    "noise_source": st.sampled_from(["auto", "aes", "torch"]),
    "noise_seed": st.sampled_from([None, 0, 7, 10**30, np.int64(5)]),
    "augmentations": st.sampled_from([1, 2, np.int64(2)]),
    "assume_nothing_spent": st.booleans(),
    "allow_feedback": st.booleans(),
}

FLAGS: dict[str, st.SearchStrategy[Any]] = {
    "precision": st.sampled_from(["32-true", "bf16-mixed", "bf16-true", "64-true", "16-true", "16-mixed", 64, "bf16"]),
    "accumulate_grad_batches": st.sampled_from([1, 2, 3, 50]),
    "gradient_clip_val": st.sampled_from([0.0, 0.5]),
    "max_steps": st.sampled_from([-1, 0, 1, 3, 7]),
    "max_epochs": st.sampled_from([-1, 0, 1, 2, 3]),
    "min_steps": st.sampled_from([0, 2, 5]),
    "min_epochs": st.sampled_from([0, 1, 2]),
    "limit_train_batches": st.sampled_from([1.0, 0.5, 0.0, 0, 1, 2, 100, 0.01]),
    "limit_val_batches": st.sampled_from([1.0, 0, 1]),
    "overfit_batches": st.sampled_from([0.0, 0, 1, 0.5]),
    "fast_dev_run": st.sampled_from([False, True, 2]),
    "num_sanity_val_steps": st.sampled_from([0, 1, -1]),
    "reload_dataloaders_every_n_epochs": st.sampled_from([0, 1, 2]),
    "val_check_interval": st.sampled_from([1.0, 0.5, 1]),
    "check_val_every_n_epoch": st.sampled_from([1, 2]),
    "deterministic": st.sampled_from([True, False, "warn"]),
    "detect_anomaly": st.booleans(),
    "benchmark": st.booleans(),
    "barebones": st.booleans(),
    "use_distributed_sampler": st.booleans(),
    "log_every_n_steps": st.sampled_from([0, 1, 3]),
    "profiler": st.sampled_from([None, "simple"]),
}

MODULE: dict[str, st.SearchStrategy[Any]] = {
    "width": st.integers(1, 5),
    "trainable": st.sampled_from(["all", "first frozen", "nothing"]),
    "extra": st.sampled_from(
        ["unused", "scalar", "empty", "tied", "double", "half", "complex", "nan", "buffer", "batchnorm", "dropout"]
    ),
    "output": st.sampled_from(["mean", "dict", "sum", "none", "no graph", "pairs", "float", "vector"]),
    "optimizer": st.sampled_from(["sgd", "adam", "lbfgs", "two", "no optimizer", "plateau"]),
    "logs": st.sampled_from(["nothing", "loss", "epoch", "metric"]),
}
KINDS = (
    "linear",
    "mlp",
    "conv1d",
    "conv2d",
    "embedding",
    "sparse embedding",
    "norm",
    "attention",
    "gru",
    "lazy",
    "no parameters",
    "raw",
)

DATA: dict[str, st.SearchStrategy[Any]] = {
    "size": st.integers(1, 25),
    "batch_size": st.sampled_from([1, 2, 4, 5, 8, 30, None]),
    "drop_last": st.booleans(),
    "batch": st.sampled_from(["tuple", "dict", "strings", "dataclass", "numpy"]),
    "order": st.sampled_from(
        ["shuffle", "replacement", "weighted", "subset", "own batches", "iterable", "iterable with length", "two"]
    ),
    "dtype": st.sampled_from(["double", "int"]),
    "poison": st.sampled_from(["nan", "inf", "huge"]),
}


def some(strategies: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """At most ``most`` of the keys, each with a value."""
    return st.lists(st.sampled_from(sorted(strategies)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in names})
    )


constructors = some({name: ANYTHING | legal for name, legal in ARGUMENTS.items()}, 3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A fit with a few settings that are not the default, wherever they are."""
    size = draw(st.sampled_from([1, 2, 3]))
    return {
        "arguments": draw(some(ARGUMENTS, size)),
        "flags": draw(some(FLAGS, size)),
        "module": {"kind": draw(st.sampled_from(KINDS)), **draw(some(MODULE, size))},
        "data": draw(some(DATA, size)),
    }
