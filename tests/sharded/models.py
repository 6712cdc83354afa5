"""Small decoders whose layers ``configure_model`` shards where there is a mesh to shard over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.workloads import LanguageModel
from tests.helpers import LIGHTNING

pl = LIGHTNING.pl
VOCABULARY, LENGTH = 13, 5


class LoRA(nn.Module):
    """A linear layer and a low-rank change of it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + (x.to(self.a.dtype) @ self.a.t() @ self.b.t()).to(out.dtype)


class Block(nn.Module):
    """
    Args:
        derived: one weight is computed from two parameters.
        spread: one parameter is used in a way that the ghost engine has no rule for.
        unused: a layer that no loss uses.
    """

    def __init__(self, width: int, *, derived: bool = False, spread: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LoRA(width, 3 * width), LoRA(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        if derived:
            nn.utils.parametrizations.weight_norm(self.mlp[0])
        self.unused = nn.Linear(width, 3) if unused else None
        self.pairs = nn.Bilinear(width, width, width) if spread else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        if self.pairs is not None:
            x = x + self.pairs(x, self.norm2(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """``[B, T]`` tokens to ``[B, T, V]`` scores; by default of an odd width, so that no parameter splits evenly.

    Args:
        tied: embedding and head are one parameter.
        repeated: the blocks run twice.
        checkpointed: activations of blocks are computed again for the backward pass.
        options: of blocks.
    """

    def __init__(
        self,
        width: int = 7,
        blocks: int = 2,
        *,
        tied: bool = False,
        repeated: bool = False,
        checkpointed: bool = False,
        **options: bool,
    ) -> None:
        super().__init__()
        self.passes, self.checkpointed = 1 + repeated, checkpointed
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, **options) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight
        self.between: Callable[[], None] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks] * self.passes:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.between is not None:
                self.between()
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def of_the_benchmarks() -> nn.Module:
    """The benchmarks' transformer, small."""
    return LanguageModel(VOCABULARY, 12, 2, LENGTH)


def hugging_face() -> nn.Module:
    """A Llama of two layers with LoRA by peft."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=17, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return Scores(inject_adapter_in_model(lora, LlamaForCausalLM(config)))


class Scores(nn.Module):
    """A causal model of transformers as ``[B, T]`` to ``[B, T, V]``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @property
    def blocks(self) -> nn.ModuleList:
        return self.net.model.layers  # type: ignore[return-value, union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


class Sharded(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A decoder, sharded layer by layer under ModelParallelStrategy and whole under any other.

    Args:
        trained: which parameters train: ``"lora"`` and ``"biases"`` are replicated beside a sharded frozen base,
            ``"all"`` and ``"head"`` are sharded themselves; ``"lora, norms sharded"`` has both kinds.
        adapters_seed: of replicated weights, if not those of all ranks.
        mesh: shape of the mesh of replicas and shards; ``None``: the strategy's own.
        only_root, whole: one group of parameters for all layers; none.
        synchronised: the logged loss is averaged over ranks.
        inside: called between two layers.
        beside: gives what is added to the loss.
        net: options of the decoder, or what makes another one, whose ``blocks`` are sharded.
        options: of ``fully_shard``.
    """

    def __init__(
        self,
        trained: str = "lora",
        *,
        double: bool = False,
        adapters_seed: int = 0,
        mesh: tuple[int, int] | None = None,
        only_root: bool = False,
        whole: bool = False,
        synchronised: bool = False,
        inside: Callable[[Any], None] | None = None,
        beside: Callable[[Any], Any] | None = None,
        optimizer: Any = torch.optim.SGD,
        rate: float = 0.5,
        net: dict[str, Any] | Callable[[], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.trained, self.mesh, self.options = trained, mesh, options
        self.only_root, self.whole, self.synchronised = only_root, whole, synchronised
        self.beside, self.optimizer, self.rate = beside, optimizer, rate
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model: Any = net() if callable(net) else Decoder(**(net or {}))
        if double:
            self.model.double()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trains(name))
            if adapters_seed and parameter.requires_grad:
                parameter.data.mul_(1 + adapters_seed)
        if inside is not None:
            self.model.between = lambda: inside(self)

    def _trains(self, name: str) -> bool:
        adapter, norm = _is_adapter(name), "norm" in name
        kinds = {"lora": adapter, "biases": "bias" in name, "head": name.startswith("head"), "all": True}
        return kinds.get(self.trained, adapter or norm)

    @property
    def replicated(self) -> set[nn.Parameter]:
        """What stays whole on every rank."""
        return {p for n, p in self.model.named_parameters() if self._is_replicated(n)}

    def _is_replicated(self, name: str) -> bool:
        kinds = {"lora": True, "biases": True, "lora, norms sharded": _is_adapter(name)}
        return self._trains(name) and kinds.get(self.trained, False)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or self.whole or isinstance(self.model, FSDPModule):
            return
        mesh = mesh["data_parallel"]
        if self.mesh is not None:
            mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicas", "shards"))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": self.replicated, **self.options}
        for block in () if self.only_root else self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0] if isinstance(batch, list) else batch
        scores = self.model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, sync_dist=self.synchronised, on_epoch=True, on_step=True)
        if self.beside is not None and (more := self.beside(self)) is not None:
            loss = loss + more
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.rate)


def _is_adapter(name: str) -> bool:
    return name.endswith((".a", ".b")) or ".lora_" in name


def whole_weights(module: nn.Module, *, gradients: bool = False) -> Tensor:
    """All parameters in one vector, or the gradients of those that train; of sharded ones all entries, for which every
    rank has to ask."""
    found = []
    for parameter in module.parameters():
        if gradients and not parameter.requires_grad:
            continue
        value: Any = parameter.grad if gradients else parameter.detach()
        found.append((value.full_tensor() if hasattr(value, "full_tensor") else value).reshape(-1).double().clone())
    return torch.cat(found)


def sentences(number: int, batch_size: int) -> DataLoader[Any]:
    tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


class Ragged(Dataset[Tensor]):
    """Sentences of three lengths, so that a draw runs in up to three groups, and ranks in different numbers of them."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = [3 if k % 2 else 4 + k % 4 // 2 for k in range(number)]
        self.rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)
