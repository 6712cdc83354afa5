"""Small decoders whose layers ``configure_model`` shards where there is a mesh to shard over."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import LIGHTNING

pl = LIGHTNING.pl
VOCABULARY, LENGTH = 13, 5
Trained = Literal["lora", "biases", "all", "head"]


class LoRA(nn.Module):
    """A linear layer and a low-rank change of it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LoRA(width, 3 * width), LoRA(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """``[B, T]`` tokens to ``[B, T, V]`` scores; an odd width, so that no parameter splits evenly."""

    def __init__(self, width: int = 7, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Sharded(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A decoder, sharded layer by layer under ModelParallelStrategy and whole under any other.

    Args:
        trained: which parameters train: ``"lora"`` and ``"biases"`` are replicated beside a sharded frozen base,
            ``"all"`` and ``"head"`` are sharded themselves.
        seed: of the initial weights.
        mesh: shape of the mesh of replicas and shards; ``None``: the strategy's own.
        options: of ``fully_shard``.
    """

    def __init__(
        self,
        trained: Trained = "lora",
        *,
        seed: int = 1,
        double: bool = False,
        mesh: tuple[int, int] | None = None,
        optimizer: Any = torch.optim.SGD,
        rate: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__()
        self.trained, self.mesh, self.options = trained, mesh, options
        self.optimizer, self.rate = optimizer, rate
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = Decoder()
        if double:
            self.model.double()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trains(name))

    def _trains(self, name: str) -> bool:
        kinds = {
            "lora": name.endswith((".a", ".b")),
            "biases": "bias" in name,
            "head": name.startswith("head"),
            "all": True,
        }
        return kinds[self.trained]

    @property
    def replicated(self) -> set[nn.Parameter]:
        """What stays whole on every rank."""
        return {p for p in self.model.parameters() if p.requires_grad and self.trained in ("lora", "biases")}

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(self.model, _sharded_class()):
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = mesh["data_parallel"]
        if self.mesh is not None:
            mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicas", "shards"))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": self.replicated, **self.options}
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        scores = self.model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.rate)


def _sharded_class() -> Any:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def whole_weights(module: nn.Module) -> Tensor:
    """All parameters in one vector; of sharded ones all entries, which every rank has to ask for."""
    found = []
    for parameter in module.parameters():
        value = parameter.detach()
        found.append((value.full_tensor() if hasattr(value, "full_tensor") else value).reshape(-1).double())
    return torch.cat(found)


def sentences(number: int, batch_size: int) -> DataLoader[Any]:
    tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)
