"""One case in this process: trained plainly, trained privately, and its gradients compared.

``python -m benchmarks.field.run_case PACKAGE MODEL FILE`` writes a :class:`Result` as JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.field.cases import Case, Package, Run, packages

STEPS = 8
TOLERANCE = 1e-4
"""Of gradients in float32, relative to the largest entry."""


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        outcome: ``"trained"``, ``"refused"`` (by this library, with ``message``) or ``"failed"``.
        expected: whether that is what the case says.
        engine: that ran, as the report names it.
        releases: that the callback handed to the package counted; ``None`` where it saw no fit.
        plain, private: median seconds per step.
        load: of the machine over the last minute, when these were measured.
        error: largest error of the released gradient, all records in one batch and no noise, against the sum of plain
            ones; ``None`` where it was not compared.
    """

    package: str
    version: str
    model: str
    wrote: str
    python: str
    torch: str
    lightning: str
    outcome: str
    message: str = ""
    expected: bool = False
    engine: str = ""
    releases: int | None = None
    plain: float | None = None
    private: float | None = None
    load: float | None = None
    error: float | None = None
    not_compared: str = ""


def run(package: Package, case: Case) -> Result:
    import torch

    pl = importlib.import_module({"lightning": "lightning.pytorch"}.get(package.namespace, package.namespace))
    privacy = importlib.import_module(f"lightning_lap2.{package.namespace}")
    from benchmarks.field.watch import watchers, without_noise
    from lightning_lap2.errors import UnsupportedModelError, UnsupportedSettingError

    watch = watchers(pl)
    result = Result(
        package.name, importlib.metadata.version(package.name), case.model, case.wrote, platform.python_version(),
        torch.__version__, pl.__version__, "failed", not_compared=case.why_not,
    )  # fmt: skip

    def fit(*callbacks: Any, batch_size: int = case.batch_size, steps: int = STEPS, compares: bool = False) -> Any:
        torch.manual_seed(0)
        case.fit(Run([*callbacks, watch.times()], batch_size, steps, compares))
        return watch.times.take()

    try:
        result = replace(result, plain=fit())
        callback = privacy.Lap2Privacy(eps=8.0, delta=1e-5, **case.options)
        result = replace(result, private=fit(callback), releases=callback.steps, engine=callback.report().engine)
        result = replace(result, load=os.getloadavg()[0])
        if not callback.steps:
            raise AssertionError("the callback that was handed over counted no release")
        if case.compared:
            exact = privacy.Lap2Privacy(eps="inf", noise_multiplier=0.0, max_grad_norm=1e9, **case.options)
            with without_noise():
                fit(exact, watch.gradients(), batch_size=case.records, steps=1, compares=True)
            result = replace(result, error=watch.gradients.error)
            if watch.gradients.error is None or not watch.gradients.error <= TOLERANCE:
                raise AssertionError(f"gradients are off by {watch.gradients.error}")
        return replace(result, outcome="trained", expected=case.refused is None)
    except Exception as error:
        traceback.print_exc()
        refusals = (UnsupportedModelError, UnsupportedSettingError)
        ours = next((e for e in _chain(error) if isinstance(e, refusals) or _raised_by_us(e)), None)
        if ours is None:
            return replace(result, message=f"{type(error).__name__}: {error}".splitlines()[0])
        as_said = case.refused is not None and re.search(case.refused, str(ours)) is not None
        return replace(result, outcome="refused", message=_anywhere(str(ours)), expected=as_said)


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _raised_by_us(error: BaseException) -> bool:
    """Whether it is an argument error that the library itself raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error) in (TypeError, ValueError) and bool(frames) and "/lightning_lap2/" in frames[-1].filename


def _anywhere(message: str) -> str:
    """Without the folders of this machine."""
    return re.sub(r"/\S*/(?=\S)", "", message)


def main() -> None:
    name, model, path = sys.argv[1:]
    warnings.simplefilter("ignore")
    for each in ("lightning.pytorch", "pytorch_lightning", "lightning_lap2"):
        logging.getLogger(each).setLevel(logging.WARNING)
    package = packages()[name]
    target = Path(path).absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for what packages write
        result = run(package, package.case(model))
    target.write_text(json.dumps(asdict(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
