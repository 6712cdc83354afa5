"""What the documentation shows is what happens: Python blocks run, commands print what is printed there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import cli
from tests.examples.conftest import ROOT
from tests.finished.folder import write_report_file

PAGES = (
    "README.md",
    "docs/settings.md",
    "docs/results.md",
    "docs/choosing.md",
    "docs/laplace-or-gaussian.md",
    "docs/coming-from-opacus.md",
    "docs/command-line.md",
)


class Model(L.LightningModule):
    """Any user's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), flags=re.M | re.S)


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Each ``$ lightning-lap2`` command with the output that is shown below it."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("lightning-lap2 "):
                yield command, output


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, on every resume into a new folder
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    known: dict[str, Any] = {"train_dataloader": DataLoader(data, batch_size=20, shuffle=True)}
    known["public_dataloader"] = DataLoader(data, batch_size=20)
    for block in blocks(page, "python"):
        known["model"] = Model()  # the ledger of one that has been trained would go on
        exec(compile(block, page, "exec"), known)


SHOWN = sorted({found for page in PAGES for found in commands(page)})


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command[15:60] for command, _ in SHOWN])
def test_commands_print_what_is_shown(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_report_file(tmp_path / "lightning_logs" / "version_0")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    missing = [target for target in targets if "://" not in target and not (here / target).exists()]
    assert not missing
