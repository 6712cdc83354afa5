"""The search itself: what is drawn, run, kept, refused, and gone on with after a kill."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lap2.accounting.selection import RunCount, RunLimit, search_epsilon
from lightning_lap2.callback.hooks import Lap2Hooks
from lightning_lap2.callback.release.ranks import Ranks
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.selection import BestRun, PrivateSearch
from lightning_lap2.selection.run import make_callback
from lightning_lap2.selection.space import Space
from tests.examples.conftest import ROOT
from tests.helpers import LIGHTNING, LIGHTNING_WARNINGS, NAMESPACES, Namespace, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS

PLAN = {"sample_rate": 1 / 4, "steps": 8, "dimension": 8}
SPACE = {"lr": [0.1, 0.2, 0.3], "epochs": [1, 2]}
# seeds of geometric searches with mean 3 that draw so many runs
SEED_OF = {
    count: next(s for s in range(99) if RunCount(3.0, shape=1.0).draw(random.Random(s).random()) == count)
    for count in (1, 2, 3, 5)
}


def search(folder: Path, **options: Any) -> PrivateSearch:
    told: dict[str, Any] = {"mean_runs": 3.0, "shape": 1.0, "plan": PLAN, "folder": folder / "search"}
    return PrivateSearch(2.0, 1e-3, **{**told, **options})


def fit(config: dict[str, Any], privacy: Any, namespace: Namespace = LIGHTNING, **options: Any) -> Any:
    trainer = quiet_trainer(
        namespace.pl,
        privacy,
        **{
            "default_root_dir": getattr(privacy, "folder", None),
            "enable_checkpointing": True,
            "max_epochs": config["epochs"],
            **options,
        },
    )
    trainer.fit(classifier(namespace.pl, learning_rate=config["lr"]), loader(64, 16))
    return trainer


class Recorder:
    """A ``train`` that notes what it was given and gives the scores it is told to."""

    def __init__(self, scores: list[float] | None = None, namespace: Namespace = LIGHTNING) -> None:
        self.scores, self.namespace = scores, namespace
        self.configs: list[dict[str, Any]] = []
        self.callbacks: list[Any] = []
        self.draws: list[float] = []

    def __call__(self, config: dict[str, Any], privacy: Any) -> float:
        self.configs.append(config)
        self.callbacks.append(privacy)
        self.draws.append(torch.rand(()).item())
        fit(config, privacy, self.namespace)
        (privacy.folder / "mark.txt").write_text(str(len(self.configs)))
        return self.scores[len(self.configs) - 1] if self.scores else 0.5


def test_the_best_run_remains_and_nothing_of_the_others(tmp_path: Path) -> None:
    train = Recorder([0.1, 0.9, 0.3, 0.9, 0.2])
    found = search(tmp_path, seed=SEED_OF[5])
    best = found.run(train, SPACE, progress=False)
    assert isinstance(best, BestRun)
    assert (best.score, best.config) == (0.9, train.configs[1])  # of equal scores the first
    assert (best.folder / "mark.txt").read_text() == "2"
    assert len(best.checkpoints) == 1
    assert torch.load(best.checkpoints[0], weights_only=True)["global_step"] == train.callbacks[1].steps
    left = {path.name for path in (tmp_path / "search").iterdir()}
    assert left == {".search.lock", "best", "search.json", "search_report.json", "search_report.md"}
    assert not list(best.folder.rglob("privacy_report*"))  # its epsilon is that of the run alone


def test_nothing_tells_the_number_of_runs_once_it_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for count, folder in ((1, "one"), (5, "five")):
        found = search(tmp_path / folder, seed=SEED_OF[count])
        found.run(Recorder(), [{"lr": 0.1, "epochs": 1}], progress=True)
        state = json.loads((tmp_path / folder / "search" / "search.json").read_text())
        assert (state["pending"], state["total"], state["finished"]) == ([], 0, True)
        state["best"]["folder"] = state["search"]["seed"] = state["best"]["run"] = None
        texts.append((state, str(found.report()), found.report().to_dict() | {"run": None}))
        bars = [line for line in capsys.readouterr().err.splitlines() if "search:" in line]
        assert not any(f"{done}/{count}" in line for line in bars for done in range(count + 1))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", [{}, {"distribution": "poisson", "shape": 0.0}, {"mechanism": "gaussian"}])
def test_every_run_keeps_the_limit_and_the_price_is_the_budget(tmp_path: Path, options: dict[str, Any]) -> None:
    found = search(tmp_path, seed=3, **options)
    train = Recorder()
    found.run(train, {"lr": [0.1], "epochs": [1, 2, 4]}, progress=False)
    assert found.limit.search_epsilon(found.runs, 1e-3) <= 2.0
    for callback, config in zip(train.callbacks, train.configs, strict=True):
        assert callback.steps == 4 * config["epochs"]
        assert found.limit.met_by(callback.accountant)
        assert search_epsilon(callback.accountant, found.runs, delta=1e-3) <= 2.0
        assert callback.epsilon < 2.0
    steps = {c["epochs"]: callback.noise_multiplier for c, callback in zip(train.configs, train.callbacks, strict=True)}
    assert sorted(steps.values()) == [steps[epochs] for epochs in sorted(steps)]  # each with its own noise
    report = found.report()
    assert 1.9 < report.epsilon <= 2.0
    assert report.finished and report.run is not None and report.run["steps"] in (4, 8, 16)


def test_draws(tmp_path: Path) -> None:
    """With a seed as stated; without one different each time, and every configuration comes up."""
    first, again = Recorder(), Recorder()
    search(tmp_path / "a", seed=SEED_OF[3]).run(first, SPACE, progress=False)
    search(tmp_path / "b", seed=SEED_OF[3]).run(again, SPACE, progress=False)
    assert first.configs == again.configs and len(first.configs) == 3
    source = random.SystemRandom()
    seen = [tuple(Space(SPACE).draw(source.randrange)) for _ in range(400)]
    assert len(set(seen)) == Space(SPACE).size == 6


def test_runs_are_alike_in_law_and_leave_the_generators_alone(tmp_path: Path) -> None:
    """Initial weights come from the global generators: fresh for each run, else the first run's would be special."""
    torch.manual_seed(5)
    expected = torch.rand(()).item()
    torch.manual_seed(5)
    train = Recorder()
    search(tmp_path, seed=SEED_OF[3]).run(train, SPACE, progress=False)
    assert len({*train.draws, expected}) == 4
    assert torch.rand(()).item() == expected


def test_smallest_score_failed_runs_and_tensors(tmp_path: Path) -> None:
    best = search(tmp_path, seed=SEED_OF[3], mode="min").run(Recorder([math.inf, 0.5, 0.25]), SPACE, progress=False)
    assert best is not None and best.score == 0.25
    as_tensor: Callable[[Any, Any], Any] = lambda c, p: (fit(c, p), torch.tensor(0.75))[1]  # noqa: E731
    best = search(tmp_path / "tensor", seed=SEED_OF[1]).run(as_tensor, SPACE, progress=False)
    assert best is not None and best.score == 0.75
    lost = search(tmp_path / "lost", seed=SEED_OF[1])
    lost.run(Recorder([-math.inf]), SPACE, progress=False)
    told = json.loads((tmp_path / "lost" / "search" / "search_report.json").read_text(), parse_constant=pytest.fail)
    assert told["score"] == "-inf"


def test_a_list_of_configurations(tmp_path: Path) -> None:
    space = [{"lr": 0.1, "epochs": 1, "layers": [1]}, {"lr": 0.2, "epochs": 1, "layers": [2]}]

    def train(config: dict[str, Any], privacy: Any) -> float:
        assert config in space
        fit(config, privacy)
        score = float(config["layers"].pop())
        config["lr"] = math.nan  # of a copy: the next runs do not see it
        return score

    best = search(tmp_path, seed=SEED_OF[5]).run(train, space, progress=False)
    assert best is not None and best.config in space


def test_settings_of_the_callback_are_searched_too(tmp_path: Path) -> None:
    train = Recorder()
    space = {**SPACE, "privacy.max_grad_norm": [0.25], "privacy.engine": ["loop"]}
    search(tmp_path, seed=SEED_OF[2], clipping="automatic").run(train, space, progress=False)
    for callback in train.callbacks:
        assert (callback.max_grad_norm, callback.settings.engine) == (0.25, "loop")
        assert callback.settings.clipping == "automatic"


@pytest.mark.parametrize("name", NAMESPACES)
def test_both_namespaces(tmp_path: Path, name: str) -> None:
    namespace = Namespace.named(name)
    train = Recorder(namespace=namespace)
    best = search(tmp_path, seed=SEED_OF[1], callback=namespace.lap2).run(train, SPACE, progress=False)
    assert best is not None
    (callback,) = train.callbacks
    assert isinstance(callback, namespace.lap2)
    assert callback.state_key == "Lap2Privacy"


def test_no_run(tmp_path: Path) -> None:
    """Poisson with a mean so small that none is drawn."""
    found = search(tmp_path, distribution="poisson", shape=0.0, mean_runs=0.01, seed=0)
    assert found.run(Recorder(), SPACE, progress=False) is None
    assert "No run was drawn" in str(found.report())
    assert found.run(Recorder(), SPACE, progress=False) is None


# -- killed and gone on with --------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process had died there: nothing of the library runs after it."""


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.selection.test_search import SEED_OF, SPACE, Recorder, fit, search

done = Recorder([0.9, 0.1, 0.3])

def train(config, privacy):
    if len(done.configs) == 2:
        fit(config, privacy)
        os.kill(os.getpid(), signal.SIGKILL)
    return done(config, privacy)

search(Path(sys.argv[1]), seed=SEED_OF[3]).run(train, SPACE)
"""


def test_a_killed_search_goes_on_without_a_second_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed by the system in its last run, after the fit."""
    whole = Recorder([0.9, 0.1, 0.3])
    expected = search(tmp_path / "whole", seed=SEED_OF[3]).run(whole, SPACE, progress=False)

    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, capture_output=True, timeout=250)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(list((tmp_path / "search").glob("run-*"))) == 2  # the best and the one that was cut

    monkeypatch.setattr(RunCount, "draw", lambda self, uniform: pytest.fail("a second draw"))
    assert "not over" in str(_report_of(search(tmp_path, seed=SEED_OF[3])))
    last = Recorder([0.3])
    best = search(tmp_path, seed=SEED_OF[3]).run(last, SPACE, progress=False)
    assert last.configs == whole.configs[2:]
    assert best is not None and expected is not None
    assert (best.score, best.config) == (expected.score, expected.config) == (0.9, whole.configs[0])
    assert (best.folder / "mark.txt").read_text() == "1"
    assert not list((tmp_path / "search").glob("run-*"))
    # once it is over it is not run again
    again = search(tmp_path, seed=SEED_OF[3]).run(_die, SPACE, progress=False)
    assert again == best


def _report_of(found: PrivateSearch) -> Any:
    """The report of a search that stops before its next run."""
    with pytest.raises(Killed):
        found.run(_die, SPACE, progress=False)
    return found.report()


def _die(config: Any, privacy: Any) -> float:
    raise Killed


def test_killed_between_the_end_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, target: _die(None, None))
        with pytest.raises(Killed):
            search(tmp_path, seed=SEED_OF[2]).run(Recorder(), SPACE, progress=False)
    best = search(tmp_path, seed=SEED_OF[2]).run(_die, SPACE, progress=False)
    assert best is not None and len(best.checkpoints) == 1
    assert (tmp_path / "search" / "search_report.md").is_file()


def test_two_at_once(tmp_path: Path) -> None:
    def train(config: Any, privacy: Any) -> float:
        with pytest.raises(RuntimeError, match="another process is searching in"):
            search(tmp_path, seed=SEED_OF[1]).run(_die, SPACE, progress=False)
        fit(config, privacy)
        return 0.5

    assert search(tmp_path, seed=SEED_OF[1]).run(train, SPACE, progress=False) is not None


def test_the_folder_of_another_search(tmp_path: Path) -> None:
    search(tmp_path, seed=SEED_OF[1]).run(Recorder(), SPACE, progress=False)
    with pytest.raises(ValueError, match=r"other settings \(mean_runs, seed\)"):
        search(tmp_path, mean_runs=4.0).run(Recorder(), SPACE, progress=False)
    with pytest.raises(ValueError, match=r"other settings \(space\)"):
        search(tmp_path, seed=SEED_OF[1]).run(Recorder(), {**SPACE, "lr": [1.0]}, progress=False)
    state = tmp_path / "search" / "search.json"
    state.write_text(state.read_text()[:-20])
    with pytest.raises(ValueError, match="is damaged"):
        search(tmp_path, seed=SEED_OF[1]).run(Recorder(), SPACE, progress=False)


# -- refused ------------------------------------------------------------------------------------------------------


def _ignores(config: Any, privacy: Any) -> float:
    fit(config, LIGHTNING.lap2(eps=1.0, delta=1e-3), enable_checkpointing=False)
    return 0.5


def _loosens(config: Any, privacy: Any) -> float:
    privacy.settings = replace(privacy.settings, run_limit=None)
    fit(config, privacy)
    return 0.5


def _loosens_a_little(config: Any, privacy: Any) -> float:
    limit = privacy.settings.run_limit
    privacy.settings = replace(privacy.settings, run_limit=RunLimit(((3.0, 1e-3),)))
    fit(config, privacy)
    privacy.settings = replace(privacy.settings, run_limit=limit)
    return 0.5


def _twice(config: Any, privacy: Any) -> float:
    fit(config, privacy)
    fit(config, privacy)
    return 0.5


def _elsewhere(config: Any, privacy: Any) -> float:
    fit(config, privacy, default_root_dir=privacy.folder.parent / "mine")
    return 0.5


def _logs_elsewhere(config: Any, privacy: Any) -> float:
    from lightning.pytorch.loggers import CSVLogger

    fit(config, privacy, logger=CSVLogger(privacy.folder.parent / "logs"))
    return 0.5


def _scores(value: Any) -> Callable[[Any, Any], Any]:
    return lambda config, privacy: (fit(config, privacy), value)[1]


@pytest.mark.parametrize(
    ("train", "error", "words"),
    [
        (_ignores, RuntimeError, "without a release by the callback it was given"),
        (lambda config, privacy: 0.5, RuntimeError, "without a release by the callback"),
        (_loosens, RuntimeError, "ledger is not that of its plan"),
        (_loosens_a_little, RuntimeError, "ledger is not that of its plan"),
        (_twice, UnsupportedSettingError, "one fit from its beginning"),
        (_elsewhere, UnsupportedSettingError, r"ModelCheckpoint \(dirpath\) writes to .*mine"),
        (_logs_elsewhere, UnsupportedSettingError, r"CSVLogger \(save_dir\) writes to .*logs"),
        (_scores(math.nan), ValueError, "score of a run is NaN"),
        (_scores(torch.tensor(math.nan)), ValueError, "score of a run is NaN"),
        (_scores(None), TypeError, "score as a number, got a NoneType"),
        (_scores(True), TypeError, "score as a number, got a bool"),
        (_scores("0.5"), TypeError, "score as a number, got a str"),
    ],
)
def test_refused_runs(tmp_path: Path, train: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as told:
        search(tmp_path, seed=SEED_OF[1]).run(train, {"lr": [0.125], "epochs": [1]}, progress=False)
    assert "0.125" not in str(told.value)
    assert not list((tmp_path / "search").glob("run-*"))


def test_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lap2Hooks, "_planned", lambda self, session: None)
    privacy = make_callback(LIGHTNING.lap2, tmp_path, RunLimit(((1.0, 1e-3),)), eps=1.0, delta=1e-3)
    one, two = (
        SimpleNamespace(run=SimpleNamespace(fit=SimpleNamespace(ranks=Ranks(0, size), module=classifier(LIGHTNING.pl))))
        for size in (1, 2)
    )
    privacy._planned(one)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedSettingError, match="in one process, but the Trainer has 2"):
        privacy._planned(two)  # type: ignore[arg-type]


def test_a_logger_without_a_folder_is_named(tmp_path: Path) -> None:
    class Remote(LIGHTNING.pl.loggers.logger.DummyLogger):  # type: ignore[name-defined, misc]
        save_dir = None

    found = search(tmp_path, seed=SEED_OF[2])
    found.run(lambda c, p: (fit(c, p, logger=Remote()), 0.5)[1], SPACE, progress=False)
    notes = [text for text in found.report().caveats if text.startswith("Remote has no folder")]
    assert len(notes) == 1


def test_a_run_that_stops_early_is_within_its_plan(tmp_path: Path) -> None:
    class Stop(LIGHTNING.pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 2

    def train(config: Any, privacy: Any) -> float:
        trainer = quiet_trainer(LIGHTNING.pl, privacy, Stop(), max_epochs=5, default_root_dir=privacy.folder)
        trainer.fit(classifier(LIGHTNING.pl), loader(64, 16))
        return float(privacy.steps)

    best = search(tmp_path, seed=SEED_OF[1]).run(train, SPACE, progress=False)
    assert best is not None and best.score == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_multiplier": 1.0}, "PrivateSearch gives noise_multiplier"),
        ({"noise_seed": 1}, "PrivateSearch gives noise_seed"),
        ({"bound": "published"}, "bound='published'"),
        ({"mean_runs": 0.5}, "mean_runs must be at least 1"),
        ({"mode": "best"}, "mode must be one of"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"plan": {"steps": 3}}, "plan must hold sample_rate, steps, dimension"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
    ],
)
def test_refused_settings(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search(tmp_path, **options)
    with pytest.raises(ValueError, match="eps must be positive and finite"):
        PrivateSearch(math.inf)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("abc", "space must be a list"),
        ({"lr": 0.1}, "list of values for 'lr'"),
        ({"lr": []}, "'lr' has no values"),
        ([], "no values"),
        ({}, "at least one hyperparameter"),
        ({1: [2]}, "strings as names"),
        ({"privacy.eps": [1.0]}, "space gives eps"),
        ({"privacy.sampling": ["none"]}, "space gives sampling, which must be one for all runs"),
    ],
)
def test_refused_spaces(tmp_path: Path, space: Any, words: str) -> None:
    found = search(tmp_path)
    with pytest.raises((TypeError, ValueError), match=words):
        found.run(Recorder(), space, progress=False)
    with pytest.raises(RuntimeError, match="once run"):
        found.report()


def test_the_best_runs_ledger_is_not_continued(tmp_path: Path) -> None:
    """It knows one run, not what the search spent."""
    best = search(tmp_path, seed=SEED_OF[1]).run(Recorder(), SPACE, progress=False)
    assert best is not None
    for delta in (1e-3, 1e-4):
        trainer = quiet_trainer(LIGHTNING.pl, LIGHTNING.lap2(eps=2.0, delta=delta), max_epochs=9)
        with pytest.raises(ValueError, match="ledger of the checkpoint is that of one run of a private search"):
            trainer.fit(classifier(LIGHTNING.pl), loader(64, 16), ckpt_path=best.checkpoints[0])
