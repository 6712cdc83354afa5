from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples.conftest import ROOT

Example = Callable[[str], ModuleType]


def test_digits_shows_both_accuracies_and_where_to_look(
    example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example("digits").main(["--epochs", "3", "--eps", "2.5", "--out", "logs"])

    printed = capsys.readouterr().out
    assert printed.count("epoch   ") == 3
    assert "plain " in printed and "private " in printed
    log_dir = tmp_path / "logs" / "private" / "version_0"
    assert str(log_dir.relative_to(tmp_path)) in printed
    report = json.loads((log_dir / "privacy_report.json").read_text())
    assert report["steps"] == 3 * 6 and report["epsilon"] <= report["eps"] == 2.5 and report["delta"] == 1e-4
    assert "differentially private" in (log_dir / "privacy_report.md").read_text()

    events = EventAccumulator(str(log_dir))
    events.Reload()
    logged = [event.value for event in events.Scalars("privacy/epsilon")]
    assert len(logged) == 18 and logged == sorted(logged)
    assert logged[0] < logged[-1] <= 2.5 * (1 + 1e-6)  # event files hold fp32


def test_digits_runs_as_a_script() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "digits.py", "--help"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "--eps EPS" in run.stdout and "--batch-size" in run.stdout


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_fashion_mnist_trains_and_appends_rows(example: Example, mnist_like: Path, tmp_path: Path, engine: str) -> None:
    main = example("fashion_mnist").main
    arguments = ["--data", str(mnist_like), "--batch-size", "20", "--steps", "4", "--delta", "1e-3", "--csv", "r.csv"]
    first = main([*arguments, "--eps", "3", "--engine", engine])
    second = main([*arguments, "--eps", "1", "--engine", engine, "--mechanism", "gaussian", "--optimizer", "sgd"])

    assert first["steps"] == second["steps"] == 4
    assert first["epsilon"] <= 3 and second["epsilon"] <= 1
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mechanism"] for row in rows] == ["laplace", "gaussian"]
    assert all(float(row["seconds_per_step"]) > 0 for row in rows)


def test_fashion_mnist_averages_views(example: Example, mnist_like: Path) -> None:
    arguments = ["--data", str(mnist_like), "--batch-size", "20", "--steps", "3", "--delta", "1e-3", "--eps", "3"]
    row = example("fashion_mnist").main(
        [*arguments, "--engine", "ghost", "--augmentations", "3", "--shift", "2", "--flip", "true"]
    )
    assert (row["steps"], row["augmentations"]) == (3, 3)


def test_each_fetch_jitters_each_image_by_itself(example: Example) -> None:
    data = example("data")
    torch.manual_seed(0)
    image = torch.arange(1.0, 13.0).view(1, 1, 3, 4)
    images = data.jitter(image.expand(400, -1, -1, -1), shift=1, flip=True)
    assert images.shape == (400, 1, 3, 4)
    # 3 x 3 shifts, mirrored or not: 18 views, and nothing but what was there or 0
    assert len({tuple(view.flatten().tolist()) for view in images}) == 18
    assert set(images.unique().tolist()) == set(range(13))
    assert torch.equal(data.jitter(image, shift=0, flip=False), image)
    rows = data.Jittered(image, torch.zeros(1), shift=1)
    assert len({tuple(rows[0][0].flatten().tolist()) for _ in range(200)}) == 9


def test_the_papers_cnn_has_26010_parameters(example: Example) -> None:
    model = example("fashion_mnist").TutorialCNN()
    assert sum(parameter.numel() for parameter in model.parameters()) == 26_010


def test_idx_files_are_checked(example: Example, mnist_like: Path) -> None:
    data = example("data")
    rows = data.idx(mnist_like, "train")
    assert rows.images.shape == (200, 1, 28, 28) and rows.images.max() == 1 and rows.labels[11] == 1

    labels = mnist_like / "train-labels-idx1-ubyte"
    with pytest.raises(ValueError, match="begins with 00000801, an idx file with 3 dimensions with 00000803"):
        data.read_idx(labels, dimensions=3)
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(ValueError, match="holds 199 values, its header says 200"):
        data.read_idx(labels, dimensions=1)
    with pytest.raises(FileNotFoundError, match="neither train-images-idx3-ubyte nor"):
        data.idx(mnist_like.parent, "train")


def test_users_compares_sentences_with_editorials(
    example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = ["A good day, but not for everyone.", "What a bad idea!", "They met on Monday."]
    lines = [f"{editorial}_{k}\t{1 - k}\t{texts[k % 3]}" for editorial in range(1, 26) for k in range(3)]
    (tmp_path / "sentences.txt").write_text("\n".join(lines))
    (tmp_path / "lexicon.txt").write_text("good\t1.9\t0.9\nbad\t-2.5\t0.7\n")
    example("users").main(
        ["--sentences", "sentences.txt", "--lexicon", "lexicon.txt", "--eps", "[2.0]", "--steps", "2", "--runs", "2"]
    )
    printed = capsys.readouterr().out
    assert "60 sentences of 20 editorials; 15 held out, 33.3% positive" in printed
    assert printed.count("accuracy") == 4
    assert "eps = 2, one editorial, 10 shown" in printed
