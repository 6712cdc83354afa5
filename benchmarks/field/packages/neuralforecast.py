"""neuralforecast: its models in ``NeuralForecast``, which builds data set, loader and Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_INPUT, _HORIZON, _SERIES, _LENGTH = 12, 4, 24, 40


def _frame() -> Any:
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    parts = [
        pd.DataFrame({
            "unique_id": f"series {number}",
            "ds": pd.date_range("2020-01-01", periods=_LENGTH),
            "y": np.sin(np.arange(_LENGTH) / 3 + number) + 0.1 * random.normal(size=_LENGTH),
        })
        for number in range(_SERIES)
    ]  # fmt: skip
    return pd.concat(parts)


def _case(kind: str, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        from neuralforecast import NeuralForecast, models

        made = getattr(models, kind)(
            h=_HORIZON, input_size=_INPUT, batch_size=run.batch_size, max_steps=run.max_steps, random_seed=0,
            callbacks=run.callbacks, accelerator="cpu", enable_progress_bar=False, logger=False,
            enable_checkpointing=False, enable_model_summary=False, windows_batch_size=None, **options,
        )  # fmt: skip
        NeuralForecast(models=[made], freq="D").fit(_frame())

    return Case(kind, fit, f"`{kind}(..., callbacks=[Lap2Privacy(eps=8.0)])`", records=_SERIES)


PACKAGE = Package(
    name="neuralforecast",
    environment="forecasting",
    requires=("neuralforecast",),
    namespace="pytorch_lightning",
    cases=(
        _case("NHITS", stack_types=["identity", "identity"], mlp_units=[[16, 16]] * 2, n_blocks=[1, 1],
              n_pool_kernel_size=[2, 1], n_freq_downsample=[2, 1]),
        _case("MLP", num_layers=2, hidden_size=16),
    ),
)  # fmt: skip
