"""The structure of docs/design.md, held: which package may import which, who knows Lightning, what stays private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import Tensor, nn

import lightning_lap2
from lightning_lap2 import errors
from lightning_lap2.choices import (
    MECHANISMS,
    Bound,
    ClippingName,
    EngineName,
    NoiseSourceName,
    Norm,
    OnRecordError,
    Sampling,
)

ROOT = Path(lightning_lap2.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
GROUND = {"errors", "choices", "_validate", "_registry", "_version", "_lazy", "_progress"}
# what each package, or module at the root, may import beside the ground and itself
ARROWS: dict[str, set[str]] = {
    "accounting": set(),
    "mechanism": {"accounting"},
    "report": set(),
    "noise": {"accounting", "mechanism"},
    "batches": set(),
    "sampling": {"batches"},
    "gradients": {"batches", "mechanism"},
    "figures": {"accounting", "mechanism"},
    "finished": {"accounting", "report"},
    "cli": {"accounting", "report", "figures", "finished"},  # what trains is imported by the command that is called
    "callback": {"accounting", "mechanism", "report", "noise", "batches", "sampling", "gradients"},
    "audit": {"accounting", "report", "noise", "batches", "sampling", "gradients", "figures", "callback"},
    "selection": {"accounting", "report", "batches", "callback"},
    "lightning": {"callback"},
    "pytorch_lightning": {"callback"},
}


def package(file: Path) -> str:
    """The package or root module that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path, *, nested: bool) -> Iterator[tuple[str, list[str]]]:
    """(module, names) that a file imports; ``nested``: inside functions too. Not under ``TYPE_CHECKING``."""
    for node in ast.walk(tree(file)) if nested else tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


def own(module: str, names: list[str]) -> set[str]:
    """Packages of ours that an import reaches."""
    parts = module.split(".")
    if parts[0] != "lightning_lap2":
        return set()
    return {parts[1]} if len(parts) > 1 else set(names)


@pytest.mark.parametrize("name", ARROWS)
def test_arrows_go_one_way(name: str) -> None:
    allowed = ARROWS[name] | GROUND | {name}
    for file in FILES:
        if package(file) == name:
            found = {reached for module, names in imports(file, nested=False) for reached in own(module, names)}
            assert found <= allowed, f"{file.relative_to(ROOT)} imports {sorted(found - allowed)}"


def test_only_the_two_thin_modules_import_lightning_when_they_are_imported() -> None:
    thin = {ROOT / "lightning.py", ROOT / "pytorch_lightning.py"}
    for file in FILES:
        found = {module.split(".")[0] for module, _ in imports(file, nested=False)}
        assert file in thin or not found & {"lightning", "pytorch_lightning"}, file.relative_to(ROOT)


def test_accounting_and_report_know_no_torch() -> None:
    for file in FILES:
        if package(file) in ("accounting", "report", "finished", "mechanism", "figures"):
            found = {module.split(".")[0] for module, _ in imports(file, nested=True)}
            assert not found & {"torch", "lightning", "pytorch_lightning", "torchmetrics"}, file.relative_to(ROOT)


def test_no_private_name_crosses_a_package() -> None:
    for file in FILES:
        for module, names in imports(file, nested=True):
            for reached in own(module, names) - {package(file)} - GROUND:
                hidden = [name for name in (*names, *module.split(".")[1:]) if name.startswith("_")]
                assert not hidden, f"{file.relative_to(ROOT)} takes {hidden} from {reached}"


def where(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', '')}: {ast.unparse(node)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def defined(file: Path) -> frozenset[str]:
    """Private functions, classes and attributes that a file makes."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return frozenset(filter(is_private, found))


@cache
def privates_of_lightning() -> frozenset[str]:
    """Private attributes that Lightning's classes define, but for those that a torch module has too."""
    import lightning

    assert lightning.__file__ is not None
    found: set[str] = set()
    for file in Path(lightning.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    torchs = {*dir(nn.Module()), *dir(Tensor)}
    return frozenset(filter(is_private, found - torchs))


def test_no_private_attribute_crosses_a_package() -> None:
    """An object's private attributes are read and written in the package that its class is in."""
    by_package: dict[str, set[str]] = {}
    for file in FILES:
        by_package.setdefault(package(file), set()).update(defined(file))
    foreign = {*dir(nn.Module()), *dir(Tensor), "_make", "_fields"} | privates_of_lightning()
    for file in FILES:
        others = {name for other, names in by_package.items() if other != package(file) for name in names}
        taken = others - by_package[package(file)] - foreign
        for node in ast.walk(tree(file)):
            assert not (isinstance(node, ast.Attribute) and node.attr in taken), where(file, node)


def test_torchs_private_functorch_is_in_one_file() -> None:
    for file in FILES:
        found = [m for m, _ in imports(file, nested=True) if m.startswith(("torch._C._functorch", "torch._functorch"))]
        assert not found or file == ROOT / "gradients" / "physical.py", file.relative_to(ROOT)
        assert "_C._functorch" not in file.read_text() or file.name == "physical.py", file.relative_to(ROOT)


MECHANISM_NAMES = set(MECHANISMS)


def names_of_choices(node: ast.AST) -> set[str]:
    """Mechanisms, or laws of noise, that an expression compares with or a pattern matches."""
    return {
        found.value
        for found in ast.walk(node)
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and found.value in MECHANISM_NAMES
    }


def test_no_else_decides_among_mechanisms() -> None:
    """A name compared in an ``if`` makes its ``else`` mean all the others, one that is added tomorrow among them."""
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, (ast.If, ast.IfExp)):
                found = names_of_choices(node.test)
                assert not found, f"{file.relative_to(ROOT)}:{node.lineno} decides by {sorted(found)}"


@pytest.mark.parametrize("choice", [Norm, Bound, Sampling, ClippingName, EngineName, NoiseSourceName, OnRecordError])
def test_names_to_choose_among_stand_once(choice: Any) -> None:
    """In choices.py: no other ``Literal``, tuple or list has all of them."""
    names = set(get_args(choice))
    for file in FILES:
        if file.name == "choices.py":
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, (ast.Tuple, ast.List)):
                told = {part.value for part in node.elts if isinstance(part, ast.Constant)}
                assert told != names, f"{file.relative_to(ROOT)}:{node.lineno} lists {sorted(names)} again"


def test_a_match_on_a_choice_ends_in_assert_never() -> None:
    """Or in a pattern that binds the name and uses it: what was registered, or a refusal."""
    everything = {
        name
        for choice in (Norm, Bound, Sampling, ClippingName, EngineName, NoiseSourceName)
        for name in get_args(choice)
    }
    for file in FILES:
        for node in ast.walk(tree(file)):
            if not isinstance(node, ast.Match):
                continue
            literals = {
                part.value for case in node.cases for part in ast.walk(case.pattern) if isinstance(part, ast.Constant)
            }
            if literals and literals <= everything | MECHANISM_NAMES:
                last = node.cases[-1]
                used = {part.id for part in ast.walk(ast.Module(last.body, [])) if isinstance(part, ast.Name)}
                bound = last.pattern.name if isinstance(last.pattern, ast.MatchAs) else None
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                assert "assert_never" in used or bound in used, where


def test_no_circle_of_imports() -> None:
    """Among modules, when they are imported: a package's names are taken from its ``__init__``, or are modules."""
    modules = {
        ".".join(("lightning_lap2", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in FILES
    }
    reached: dict[str, set[str]] = {}
    for name, file in modules.items():
        found = {
            own if (own := f"{module}.{part}") in modules else module
            for module, names in imports(file, nested=False)
            for part in names or [""]
        }
        reached[name] = found & set(modules)
    order = TopologicalSorter(reached)
    order.prepare()  # raises CycleError


def test_only_what_is_exported_is_registered_from_outside() -> None:
    """The registration points of docs/extending.md are public names of their packages."""
    for package, name in [
        ("lightning_lap2", "register_batch_type"),
        ("lightning_lap2.accounting", "register_mechanism"),
        ("lightning_lap2.accounting", "register_route"),
        ("lightning_lap2.gradients", "register_clipping"),
        ("lightning_lap2.gradients.ghost", "register_ghost_rule"),
    ]:
        assert name in import_module(package).__all__


def test_every_error_can_be_caught_by_a_public_name() -> None:
    assert set(errors.__all__) <= set(lightning_lap2.__all__)
    assert set(errors.__all__) == {name for name, found in vars(errors).items() if isinstance(found, type)}
    for name in errors.__all__:
        assert getattr(lightning_lap2, name) is getattr(errors, name)


LIGHTNING_ROOM = ROOT / "callback" / "trainer"
# which fit by themselves, and so have a Trainer of their own, in functions
FITTING = {"audit", "selection", "cli"}
# what is known of Lightning where there is no Trainer yet: a user's loader may hold its sampler
WITHOUT_A_TRAINER = {(ROOT / "sampling" / "loaders.py", "_sampler")}
# a room -> what it may not import of its package, since that is built upon it
ABOVE: dict[str, set[str]] = {
    "callback/trainer": {"hooks", "session", "preparing", "run", "plan", "readable", "reporting", "release"},
    "callback/ledger": {"hooks", "session", "preparing", "readable", "reporting", "release", "trainer"},
    "callback/release": {"hooks", "session", "preparing", "readable", "reporting", "trainer"},
    "gradients/step": {"ghost", "vmap", "loop", "engine", "engines", "clipped_sum", "norms", "suggest", "trial"},
    "accounting/routes": {"accountant", "budget", "calibration", "forecast", "selection"},
}


def outside_the_room() -> Iterator[Path]:
    yield from (file for file in FILES if LIGHTNING_ROOM not in file.parents)


def test_only_what_fits_by_itself_imports_lightning_in_a_function() -> None:
    thin = {ROOT / "lightning.py", ROOT / "pytorch_lightning.py"}
    for file in outside_the_room():
        found = {module.split(".")[0] for module, _ in imports(file, nested=True)}
        assert file in thin or package(file) in FITTING or not found & {"lightning", "pytorch_lightning"}, file


def test_only_one_room_reads_lightnings_private_names() -> None:
    assert {"_results", "_sampler"} <= privates_of_lightning()
    for file in outside_the_room():
        others = privates_of_lightning() - defined(file)
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute) and node.attr in others and (file, node.attr) not in WITHOUT_A_TRAINER:
                assert ast.unparse(node.value) in ("self", "cls"), where(file, node)


def test_only_one_room_sets_attributes_of_a_trainer() -> None:
    """By assignment, or by :class:`~lightning_lap2.callback.trainer.patches.Patches`."""
    for file in outside_the_room():
        if package(file) in FITTING:
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                path = ast.unparse(node.value).split(".")
                assert not {"trainer", "_trainer", "strategy", "fit_loop", "epoch_loop"} & set(path), where(file, node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "shadow", where(file, node)


@pytest.mark.parametrize("room", ABOVE)
def test_a_room_does_not_import_what_is_built_upon_it(room: str) -> None:
    house = room.split("/")[0]
    for file in FILES:
        if ROOT / room not in file.parents:
            continue
        for module, names in imports(file, nested=False):
            parts = module.removeprefix("lightning_lap2.").split(".")
            if parts[0] == house:
                reached = {parts[1]} if len(parts) > 1 else set(names)
                assert not reached & ABOVE[room], f"{file.relative_to(ROOT)} imports {sorted(reached)}"
