"""gluonts: its torch estimators, which build loader, LightningModule and Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_SERIES, _LENGTH, _HORIZON = 24, 60, 4


def _data() -> Any:
    import numpy as np
    from gluonts.dataset.pandas import PandasDataset
    import pandas as pd

    random = np.random.default_rng(0)
    return PandasDataset({
        f"series {number}": pd.DataFrame(
            {"target": np.sin(np.arange(_LENGTH) / 3 + number) + 0.1 * random.normal(size=_LENGTH)},
            index=pd.date_range("2020-01-01", periods=_LENGTH),
        )
        for number in range(_SERIES)
    })  # fmt: skip


def _case(kind: str, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        from gluonts.torch import model

        estimator = getattr(model, kind) if hasattr(model, kind) else getattr(__import__("gluonts.torch", fromlist=[kind]), kind)
        made = estimator(
            prediction_length=_HORIZON, batch_size=run.batch_size, num_batches_per_epoch=run.max_steps,
            trainer_kwargs={
                "max_epochs": 1, "callbacks": run.callbacks, "accelerator": "cpu", "enable_progress_bar": False,
                "logger": False, "enable_checkpointing": False, "enable_model_summary": False,
            },
            **options,
        )  # fmt: skip
        made.train(_data())

    return Case(kind, fit, f'`{kind}(..., trainer_kwargs={{"callbacks": [Lap2Privacy(eps=8.0)]}})`', records=_SERIES)


PACKAGE = Package(
    name="gluonts",
    environment="pf",
    requires=("gluonts[torch]",),
    cases=(
        _case("SimpleFeedForwardEstimator", hidden_dimensions=[16]),
        _case("DeepAREstimator", freq="D", num_layers=1, hidden_size=8),
    ),
)
