"""pytorch-tabular: models of tables in ``TabularModel``, which builds loader, module and Trainer from configs."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_ROWS = 32


def _table() -> Any:
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=_ROWS), "b": random.normal(size=_ROWS)})
    frame["kind"] = random.choice(["x", "y", "z"], size=_ROWS)
    frame["target"] = frame["a"] - 2 * frame["b"] + (frame["kind"] == "x")
    return frame


def _case(kind: str, name: str | None = None, refused: str | None = None, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        import pytorch_tabular
        from pytorch_tabular import models
        from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

        made = pytorch_tabular.TabularModel(
            data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
            model_config=getattr(models, kind)(task="regression", **options),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(
                batch_size=run.batch_size, max_epochs=-(-run.max_steps * run.batch_size // _ROWS),
                accelerator="cpu", progress_bar="none", early_stopping=None, checkpoints=None, load_best=False,
                trainer_kwargs={"enable_model_summary": False, "limit_val_batches": 0},
            ),
            verbose=False,
        )  # fmt: skip
        table = _table()
        made.fit(train=table, validation=table[:4], callbacks=list(run.callbacks))

    said = "".join(f", {name}={value!r}" for name, value in options.items() if name == "batch_norm_continuous_input")
    wrote = f"`{kind}(...{said})` and `fit(train, callbacks=[Lap2Privacy(eps=8.0)])`"
    return Case(name or kind.removesuffix("Config"), fit, wrote, records=_ROWS, refused=refused)


_NO_BATCH_NORM = {"batch_norm_continuous_input": False}

PACKAGE = Package(
    name="pytorch_tabular",
    environment="tabular",
    requires=("pytorch_tabular", "requests"),
    namespace="pytorch_lightning",
    cases=(
        _case("CategoryEmbeddingModelConfig", layers="16-8", **_NO_BATCH_NORM),
        _case("FTTransformerConfig", input_embed_dim=8, num_heads=2, num_attn_blocks=1, **_NO_BATCH_NORM),
        _case("TabTransformerConfig", input_embed_dim=8, num_heads=2, num_attn_blocks=1, **_NO_BATCH_NORM),
        _case("GANDALFConfig", gflu_stages=2, **_NO_BATCH_NORM),
        _case("CategoryEmbeddingModelConfig", "CategoryEmbeddingModel, BatchNorm", "BatchNorm1d", layers="16-8"),
    ),
)
