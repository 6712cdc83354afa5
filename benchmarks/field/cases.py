"""What a package is, and what one way of training a model of it is."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TORCH = ("torch==2.13.0",)
TORCH_WITH_VISION = ("torch==2.14.1", "torchvision==0.29.1")


@dataclass(frozen=True)
class Run:
    """One fit, as a case is asked for it.

    Attributes:
        callbacks: for the package's own argument. A plain fit has them, too: they take times.
        batch_size: of the train loader.
        max_steps: optimizer steps; a case may give whole epochs of at least as many.
        compares: whether gradients are compared. Where a network has millions of kinks, a case may then train in
            float64: in float32 two ways to compute one activation may fall on two sides of one.
    """

    callbacks: list[Any]
    batch_size: int
    max_steps: int
    compares: bool = False


@dataclass(frozen=True)
class Case:
    """One model of a package.

    Attributes:
        model: its name; with the package's it names the file of results.
        fit: builds data, model and trainer as the package's documentation does, and trains. Small: a few seconds.
        wrote: what the user had to write for it, as Markdown.
        records: how many training records ``fit`` makes. The gradients are compared with all of them in one batch.
        batch_size: of the fits that are timed.
        refused: a regular expression for the message, where a refusal is the right outcome.
        compared: whether gradients can be compared with the plain ones, record by record.
        why_not: why they are not.
        options: further arguments of ``Lap2Privacy``.
    """

    model: str
    fit: Callable[[Run], Any]
    wrote: str
    records: int
    batch_size: int = 8
    refused: str | None = None
    compared: bool = True
    why_not: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """A package and its cases.

    Attributes:
        name: its distribution on the registry, whose version is reported.
        environment: packages of one environment are installed together.
        requires: requirements for pip.
        cases: in the order of the page.
        namespace: Lightning's namespace that the package uses.
        torch: what is installed first.
        notes: what is said below the table, as Markdown.
    """

    name: str
    environment: str
    requires: Sequence[str]
    cases: Sequence[Case]
    namespace: str = "lightning"
    torch: Sequence[str] = TORCH
    notes: str = ""

    def case(self, model: str) -> Case:
        return next(case for case in self.cases if case.model == model)


def packages() -> dict[str, Package]:
    """All packages by name: those of the modules in ``benchmarks.field.packages``."""
    home = importlib.import_module("benchmarks.field.packages")
    modules = [
        importlib.import_module(f"{home.__name__}.{found.name}") for found in pkgutil.iter_modules(home.__path__)
    ]
    return {module.PACKAGE.name: module.PACKAGE for module in modules}
