"""``unit=``: add or remove one user with all their records."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from lightning_lap2.callback.ledger.ledger import checksum
from lightning_lap2.callback.settings import Settings
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.sampling import PoissonBatchSampler
from tests.helpers import (
    LIGHTNING,
    LIGHTNING_WARNINGS,
    batch_spy,
    by_hand,
    classifier,
    part_spy,
    quiet_trainer,
    records,
    weights,
)
from tests.isolation.sensitivity import CLIP, FEATURES, LIMIT, Attack, Plain

pytestmark = LIGHTNING_WARNINGS
pl, Lap2Privacy = LIGHTNING.pl, LIGHTNING.lap2
USERS, RECORDS = 12, 31


class Owned(Dataset[Any]):
    """:func:`records` of twelve users, who have three records, but for five of them two."""

    def __init__(self, prefix: str = "user-") -> None:
        self.rows = records(RECORDS)
        self.user_id = [f"{prefix}{index % USERS}" for index in range(RECORDS)]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def owners(dataset: Any) -> list[str]:
    return dataset.user_id


def fit(callback: Any, *others: Any, data: Any = None, batch_size: int = 3, module: Any = None, **options: Any) -> Any:
    """The trained module."""
    module = classifier(pl) if module is None else module
    path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(pl, callback, *others, **{"max_epochs": 2, **options})
    trainer.fit(module, DataLoader(Owned() if data is None else data, batch_size=batch_size), ckpt_path=path)
    return module


# -- what a step is made of -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({"engine": "ghost"}, 1),
        ({"engine": "vmap"}, 3),
        ({"engine": "loop"}, 1),
        ({"engine": "ghost", "augmentations": 2}, 2),
    ],
    ids=str,
)
def test_without_noise_a_run_is_the_plain_formula(options: dict[str, Any], accumulate: int) -> None:
    views = 4 * options.get("augmentations", 1)
    spy = batch_spy(pl, views=views)
    callback = Lap2Privacy(
        eps="inf", noise_multiplier=0.0, max_grad_norm=0.4, unit="user_id", records_per_unit=4, **options
    )
    module = fit(callback, spy, accumulate_grad_batches=accumulate)
    assert callback.steps == 2 * math.ceil(4 / accumulate), "an epoch has U / batch_size batches"
    assert callback.sample_rate == 3 * accumulate / USERS
    assert spy.rows == [views * max(part.count, 1) for part, _, _ in spy.batches]
    x, rows = torch.cat([x for _, x, _ in spy.batches]), records(RECORDS).tensors[0]
    owner = torch.tensor([[int((rows == row).all(1).nonzero()[0]) % USERS for row in unit] for unit in x])
    assert (owner == owner[:, :1]).all(), "an example has records of two users"
    assert owner[:, 0].tolist() == [unit for part, _, _ in spy.batches for unit in part.records]
    torch.testing.assert_close(
        weights(module), by_hand(spy.batches, 3 * accumulate, rate=0.1, clip=0.4), rtol=0, atol=1e-6
    )


def test_a_unit_per_record_is_training_without_units() -> None:
    """Draws, releases and ledger of ``unit=None``, when every record has an owner of its own."""
    data = Owned()
    data.user_id = list(range(RECORDS))  # type: ignore[assignment]
    runs = []
    for unit in (None, "user_id"):
        callback, spy = Lap2Privacy(eps=3.0, noise_seed=2, unit=unit), part_spy(pl)
        module = fit(callback, spy, data=data)
        runs.append((weights(module), spy.parts, callback.epsilon, callback.noise_multiplier))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert runs[0][1:] == runs[1][1:]


class Households(Dataset[Any]):
    """Ten quiet records of four users, and three loud ones of a fifth."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.user_id = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4]
        self.x = torch.randn(len(self.user_id), FEATURES, generator=generator)
        self.x[-3:] *= torch.tensor([[30.0], [50.0], [80.0]])
        self.y = (self.x.sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.user_id)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class SumOfLosses(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y).sum()


def moved(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    unit: str | None,
    absent: list[int],
    units: int,
    engine: str = "vmap",
    privacy: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """The largest distance between the sums of fits with and without ``absent``, everyone being drawn."""

    def everyone(sampler: PoissonBatchSampler, release: int, parts: int) -> list[tuple[list[int], int]]:
        return [(list(range(part, units, parts)), len(range(part, units, parts))) for part in range(parts)]

    monkeypatch.setattr(PoissonBatchSampler, "_draw", everyone)
    named = {} if unit is None else {"unit": unit, "records_per_unit": number}
    attack = Attack(
        module=SumOfLosses,
        dataset=Households,
        loader={"batch_size": 2},
        privacy={**named, **(privacy or {})},
        trainer={**options},
    )
    with_them, without = attack.releases([], engine), attack.releases(absent, engine)
    assert len(with_them) == len(without) > 0
    return max(float((a - b).norm()) for a, b in zip(with_them, without, strict=True))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_user_with_all_their_records_moves_a_sum_by_c(
    number: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    distance = moved(monkeypatch, number, "user_id", [4], 5, accumulate_grad_batches=accumulate)
    assert 0.9 * CLIP < distance <= LIMIT


@pytest.mark.parametrize(
    ("engine", "privacy"),
    [
        ("ghost", {}),
        ("loop", {}),
        ("vmap", {"augmentations": 2}),
    ],
    ids=str,
)
def test_so_does_a_user_under_every_engine(
    engine: str, privacy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.5 * CLIP < moved(monkeypatch, 2, "user_id", [4], 5, engine, privacy) <= LIMIT


@pytest.mark.parametrize("clipping", ["automatic", "per_layer", "adaptive"])
@pytest.mark.filterwarnings("ignore:.*the noisy count costs")
def test_other_clippings_plan_and_charge_for_units(clipping: str) -> None:
    """As for as many records as there are users."""
    found = []
    for data, unit in ((Owned(), {"unit": "user_id", "records_per_unit": 2}), (records(USERS), {})):
        callback = Lap2Privacy(eps=30.0, clipping=clipping, **unit)
        fit(callback, data=data)
        found.append((callback.noise_multiplier, callback.epsilon, callback.steps, callback.sample_rate))
    assert found[0] == found[1]
    assert found[0][2] == 8


def test_record_by_record_the_same_user_moves_it_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(monkeypatch, 1, None, [10, 11, 12], 13) > 1.5 * CLIP


@pytest.mark.parametrize("wrapped", [Subset, ConcatDataset])
def test_torch_containers_keep_the_ids(wrapped: Any) -> None:
    data = Subset(Owned(), range(0, RECORDS, 2)) if wrapped is Subset else ConcatDataset([Owned(), Owned()])
    callback = Lap2Privacy(eps=3.0, unit="user_id", records_per_unit=2)
    if wrapped is Subset:
        fit(callback, data=data)
        assert callback.report().num_examples == USERS // 2
        assert callback.report().num_records == 16
    else:
        fit(callback, data=data, batch_size=6)
        assert callback.report().num_examples == USERS
        assert callback.steps == 2 * 2


def test_workers_and_unreadable_records() -> None:
    class Broken(Owned):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("unreadable")
            return super().__getitem__(index)

    data = DataLoader(Broken(), batch_size=4, num_workers=1)
    callback = Lap2Privacy(eps=3.0, unit="user_id", records_per_unit=2, on_record_error="zero")
    quiet_trainer(pl, callback, max_epochs=1, limit_train_batches=0.7).fit(classifier(pl), data)
    assert callback.steps == 2


def test_drop_last_counts_units() -> None:
    for batch_size, steps in ((5, 2), (12, 1)):
        callback = Lap2Privacy(eps=3.0, unit="user_id", delta=1e-3)
        loader = DataLoader(Owned(), batch_size=batch_size, drop_last=True)
        quiet_trainer(pl, callback, max_epochs=1).fit(classifier(pl), loader)
        assert callback.steps == steps


# -- report, ledger, files --------------------------------------------------------------------------------------------


def test_the_report_says_whose_privacy_it_is() -> None:
    callback = Lap2Privacy(eps=3.0, unit=owners, records_per_unit=3)
    fit(callback)
    report = callback.report()
    assert report.adjacency == "add/remove one user (owners)"
    assert (report.unit, report.records_per_unit) == ("owners", 3)
    assert (report.num_examples, report.num_records, report.sample_rate) == (USERS, RECORDS, 3 / USERS)
    assert "differentially private under add/remove one user (owners)" in str(report)
    assert any("for one user with all records" in text for text in report.caveats)
    assert not any("for one example" in text for text in report.caveats)


def test_delta_is_compared_with_the_number_of_units() -> None:
    with pytest.raises(UnsupportedSettingError, match="N=12 examples"):
        fit(Lap2Privacy(eps=3.0, delta=0.09, unit="user_id"))


def test_ids_are_in_no_file_and_no_message(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    secret = "zaphod-"
    callback = Lap2Privacy(eps=3.0, unit="user_id", records_per_unit=2)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True)
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(callback, checkpoint, data=Owned(secret), logger=logger, default_root_dir=tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {".ckpt", ".txt", ".json", ".md", ".csv"} <= {path.suffix for path in files}
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    printed = capsys.readouterr()
    assert secret not in printed.out + printed.err + caplog.text + repr(callback._session) + str(callback.state_dict())


@pytest.mark.parametrize(("before", "after"), [(None, "user_id"), ("user_id", None), ("user_id", "owners")])
def test_one_ledger_has_one_unit(before: str | None, after: str | None, tmp_path: Path) -> None:
    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0, unit=before), max_epochs=1)
    module = classifier(pl)
    trainer.fit(module, DataLoader(Owned(), batch_size=3))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    message = f"kept with unit={before!r} and cannot be continued with unit={after!r}; pass unit={before!r}"
    with pytest.raises(ValueError, match=message):
        fit(Lap2Privacy(eps=5.0, unit=after), ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=message):
        fit(Lap2Privacy(eps=5.0, unit=after), module=module)


def test_a_resumed_run_is_the_run_in_one(tmp_path: Path) -> None:
    found = []
    for halves in (False, True):
        module = classifier(pl)
        for epochs in (1, 2) if halves else (2,):
            callback = Lap2Privacy(eps=20.0, noise_multiplier=1.5, noise_seed=3, unit="user_id", records_per_unit=2)
            trainer = quiet_trainer(pl, callback, max_epochs=epochs)
            path = tmp_path / "half.ckpt" if epochs == 2 and halves else None
            trainer.fit(module, DataLoader(Owned(), batch_size=3), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        found.append((weights(module), callback.steps, callback.epsilon))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-7)
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == 8


def test_a_ledger_from_before_units_is_one_of_records() -> None:
    callback = Lap2Privacy(eps=3.0)
    fit(callback)
    ledger = callback._ledger
    state = {name: value for name, value in ledger.state_dict().items() if name not in ("unit", "checksum")}
    again = Lap2Privacy(eps=3.0)
    again.load_state_dict({**state, "checksum": checksum(state)})
    assert again.steps == callback.steps
    with pytest.raises(ValueError, match="kept with unit=None"):
        Lap2Privacy(eps=3.0, unit="user_id").load_state_dict({**state, "checksum": checksum(state)})


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"records_per_unit": 2}, ValueError, "records_per_unit=2 has no meaning without unit"),
        ({"unit": "user_id", "records_per_unit": 0}, ValueError, "records_per_unit must be at least 1"),
        ({"unit": "user_id", "records_per_unit": 1.5}, TypeError, "records_per_unit must be an integer"),
        ({"unit": 3}, TypeError, "unit must be the name"),
        ({"unit": ""}, TypeError, "unit must be the name"),
        ({"unit": "user_id", "sampling": "none"}, ValueError, "unit='user_id' with sampling='none'.*use sampling"),
    ],
    ids=str,
)
def test_arguments_without_a_meaning(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Lap2Privacy(eps=1.0, **options)


class Stream(IterableDataset[Any]):
    user_id = (1, 2, 3)

    def __iter__(self) -> Any:
        return iter(records(3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream, "unit='user_id' draws the records of a user by their indices, which an IterableDataset does not have"),
        (lambda: records(9), "TensorDataset has no attribute, method or column of this name"),
    ],
    ids=["stream", "no ids"],
)
def test_data_without_owners(data: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=message):
        fit(Lap2Privacy(eps=1.0, unit="user_id"), data=data())


def test_users_that_change_between_epochs() -> None:
    data = Owned()

    class Changing(pl.LightningDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            loader = DataLoader(Owned(), batch_size=3)
            if data.user_id:
                data.user_id = []
            else:
                loader.dataset.user_id[0] = "another"  # type: ignore[attr-defined]
            return loader

    trainer = quiet_trainer(pl, Lap2Privacy(eps=3.0, unit="user_id"), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(UnsupportedSettingError, match="the train data changed between epochs"):
        trainer.fit(classifier(pl), datamodule=Changing())


def test_a_larger_batch_than_there_are_users() -> None:
    with pytest.raises(ValueError, match="larger than the data.*num_examples=12"):
        fit(Lap2Privacy(eps=3.0, unit="user_id"), batch_size=13)


class OwnedModule(pl.LightningDataModule):  # type: ignore[name-defined, misc]
    def train_dataloader(self) -> Any:
        return DataLoader(Owned(), batch_size=3)


@pytest.mark.filterwarnings("ignore")  # of jsonargparse
def test_lightning_cli_knows_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    config = tmp_path / "units.yaml"
    config.write_text(
        "trainer:\n  max_epochs: 1\n  accelerator: cpu\n  logger: false\n  enable_checkpointing: false\n"
        "  callbacks:\n    - class_path: lightning_lap2.Lap2Privacy\n"
        "      init_args: {eps: 3.0, unit: user_id, records_per_unit: 4}\n"
    )
    options = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(Plain, OwnedModule, args=["--config", str(config)], **options)
    callback = next(c for c in cli.trainer.callbacks if isinstance(c, Lap2Privacy))
    assert (callback.settings.unit, callback.settings.records_per_unit) == ("user_id", 4)
    cli.trainer.fit(classifier(pl), datamodule=cli.datamodule)
    assert callback.report().adjacency == "add/remove one user (user_id)"


def test_settings_know_their_rows() -> None:
    settings = Lap2Privacy(eps=1.0, unit="user_id").settings
    assert isinstance(settings, Settings)
    assert (settings.rows_per_unit, settings.unit_name) == (1, "user_id")
    assert settings.adjacency == "add/remove one user (user_id)"
