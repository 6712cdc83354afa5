"""gluonts: its torch estimators, which build loader, LightningModule and Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_SERIES, _LENGTH, _HORIZON = 24, 60, 4


def _data() -> Any:
    import numpy as np
    import pandas as pd
    from gluonts.dataset.pandas import PandasDataset

    random = np.random.default_rng(0)
    return PandasDataset({
        f"series {number}": pd.DataFrame(
            {"target": (np.sin(np.arange(_LENGTH) / 3 + number) + 0.1 * random.normal(size=_LENGTH)).astype("float32")},
            index=pd.date_range("2020-01-01", periods=_LENGTH),
        )
        for number in range(_SERIES)
    })  # fmt: skip


def _case(kind: str, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        from gluonts import torch

        made = getattr(torch, kind)(
            prediction_length=_HORIZON, batch_size=run.batch_size, num_batches_per_epoch=run.max_steps,
            trainer_kwargs={
                "max_epochs": 1, "callbacks": run.callbacks, "accelerator": "cpu", "enable_progress_bar": False,
                "logger": False, "enable_model_summary": False,
            },
            **options,
        )  # fmt: skip
        made.train(_data())

    refused = "at which rate it draws a record is not known"
    wrote = f'`{kind}(..., trainer_kwargs={{"callbacks": [Lap2Privacy(eps=8.0)]}})`'
    return Case(kind, fit, wrote, records=_SERIES, refused=refused)


PACKAGE = Package(
    name="gluonts",
    environment="pf",
    requires=("gluonts[torch]",),
    cases=(
        _case("SimpleFeedForwardEstimator", hidden_dimensions=[16]),
        _case("DeepAREstimator", freq="D", num_layers=1, hidden_size=8),
    ),
)
