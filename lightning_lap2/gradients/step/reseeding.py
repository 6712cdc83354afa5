"""Seeding random generators, or asking for their state, inside a step: refused.

Every example draws from secret, independent random numbers, so that one more record shifts nobody's. A step that
reseeds makes them known, one that keeps a state hands it from one example to the next. A generator that the step
makes for itself is fine if its seed comes from the example (or is a constant).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.step.replacing import Replacements

# torch's own code may save and restore states (checkpoints do), and so does the private seeding
_TRUSTED = ("torch.", "lightning_lap2.")
_NAMES: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (torch, "torch", ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")),
    (
        torch.random,
        "torch.random",
        ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng"),
    ),
    (
        torch.cuda,
        "torch.cuda",
        ("manual_seed", "manual_seed_all", "seed", "seed_all", "get_rng_state", "set_rng_state"),
    ),
    (np.random, "numpy.random", ("seed", "get_state", "set_state")),
    (random, "random", ("seed", "getstate", "setstate")),
)


def _refusing(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if f"{caller}.".startswith(_TRUSTED) or caller == "contextlib":
            return function(*args, **kwargs)
        raise UnsupportedModelError(
            f"training_step (or what it calls) uses {path}: random numbers would be known, or carry one example to the "
            "next. Private training gives each example secret random numbers of its own; draw from the generators as "
            "they are, or from one that the step makes anew with a seed that comes from the example"
        )

    return refuse


reseeding_refused = Replacements(
    [(owner, name, partial(_refusing, f"{path}.{name}")) for owner, path, names in _NAMES for name in names]
).active
"""Inside, the global generators can be drawn from and nothing else; what else is called, raises
:class:`UnsupportedModelError` in the user's code, naming the function."""
