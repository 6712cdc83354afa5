"""The paper's experiments: rows are recorded once, plans are resumed, recipes build what they say."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.conftest import AVERAGES, ROOT

Example = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    "recipe", ["plain", pytest.param("tuned", marks=AVERAGES), pytest.param("tuned_norm", marks=AVERAGES)]
)
def test_a_run_is_recorded_and_not_repeated(
    example: Example, mnist_like: Path, tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table2 = example("table2_mnist")
    flags = ["--data", str(mnist_like), "--steps", "3", "--batch-size", "32", "--recipe", recipe, "--csv", "out/r.csv"]
    flags += ["--eps", "3.42", "1.0", "--seeds", "5"]
    rows = table2.main([*flags, "--mechanism", "laplace", "gaussian"])
    assert [(row["mechanism"], row["eps"]) for row in rows] == [
        ("laplace", 3.42),
        ("laplace", 1.0),
        ("gaussian", 3.42),
        ("gaussian", 1.0),
    ]
    assert all(0.99 * row["eps"] < row["epsilon"] <= row["eps"] and row["seed"] == 5 for row in rows)
    assert all(row["dimension"] == 26_010 + 96 * (recipe == "tuned_norm") for row in rows)
    assert all(row["sample_rate"] == 32 / 200 for row in rows)

    again = table2.main([*flags, "--mechanism", "laplace", "laplace_l1"])
    assert [row["mechanism"] for row in again] == ["laplace_l1"] * 2
    assert capsys.readouterr().out.count("exists already") == 2
    assert len((tmp_path / "out" / "r.csv").read_text().splitlines()) == 1 + 6


def test_recipes(example: Example) -> None:
    recipes = example("recipes")
    tuned = [recipes.recipe("tuned", eps) for eps in (3.42, 2.53, 1.68, 0.88, 0.13)]
    assert all(0.9 <= chosen.averaging < 1 and chosen.batch_size >= 1024 for chosen in tuned)
    rates = [chosen.model["lr"] for chosen in tuned]
    assert rates == sorted(rates, reverse=True)
    assert recipes.recipe("plain", 3.42) == recipes.recipe("plain", 0.13)


def test_the_learning_rate_falls_to_zero(example: Example, mnist_like: Path) -> None:
    import lightning as L

    module = example("fashion_mnist")
    model = module.TutorialCNN(lr=0.5, optimizer="sgd", schedule="linear", norm="group", standardize=True, centre=True)
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = L.Trainer(
        max_steps=4,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, module.IdxData(str(mnist_like), 100))
    assert seen == pytest.approx([0.5, 0.375, 0.25, 0.125])
    with torch.no_grad():
        conv = model.net[0]
        image = torch.rand(1, 1, 28, 28)
        before = conv(image)
        conv.weight.mul_(3.0).add_(0.25)  # scale and mean of a filter make no difference
        assert torch.allclose(conv(image), before, atol=1e-5)


def _append(path: str, number: int) -> None:
    from recording import Results  # type: ignore[import-not-found]

    for k in range(20):
        Results(Path(path)).add({"worker": number, "k": k, "text": "a, b\n" * 50})


def test_rows_of_several_processes_do_not_mix(example: Example, tmp_path: Path) -> None:
    results = example("recording").Results(tmp_path / "r.csv")
    context = get_context("fork")
    workers = [context.Process(target=_append, args=(str(tmp_path / "r.csv"), number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(results.rows()) == 60
    assert results.has({"worker": 2, "k": 19}) and not results.has({"worker": 3})
    with pytest.raises(ValueError, match="has the columns"):
        results.add({"worker": 1})


def test_plans_name_scripts_that_exist(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = example("driver")
    for name in ("FASHION_MNIST", "MNIST", "CIFAR10", "SST2", "QNLI", "E2E", "MODELS"):
        monkeypatch.setenv(name, "folder")
    plans = sorted((ROOT / "paper" / "plans").glob("*.txt"))
    assert plans and all(driver.commands(plan.read_text()) for plan in plans)
    monkeypatch.delenv("MNIST")
    with pytest.raises(ValueError, match=r"\$MNIST names an environment variable that is not set"):
        driver.commands("table2_mnist.py --data $MNIST")
    with pytest.raises(ValueError, match=r"'nothing\.py' is no script"):
        driver.commands("nothing.py")


def test_the_driver_runs_a_plan_and_commits_each_result(
    example: Example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = example("driver")
    monkeypatch.setattr(driver, "HERE", tmp_path)
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    script = "import sys, pathlib\npathlib.Path('rows', sys.argv[1]).write_text('x')\nprint('wrote', sys.argv[1])\n"
    (tmp_path / "one.py").write_text(script)
    (tmp_path / "bad.py").write_text("raise SystemExit('broken')")
    (tmp_path / "rows").mkdir()

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("config", "user.email", "a@b.c")
    git("config", "user.name", "n")
    (tmp_path / "other").write_text("not to be committed")
    git("add", "other")
    (tmp_path / "plan.txt").write_text("# a comment\none.py first\n\nbad.py\none.py second\n")
    assert driver.main([str(tmp_path / "plan.txt"), "--commit", "rows", "--workers", "1"]) == 1
    assert sorted(git("log", "--format=%s").splitlines()) == ["Result: wrote first", "Result: wrote second"]
    assert git("ls-tree", "-r", "--name-only", "HEAD").split() == ["rows/first", "rows/second"]


def test_summary_averages_over_seeds(example: Example) -> None:
    row = {
        "dataset": "mnist",
        "recipe": "tuned",
        "mechanism": "laplace",
        "eps": "3.42",
        "steps": "600",
        "batch_size": "1024",
        "accounting": "two routes",
        "epsilon": "3.4199",
        "noise_multiplier": "0.9358",
        "cpu_seconds": "80",
    }
    rows = [{**row, "seed": str(seed), "accuracy": text} for seed, text in ((1, "95.0"), (2, "97.0"))]
    rows.append({**row, "mechanism": "gaussian", "seed": "1", "accuracy": "98.0"})
    rows.append({**row, "accounting": "four routes", "seed": "1", "accuracy": "99.0"})
    lines = example("summary").table(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in cells}) == 1 and len(lines) == 5
    gaussian, newer, laplace = (dict(zip(cells[0], line, strict=True)) for line in cells[2:])
    assert newer["accounting"] == "four routes" and newer["mean"] == "99.00"
    assert laplace["mean"] == "96.00" and laplace["std"] == "1.41" and laplace["runs"] == "2"
    assert laplace["paper (Lap2)"] == "96.82" and gaussian["paper (Lap2)"] == "" and gaussian["std"] == ""
