"""Constructor arguments, Trainer flags, modules and data in random combination: each trains soundly or is refused.

``python -m tests.settings.fuzz --examples 2000`` is the long form of ``test_fuzz.py``; it goes on after a failure and
prints each kind of failure once, with the case that showed it.

What is asked of one case:

* an exception of ours is a ``TypeError``, ``ValueError`` or :class:`UnsupportedModelError` that names a setting of the
  case, and comes before the first release;
* any other exception is one that the same case without our callback raises too;
* a fit that was accepted releases as often as plain Lightning steps (or as the budget affords), within eps; every
  coordinate of every release carries noise; frozen parameters keep their bits; report and ledger agree; nothing stays
  patched.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from scipy.stats import binom

import lightning_lap2
from lightning_lap2.gradients import UnsupportedModelError
from tests.helpers import LIGHTNING, quiet_trainer, watched_releases
from tests.settings.fuzz_build import Fuzzed, make_loader, pl
from tests.settings.fuzz_cases import Case, cases, constructors

PACKAGE = str(Path(lightning_lap2.__file__).parent)
# What a message calls a setting of a case, where not by the name that the case gives it.
ALIASES: dict[str, tuple[str, ...]] = {
    "precision": ("precision", "float16", "bfloat16"),
    "limit_train_batches": ("limit_train_batches",),
    "max_steps": ("max_steps",),
    "max_epochs": ("max_epochs",),
    "kind": ("trainable parameters", "LazyLinear", "GRU", "sparse", "Embedding", "no loss", "parameter"),
    "trainable": ("trainable parameters",),
    "extra": ("BatchNorm", "float16", "complex", "calls", "buffer", "extra", "float64", "Dropout"),
    "output": ("training_step", "loss"),
    "optimizer": ("LBFGS", "optimizer", "ReduceLROnPlateau"),
    "logs": ("log", "metric"),
    "size": ("examples", "N=", "num_examples", "empty"),
    "batch_size": ("batch_size", "batch"),
    "drop_last": ("drop_last", "batch"),
    "batch": ("batch", "list", "string"),
    "order": ("sampler", "Sampler", "IterableDataset", "train loaders", "batch_sampler", "data set"),
    "dtype": ("float64", "double", "dtype"),
    "poison": ("finite", "mixes"),
}


class Escape(AssertionError):
    """The case shows a fault of the library."""


def construct(arguments: dict[str, Any]) -> Any:
    """The callback, or ``None`` where it was refused as it should be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bound="published" warns
            callback = LIGHTNING.lap2(**{"eps": 1.0, **arguments})
    except (TypeError, ValueError) as error:
        if not any(name in str(error) for name in arguments):
            raise Escape(f"the refusal names no argument of {arguments}: {error!r}") from error
        return None
    except Exception as error:
        raise Escape(f"{error!r} escaped from the constructor for {arguments}") from error
    state = callback.state_dict()
    json.dumps(state)
    assert math.isfinite(callback.delta) and callback.max_grad_norm > 0
    return callback


def run(case: Case) -> str:
    """What became of the case: ``"trained"``, ``"refused"``, ``"plain"`` (fails without us, too) or ``"invalid"``.

    Raises:
        Escape: neither sound nor refused by name.
    """
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        return _run(case)


def _run(case: Case) -> str:
    callback = construct(case["arguments"])
    if callback is None:
        return "refused"
    try:
        trainer = _trainer(case, callback)
    except Exception:
        return "invalid"  # Lightning's own constructor refuses the flags
    torch.manual_seed(0)
    module = Fuzzed(case["module"])
    data = make_loader(case["data"], case["module"])
    before = {name: p.detach().clone() for name, p in module.named_parameters() if not _lazy(p)}
    with watched_releases() as seen:
        try:
            trainer.fit(module, data)
        except Exception as error:
            _judge(case, error, len(seen))
            _check_undone(trainer)
            return "refused" if _ours(error) else "plain"
    _check_undone(trainer)
    _check_trained(case, callback, trainer, module, before, seen)
    return "trained"


def _trainer(case: Case, *callbacks: Any) -> Any:
    flags = {"max_epochs": 2, **case["flags"]}
    if flags.get("barebones"):
        for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            flags[name] = None
    return quiet_trainer(pl, *callbacks, **flags)


def _lazy(parameter: Any) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)


def _ours(error: BaseException) -> bool:
    """Whether our own code raised it, on purpose."""
    if not isinstance(error, (TypeError, ValueError, UnsupportedModelError)):
        return False
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)


def _judge(case: Case, error: Exception, releases: int) -> None:
    if not _ours(error):
        alone = _plain_error(case)
        if type(alone) is not type(error):
            raise Escape(f"{error!r} escaped; without the callback: {alone!r}") from error
        return
    if releases:
        raise Escape(f"refused after {releases} releases: {error!r}") from error
    names = {name for part in case.values() for key in part for name in (*ALIASES.get(key, ()), key)}
    if not any(name in str(error) for name in names):
        raise Escape(f"the refusal names no setting of the case: {error!r}") from error


def _plain_error(case: Case) -> Exception | None:
    try:
        _plain_steps(case)
    except Exception as error:
        return error
    return None


def _plain_steps(case: Case) -> int:
    """Optimizer steps that Lightning takes without us."""
    trainer = _trainer(case)
    torch.manual_seed(0)
    trainer.fit(Fuzzed(case["module"]), make_loader(case["data"], case["module"]))
    return trainer.global_step


def _check_undone(trainer: Any) -> None:
    loops = (trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop)
    patched = {"training_step", "process_dataloader", "setup_data", "on_run_start", "all_gather"}
    left = patched & {name for owner in loops for name in vars(owner)}
    if left:
        raise Escape(f"patches were left: {left}")


def _check_trained(
    case: Case, callback: Any, trainer: Any, module: Any, before: dict[str, torch.Tensor], seen: list[Any]
) -> None:
    steps = callback.steps
    _equal("releases and steps", len(seen), steps)
    if callback._account.facts is None:  # Lightning had nothing to train on: no plan was made
        _equal("steps without a plan", steps, 0)
        _check_length(case, callback)
        return
    if case["module"].get("output") != "none":  # plain Lightning does not count steps on None as we do
        _equal("steps and global_step", steps, trainer.global_step)
    _equal("steps and planned_steps", steps, callback.planned_steps)
    spent = callback.accountant.epsilon(delta=callback.delta)
    if spent > callback.eps:
        raise Escape(f"spent {spent} of {callback.eps}")
    _check_length(case, callback)
    _check_report(callback, spent)
    scale = callback.scale
    for release in seen:
        if not torch.isfinite(release.after).all():
            raise Escape("a release is not finite")
        if release.scale != scale:
            raise Escape(f"noised with {release.scale}, charged {scale}")
        moved = release.after != (release.before / callback.expected_batch_size)
        # releases lie on a grid of 64 cells per scale: where a gradient is exactly 0, noise may round to 0 as well
        if scale > 0 and int((~moved).sum()) > binom.isf(1e-9, moved.numel(), 1 / 64):
            raise Escape(f"{int((~moved).sum())} of {moved.numel()} coordinates of a release carry no noise")
    for name, parameter in module.named_parameters():
        same = torch.equal(parameter.detach().cpu(), before[name].to(parameter.dtype)) if name in before else False
        if not parameter.requires_grad and not same:
            raise Escape(f"the frozen parameter {name} moved")


def _check_length(case: Case, callback: Any) -> None:
    """As many releases as plain Lightning makes steps; fewer only where one more would overspend."""
    try:
        plain = _plain_steps(case)
    except Exception:
        return  # what plain training cannot do (no gradient, say) we may
    if callback.steps == plain or case["module"].get("output") == "none":
        return
    if callback.settings.noise_multiplier is None or callback.steps > plain:
        raise Escape(f"{callback.steps} releases, plain Lightning takes {plain} steps")
    further = callback.accountant.copy()
    further.step(
        noise_multiplier=callback.noise_multiplier, sample_rate=callback.sample_rate, dimension=callback.dimension
    )
    if further.epsilon(delta=callback.delta) <= callback.eps:
        raise Escape(f"stopped after {callback.steps} of {plain} steps with budget left for another")


def _check_report(callback: Any, spent: float) -> None:
    report = callback.report()
    content = report.to_dict()
    json.dumps(content, allow_nan=False)
    str(report)
    _equal("epsilon in the report", report.epsilon, spent)
    _equal("steps in the report", report.steps, callback.steps)
    _equal("scale in the report", report.scale, callback.scale)
    _equal("n in the report", report.dimension, callback.dimension)
    if callback.settings.sampling == "poisson":
        _equal("q", report.sample_rate, report.expected_batch_size / report.num_examples)
        _equal("charges", callback.accountant.steps, callback.steps)
    state = callback.state_dict()
    again = LIGHTNING.lap2(
        eps=callback.eps,
        noise_multiplier=callback.settings.noise_multiplier,
        max_grad_norm=callback.max_grad_norm,
        delta=callback.delta,
        mechanism=callback.settings.mechanism,
        bound=callback.settings.bound,
        sampling=callback.settings.sampling,
    )
    again.load_state_dict(json.loads(json.dumps(state)))
    if again.accountant != callback.accountant:
        raise Escape("the ledger does not survive its own state")


def _equal(what: str, here: Any, there: Any) -> None:
    if here != there:
        raise Escape(f"{what}: {here} is not {there}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000, help="fits; ten times as many constructions")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    failures: dict[str, Any] = {}
    deadline = time.monotonic() + options.seconds
    long = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}

    def noting(case: Any, function: Any) -> None:
        if time.monotonic() > deadline:
            return
        try:
            found[str(function(case))] += 1
        except Exception as error:
            found["FAILED"] += 1
            kind = f"{type(error).__name__}: {str(error)[:100]}"
            if kind not in failures:
                failures[kind] = case
                print(f"FAILED {error!r:.1500}\n  {case}", flush=True)

    @settings(max_examples=10 * options.examples, **long)
    @given(constructors)
    def constructions(arguments: dict[str, Any]) -> None:
        noting(arguments, lambda case: "constructed" if construct(case) else "refused in the constructor")

    @settings(max_examples=options.examples, **long)
    @given(cases())
    def fits(case: Case) -> None:
        noting(case, run)

    constructions()
    fits()
    print(dict(found), f"{len(failures)} kinds of failure")
    sys.exit(bool(failures))


if __name__ == "__main__":
    import logging

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    main(sys.argv[1:])
