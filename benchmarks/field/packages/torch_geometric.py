"""torch_geometric: its graphs and its DataLoader in a LightningModule of the user's."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import Case, Package, Run

_GRAPHS = 24


def _graphs() -> list[Any]:
    import torch
    from torch_geometric.data import Data

    made = []
    for seed in range(_GRAPHS):
        random = torch.Generator().manual_seed(seed)
        nodes = 4 + seed % 3
        x = torch.randn(nodes, 5, generator=random)
        around = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        made.append(Data(x=x, edge_index=torch.cat([around, around.flip(0)], 1), y=torch.tensor([seed % 2])))
    return made


def _fit(layer: str, run: Run) -> Any:
    import lightning as L
    import torch
    import torch.nn.functional as F
    from torch_geometric import nn as gnn
    from torch_geometric.loader import DataLoader

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            make = getattr(gnn, layer)
            self.first, self.second, self.head = make(5, 8), make(8, 8), torch.nn.Linear(8, 2)

        def training_step(self, data: Any, batch_idx: int) -> Any:
            h = self.first(data.x, data.edge_index).relu()
            h = self.second(h, data.edge_index).relu()
            out = self.head(gnn.global_mean_pool(h, data.batch))
            loss = F.cross_entropy(out, data.y)
            self.log("train_acc", (out.argmax(1) == data.y).float().mean(), batch_size=data.num_graphs)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    trainer = L.Trainer(
        max_steps=run.max_steps, max_epochs=-1, callbacks=run.callbacks, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(_graphs(), batch_size=run.batch_size, shuffle=True))


def _case(layer: str) -> Case:
    return Case(layer, lambda run: _fit(layer, run), "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`", records=_GRAPHS)


PACKAGE = Package(
    name="torch-geometric",
    environment="graph",
    requires=("torch-geometric",),
    cases=(_case("GCNConv"), _case("SAGEConv"), _case("GATConv")),
)
