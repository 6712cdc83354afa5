"""``lightning-lap2 audit``: the audit of a training that is described like one for LightningCLI."""

from __future__ import annotations

import json
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_lap2.audit.auditing import Method, audit
from lightning_lap2.audit.bench import QUIET, Training
from lightning_lap2.audit.canaries import CanaryKind
from lightning_lap2.audit.plots import plot
from lightning_lap2.audit.result import AuditResult

DESCRIPTION = """An empirical lower bound on epsilon for your own model and data.

The config names model, data, privacy and trainer as for LightningCLI; privacy holds the arguments of Lap2Privacy:

  model: {class_path: my_package.MyModule, init_args: {...}}
  data: {class_path: my_package.MyDataModule}
  privacy: {eps: 3.0, delta: 1.0e-5}
  trainer: {max_epochs: 30}

Examples:
  lightning-lap2 audit --config audit.yaml
  lightning-lap2 audit --config audit.yaml --method many_runs --runs 1000
  lightning-lap2 audit --config audit.yaml --canary mislabelled --canaries 200

Exit status: 0 where the claim is not refuted, 1 where the lower bound is above the claimed epsilon, 2 on an error.
Modules are looked for in the current folder too."""

REFUTED, FAILED = 1, 2


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise SystemExit(_fail(message))


def build_parser() -> ArgumentParser:
    import lightning.pytorch as pl

    from lightning_lap2.lightning import Lap2Privacy

    parser = _Parser(prog="lightning-lap2 audit", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")
    parser.add_argument(
        "--method",
        type=Method,
        default="one_run",
        help="one_run: many canaries in one training, all guessed (default); many_runs: error rates over many "
        "trainings with Clopper-Pearson limits",
    )
    parser.add_argument(
        "--canary",
        type=CanaryKind | None,
        default=None,
        help="one_coordinate, even_spread, gradient (both): white box; mislabelled: black box (default: one_coordinate "
        "for one_run, gradient for many_runs)",
    )
    parser.add_argument("--runs", type=int | None, default=None, help="trainings (default: 1 or 1000 by method)")
    parser.add_argument("--canaries", type=int | None, default=None, help="canaries in each training (default: chosen)")
    parser.add_argument("--confidence", type=float, default=0.999, help="that the result is a lower bound, in (0, 1)")
    parser.add_argument(
        "--delta", type=float | None, default=None, help="audit the claim at this delta (default: that of privacy)"
    )
    parser.add_argument("--guesses", type=int | None, default=None, help="of one_run (default: seven are tried)")
    parser.add_argument(
        "--holdout", type=float, default=0.3, help="part of many runs that only chooses canary and threshold, in (0, 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of coins, noise, draws and initial weights, >= 0")
    parser.add_argument(
        "--plot", type=str | None, default="audit.png", help="picture to write (.png, .svg, .pdf); null for none"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_subclass_arguments(pl.LightningModule, "model", required=True, help="the LightningModule")
    parser.add_subclass_arguments(
        pl.LightningDataModule,
        "data",
        required=False,
        help="the LightningDataModule; without one the module's train_dataloader is used",
    )
    parser.add_class_arguments(Lap2Privacy, "privacy", skip={"noise_seed"}, instantiate=False)
    parser.add_class_arguments(
        pl.Trainer, "trainer", skip={*QUIET, "callbacks", "barebones", "profiler", "plugins"}, instantiate=False
    )
    parser.set_defaults({"trainer.devices": 1})
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lightning-lap2 audit argv`` and returns the exit status."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    parser = build_parser()
    try:
        config = parser.parse_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    try:
        result = _run(parser, config)
    except (TypeError, ValueError, RuntimeError) as error:
        return _fail(str(error))
    print(json.dumps(result.to_dict()) if config.json else result)
    if config.plot:
        _plot(result, config.plot, quiet=config.json)
    if result.violated:
        print(
            f"lightning-lap2: the training is not ({result.claimed_epsilon:.6g}, {result.delta:g})-differentially"
            f" private: an attack shows epsilon >= {result.epsilon:.4g} at confidence {result.confidence:g}",
            file=sys.stderr,
        )
        return REFUTED
    return 0


def _run(parser: ArgumentParser, config: Namespace) -> AuditResult:
    def model() -> Any:
        return parser.instantiate(Namespace(model=config.model.clone())).model

    training = Training(
        model=model,
        loader=_loader(parser, config, model),
        privacy=config.privacy.as_dict(),
        trainer=config.trainer.as_dict(),
    )
    told = ("method", "canary", "runs", "canaries", "confidence", "delta", "guesses", "holdout", "seed")
    with progress_bar("audit") as progress:
        return audit(training, progress=progress, **{name: config[name] for name in told})


def _loader(parser: ArgumentParser, config: Namespace, model: Callable[[], Any]) -> Any:
    """The train loader of the data module, or of the module."""
    if config.get("data") is not None:
        source = parser.instantiate(Namespace(data=config.data.clone())).data
    else:
        source = model()
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()


def _plot(result: AuditResult, path: str, *, quiet: bool) -> None:
    """The result stands without its picture: a failure is said, and is no failure of the audit."""
    try:
        written = plot(result, path)
    except (ImportError, ValueError, OSError) as error:
        print(f"lightning-lap2: warning: no plot: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"plot                 {written}")


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr that is told the fraction done."""
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(desc=name, total=1.0, bar_format=form, file=sys.stderr, mininterval=1.0) as bar:

        def progress(fraction: float) -> None:
            bar.update(min(1.0, fraction) - bar.n)

        yield progress


def _fail(message: str) -> int:
    print(f"lightning-lap2: error: {' '.join(message.split())}", file=sys.stderr)
    return FAILED
