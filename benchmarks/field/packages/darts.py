"""darts: global forecasting models, whose ``fit`` builds loader, module and Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_INPUT, _OUTPUT, _WINDOWS = 12, 4, 24


def _series() -> Any:
    """``_WINDOWS`` training samples: windows of one series."""
    import numpy as np
    import pandas as pd
    from darts import TimeSeries

    length = _WINDOWS + _INPUT + _OUTPUT - 1
    values = np.sin(np.arange(length) / 3) + 0.1 * np.random.default_rng(0).normal(size=length)
    return TimeSeries.from_times_and_values(pd.date_range("2020-01-01", periods=length), values.astype("float32"))


def _case(kind: str, wrote: str, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        from darts import models

        series = _series()
        steps = -(-_WINDOWS // run.batch_size)
        made = getattr(models, kind)(
            input_chunk_length=_INPUT,
            batch_size=run.batch_size,
            n_epochs=-(-run.max_steps // steps),
            random_state=0,
            pl_trainer_kwargs={
                "callbacks": run.callbacks, "accelerator": "cpu", "enable_progress_bar": False, "logger": False,
                "enable_model_summary": False, "enable_checkpointing": False,
            },
            **({} if kind == "RNNModel" else {"output_chunk_length": _OUTPUT}),
            **options,
        )  # fmt: skip
        return made.fit(series)

    return Case(kind, fit, wrote, records=_WINDOWS)


_WROTE = '`{}(..., pl_trainer_kwargs={{"callbacks": [Lap2Privacy(eps=8.0)]}})`'

PACKAGE = Package(
    name="darts",
    environment="darts",
    requires=("darts[torch]",),
    namespace="pytorch_lightning",
    cases=(
        _case("NBEATSModel", _WROTE.format("NBEATSModel"), num_stacks=2, num_blocks=1, num_layers=2, layer_widths=16),
        _case("RNNModel", _WROTE.format("RNNModel"), model="LSTM", hidden_dim=8, training_length=_INPUT + _OUTPUT - 1),
        _case("TiDEModel", _WROTE.format("TiDEModel"), hidden_size=16, temporal_decoder_hidden=8),
        _case("TFTModel", _WROTE.format("TFTModel"), hidden_size=8, num_attention_heads=2, add_relative_index=True),
    ),
)
