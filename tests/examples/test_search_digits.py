"""The search example, its config, and what docs/private-search.md shows in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2.cli import main
from tests.examples.conftest import ROOT

Example = Callable[[str], ModuleType]


def test_the_digits_are_searched(
    example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("search_digits")
    monkeypatch.setattr(module, "SPACE", {"hidden": [8], "lr": [0.02], "batch_size": [256], "epochs": [2]})
    monkeypatch.setattr(module, "BY_HAND", {**module.BY_HAND, "epochs": 1})
    module.main(["--mean-runs", "1", "--out", "found"])
    printed = capsys.readouterr().out
    assert "by hand" in printed and "{'hidden': 8, 'lr': 0.02, 'batch_size': 256, 'epochs': 2}" in printed
    assert "(3.00000, 0.0001)" in (report := (tmp_path / "found" / "search_report.md").read_text()) or "(2.99" in report


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_the_config(example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every value of its space fits; the search itself is that of one short run."""
    example("digits")
    config = ["search", "--config", str(ROOT / "examples" / "configs" / "search.yaml"), "--search.mean_runs", "1"]
    short = ["--space", '{"trainer.max_epochs": [1], "model.init_args.lr": [0.005]}']
    assert main([*config, *short, "--search.folder", "short"]) == 0
    assert "one example" in capsys.readouterr().out
    assert main([*config, "--search.mode", "worst"]) == 2


class MyModule(L.LightningModule):
    """Any user's."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = nn.Linear(5, 3), lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*[Tt]ensor[Bb]oard.*")
def test_what_the_page_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    known: dict[str, Any] = {"MyModule": MyModule, "train_dataloader": DataLoader(data, batch_size=20, shuffle=True)}
    known["public_dataloader"] = DataLoader(data, batch_size=20)
    page = (ROOT / "docs" / "private-search.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    block = block.replace("mean_runs=10", "mean_runs=1, plan={'sample_rate': 1 / 3, 'steps': 30, 'dimension': 18}")
    exec(compile(block, "private-search.md", "exec"), known)
    assert "# Search report" in capsys.readouterr().out
