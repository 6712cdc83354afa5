"""Neighbour replay: sound trainings pass, over models, engines and settings, and planted faults do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate

from lightning_lap2 import cli
from lightning_lap2.accounting.routes.domination import Domination
from lightning_lap2.audit.bench import Training
from lightning_lap2.audit.neighbours import replay
from lightning_lap2.audit.replay_result import Neighbour, ReplayResult
from lightning_lap2.batches import ExampleBatch, split_rows
from lightning_lap2.callback import session as session_module
from lightning_lap2.callback.release import releases as releases_module
from lightning_lap2.gradients import FlatClipper, UnsupportedModelError
from lightning_lap2.gradients.trial import Trial
from lightning_lap2.noise.aes import AesNoise
from lightning_lap2.sampling import PoissonBatchSampler
from lightning_lap2.sampling.alone import Collator
from tests.settings.fuzz_build import Fuzzed, make_loader, needs_integers

pytestmark = pytest.mark.filterwarnings("ignore")
# small enough that every example's gradient is clipped, so that a drawn record moves a release by all of C
C = 0.01
GIVEN: dict[str, Any] = {"eps": 1e6, "noise_multiplier": 0.5, "max_grad_norm": C, "bound": "joint"}


def training(
    module: dict[str, Any], *, data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **privacy: Any
) -> Training:
    loader = make_loader({"size": 12, **(data or {})}, module)
    if privacy.get("mechanism", "laplace") != "laplace":
        privacy["bound"] = "tight"
    return Training(
        model=lambda: Fuzzed(module),
        loader=loader,
        privacy={**GIVEN, **privacy},
        trainer={"accelerator": "cpu", "devices": 1, "max_epochs": 2, **(trainer or {})},
    )


@settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    module=st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                ["linear", "mlp", "conv1d", "conv2d", "embedding", "norm", "attention", "gru", "raw"]
            ),
            "extra": st.sampled_from(["", "unused", "tied", "scalar", "dropout"]),
            "trainable": st.sampled_from(["all", "first frozen"]),
        }
    ),
    engine=st.sampled_from(["vmap", "ghost", "loop"]),
    mechanism=st.sampled_from(["laplace", "gaussian", "laplace_l1"]),
    sampling=st.sampled_from(["poisson", "none"]),
    accumulate=st.sampled_from([1, 2, 3]),
    precision=st.sampled_from(["32-true", "64-true", "bf16-mixed"]),
    batch_size=st.sampled_from([1, 2, 4]),
)
def test_sound_trainings_pass(
    module: dict[str, Any],
    engine: str,
    mechanism: str,
    sampling: str,
    accumulate: int,
    precision: str,
    batch_size: int,
) -> None:
    # nothing is left to train; ghost computes l2 norms, and cannot zero one row of a step that draws random numbers
    assume(not (module["kind"] in ("raw", "linear") and module["trainable"] != "all"))
    assume(engine != "ghost" or (mechanism != "laplace_l1" and module["extra"] != "dropout"))
    double = precision == "64-true" and not needs_integers(module)
    plan = training(
        module,
        data={"batch_size": batch_size, "dtype": "double" if double else ""},
        trainer={"accumulate_grad_batches": accumulate, "precision": precision},
        engine=engine,
        mechanism=mechanism,
        sampling=sampling,
    )
    # seconds of accounting at every fit, which is not what is looked at here
    with mock.patch.object(Domination, "usable", return_value=False):
        try:
            result = replay(plan, records=2, steps=2)
        except UnsupportedModelError:  # a GRU under ghost, attention in bf16 under vmap
            return
    assert not result.violated, str(result)
    assert result.null == ("zero" if module["extra"] == "dropout" else "absent")
    assert max(n.moved for n in result.neighbours) > 0.5, "a record that was drawn moves a release"


def test_undrawn_record_changes_nothing_and_drawn_ones_move_by_c() -> None:
    result = replay(training({"kind": "mlp"}, data={"size": 40}), records=4, steps=3)
    *drawn, never = result.neighbours
    assert never.draws == 0 and never.moved == never.moved_elsewhere == 0.0
    for neighbour in drawn:
        assert neighbour.draws > 0
        assert neighbour.moved == pytest.approx(1.0, rel=1e-4)
        assert neighbour.moved_elsewhere <= neighbour.rounding
    assert "| ok |" in str(result) and "no fault found" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["violated"] is False


def unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatClipper, "weights", lambda self, norms: torch.ones_like(norms))
    unchecked(monkeypatch)  # which finds it


def divided_by_the_number_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    release, parts = releases_module.release_, []
    deliver = session_module.FitSession.deliver

    def counted(self: Any, *args: Any) -> Any:
        shown = deliver(self, *args)
        parts.append(self._part.count)
        return shown

    monkeypatch.setattr(session_module.FitSession, "deliver", counted)
    monkeypatch.setattr(
        releases_module,
        "release_",
        lambda total, **options: release(total, **{**options, "normaliser": max(1, parts[-1])}),
    )


def noise_from_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    add = AesNoise._add

    def _add(self: Any, values: Tensor, scale: float, distribution: Any, release: int, last_factor: float) -> None:
        add(self, values, scale, distribution, release + int(abs(values).sum() * 1e9) % 1000, last_factor)

    monkeypatch.setattr(AesNoise, "_add", _add)


def coins_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoissonBatchSampler, "_coins", lambda self, release: np.random.default_rng())


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "try_step", lambda *_, **__: Trial())


def rows_that_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collated together, as plain training does."""

    def together(collator: Any, fetched: list[Any]) -> Any:
        group = split_rows(collator.collate_fn([record for found in fetched for record in found]))
        return ExampleBatch([group], [range(group.count)])

    monkeypatch.setattr(Collator, "__call__", together)
    unchecked(monkeypatch)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (unclipped, "moved by more than C"),
        (divided_by_the_number_drawn, "moved by more than C"),
        (noise_from_the_data, "moved by more than C"),
        (coins_of_their_own, "coins changed"),
        (rows_that_mix, "moved by more than C"),
    ],
)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = training({"kind": "mlp"}, data={"size": 24, "batch_size": 8})
    if plant is rows_that_mix:

        def centred(records: list[Any]) -> Any:
            x, y = default_collate(records)
            return 20 * (x - x.mean(0)), y

        plan.loader.collate_fn = centred
    plant(monkeypatch)
    result = replay(plan, records=3, steps=2)
    assert result.violated
    assert any(words in fault for n in result.neighbours for fault in result.faults(n)), str(result)
    assert "VIOLATED" in str(result)


def test_ghost_with_dropout_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="draws random numbers.*engine='vmap'"):
        replay(training({"kind": "mlp", "extra": "dropout"}, engine="ghost"), records=1, steps=1)


@pytest.mark.parametrize("name", ["records", "steps", "seed"])
def test_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        replay(training({"kind": "mlp"}), **{name: -1})
    with pytest.raises(TypeError, match=f"{name} must be an integer"):
        replay(training({"kind": "mlp"}), **{name: 1.5})


def test_a_difference_that_is_not_a_number_is_a_fault() -> None:
    claim = replay(training({"kind": "mlp"}), records=1, steps=1).claim
    nan = Neighbour(record=0, draws=1, moved=float("nan"), moved_elsewhere=float("nan"), rounding=0.0, changed=())
    result = ReplayResult(claim=claim, null="absent", norm="l2", steps=1, slack=0.0, neighbours=(nan,), seed=0)
    assert result.violated and len(result.faults(nan)) == 2


CONFIG = """
model: {class_path: tests.audit.test_replay.Small}
data: {class_path: tests.audit.test_replay.SmallData}
privacy: {eps: 1.0e6, noise_multiplier: 0.5, max_grad_norm: 0.01, bound: joint}
trainer: {max_epochs: 1, accelerator: cpu}
"""


class Small(Fuzzed):
    def __init__(self) -> None:
        super().__init__({"kind": "mlp"})


class SmallData(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return make_loader({"size": 12}, {"kind": "mlp"})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "replay.yaml"
    config.write_text(CONFIG)
    command = ["replay", "--config", str(config), "--records", "2", "--steps", "2"]
    assert cli.main(command) == 0
    assert "no fault found" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert cli.main([*command, "--records", "0"]) == 2
    assert "records must be at least 1" in capsys.readouterr().err
    unclipped(monkeypatch)
    assert cli.main(command) == 1
    assert "VIOLATED" in capsys.readouterr().out
