"""scvi-tools: variational models of single cells with their own loader, training plan and Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_CELLS, _GENES = 32, 12


def _cells() -> Any:
    import anndata
    import numpy as np

    random = np.random.default_rng(0)
    counts = random.poisson(3.0, size=(_CELLS, _GENES)).astype("float32")
    cells = anndata.AnnData(counts)
    cells.obs["batch"] = (random.random(_CELLS) > 0.5).astype(str)
    return cells


def _case(kind: str, refused: str | None = None, **options: Any) -> Case:
    def fit(run: Run) -> Any:
        import scvi

        scvi.settings.progress_bar_style = "tqdm"
        cells, model = _cells(), getattr(scvi.model, kind)
        model.setup_anndata(cells, batch_key="batch")
        made = model(cells, n_hidden=8, n_latent=4, n_layers=1, **options)
        made.train(
            max_epochs=-(-run.max_steps * run.batch_size // _CELLS), batch_size=run.batch_size, train_size=1.0,
            accelerator="cpu", enable_progress_bar=False, callbacks=run.callbacks, logger=False,
        )  # fmt: skip

    said = "".join(f", {name}={value!r}" for name, value in options.items())
    wrote = f"`{kind}(cells{said}).train(callbacks=[Lap2Privacy(eps=8.0)])`"
    return Case(kind + (", BatchNorm" if refused and not options else ""), fit, wrote, records=_CELLS, refused=refused)


_NO_BATCH_NORM = {"use_batch_norm": "none", "use_layer_norm": "both"}

PACKAGE = Package(
    name="scvi-tools",
    environment="cells",
    requires=("scvi-tools",),
    cases=(
        _case("SCVI", **_NO_BATCH_NORM),
        _case("LinearSCVI", refused="BatchNorm1d", use_batch_norm=False),
        _case("SCVI", refused="BatchNorm1d"),
    ),
)
