"""The structure of docs/design.md, held: which package may import which, who knows Lightning, what stays private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_lap2

ROOT = Path(lightning_lap2.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
GROUND = {"errors", "_validate", "_version", "_lazy", "_progress", "_values"}
# what each package, or module at the root, may import beside the ground and itself
ARROWS: dict[str, set[str]] = {
    "accounting": set(),
    "mechanism": {"accounting"},
    "report": set(),
    "noise": {"mechanism"},
    "batches": set(),
    "sampling": {"batches"},
    "gradients": {"batches", "mechanism"},
    "figures": {"accounting", "mechanism"},
    "finished": {"report"},
    "cli": {"accounting", "report", "figures", "finished"},  # what trains is imported by the command that is called
    "callback": {"accounting", "mechanism", "report", "noise", "batches", "sampling", "gradients"},
}


def package(file: Path) -> str:
    """The package or root module that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path, *, nested: bool) -> Iterator[tuple[str, list[str]]]:
    """(module, names) that a file imports; ``nested``: inside functions too. Not under ``TYPE_CHECKING``."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if nested else tree.body:
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


def test_torchs_private_functorch_is_in_one_file() -> None:
    for file in FILES:
        found = [m for m, _ in imports(file, nested=True) if m.startswith(("torch._C._functorch", "torch._functorch"))]
        assert not found or file == ROOT / "gradients" / "physical.py", file.relative_to(ROOT)
        assert "_C._functorch" not in file.read_text() or file.name == "physical.py", file.relative_to(ROOT)
