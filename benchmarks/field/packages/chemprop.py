"""chemprop: message-passing networks on molecules, its loader and LightningModule."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_SMILES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCl", "C1CCCCC1", "CC(C)O", "N#CC", "CCS", "OCCO", "CCC", "CNC"] * 2


def _fit(run: Run, loader_options: dict[str, Any], **options: Any) -> Any:
    import lightning.pytorch as pl
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(smiles, [float(k % 5)]) for k, smiles in enumerate(_SMILES)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=run.batch_size, **loader_options)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=2), nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=16), **options,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_steps=run.max_steps, max_epochs=-1, callbacks=run.callbacks, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)


def _case(name: str, loader_options: dict[str, Any] | None = None, refused: str | None = None, **options: Any) -> Case:
    wrote = "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`"
    return Case(
        name, lambda run: _fit(run, loader_options or {}, **options), wrote, records=len(_SMILES), refused=refused
    )


PACKAGE = Package(
    name="chemprop",
    environment="graph",
    requires=("chemprop",),
    cases=(
        _case("MPNN"),
        _case("MPNN, seeded loader", {"seed": 0}, refused="SeededSampler"),
        _case("MPNN, BatchNorm", refused="BatchNorm1d", batch_norm=True),
    ),
)
