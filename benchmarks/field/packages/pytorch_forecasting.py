"""pytorch-forecasting: its ``TimeSeriesDataSet``, loader and models with Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_ENCODER, _HORIZON, _SERIES, _LENGTH = 8, 4, 6, 15
_RECORDS = _SERIES * (_LENGTH - _ENCODER - _HORIZON + 1)


def _dataset() -> Any:
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    random = np.random.default_rng(0)
    time = np.tile(np.arange(_LENGTH), _SERIES)
    series = np.repeat(np.arange(_SERIES), _LENGTH)
    frame = pd.DataFrame({
        "time": time, "series": series.astype(str),
        "value": np.sin(time / 3 + series) + 3 + 0.1 * random.normal(size=time.size),
    })  # fmt: skip
    return TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=_ENCODER,
        max_prediction_length=_HORIZON, time_varying_unknown_reals=["value"],
    )  # fmt: skip


def _case(kind: str, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        import lightning as L
        import pytorch_forecasting

        training = _dataset()
        model = getattr(pytorch_forecasting, kind).from_dataset(training, learning_rate=1e-2, **options)
        trainer = L.Trainer(
            max_steps=run.max_steps, max_epochs=-1, callbacks=run.callbacks, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, training.to_dataloader(train=True, batch_size=run.batch_size, num_workers=0))

    return Case(kind, fit, "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`", records=_RECORDS)


PACKAGE = Package(
    name="pytorch-forecasting",
    environment="pf",
    requires=("pytorch-forecasting",),
    cases=(
        _case("NBeats", widths=[16, 16], num_blocks=[1, 1], num_block_layers=[2, 2],
              expansion_coefficient_lengths=[2, 4]),
        _case("TemporalFusionTransformer", hidden_size=8, attention_head_size=1, hidden_continuous_size=4, dropout=0.1),
        _case("DeepAR", hidden_size=8, rnn_layers=1),
    ),
)  # fmt: skip
