"""Steps of further kinds: losses, layers and operations that tutorials and packages are made of."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.ordinary.cases import BINARY, CLASSES, IMAGES, REAL, SEQUENCES, TOKENS, _linear, _randn, classify
from tests.ordinary.harness import Case

PAIRS = [(_randn(2, 5), k % 3) for k in range(5)]
CTC = [(_randn(9, 4), torch.randint(1, 4, (3,))) for _ in range(4)]
DENSE = [(_randn(3, 8, 8), torch.randint(0, 3, (8, 8))) for _ in range(3)]


def focal(m: Any, batch: Any) -> Tensor:
    x, y = batch
    log_p = F.log_softmax(m.net(x), dim=-1).gather(1, y[:, None]).squeeze()
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def smooth_weighted(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return m.loss(m.net(x), y)


def one_hot_mse(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(m.net(x).softmax(-1), F.one_hot(y, num_classes=3).float())


def multi_task(m: Any, batch: Any) -> Any:
    x, y = batch
    features = m.net(x)
    losses = {"class": F.cross_entropy(features, y), "size": features.norm(dim=1).mean()}
    m.log_dict({f"train/{name}": value for name, value in losses.items()}, on_epoch=True, prog_bar=True)
    m.log("train/total", sum(losses.values()).item())
    return {"loss": sum(losses.values()), "preds": features.argmax(-1), "targets": y}


def two_views(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    a, b = m.net(x[:, 0]), m.net(x[:, 1])
    return 1 - F.cosine_similarity(a, b.detach()).mean()


def distillation(m: Any, batch: Any) -> Tensor:
    x, y = batch
    with torch.no_grad():
        m.teacher.eval()
        soft = F.softmax(m.teacher(x) / 2, dim=-1)
    logits = m.net(x)
    return F.cross_entropy(logits, y) + 4 * F.kl_div(F.log_softmax(logits / 2, -1), soft, reduction="batchmean")


def frozen_backbone(m: Any, batch: Any) -> Tensor:
    x, y = batch
    m.backbone.eval()  # Lightning has called .train() on everything
    with torch.no_grad():
        features = m.backbone(x)
    return F.cross_entropy(m.net(features), y)


def vector_quantised(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    z = m.net(x)
    nearest = m.codes.weight[torch.cdist(z, m.codes.weight).argmin(dim=1)]
    quantised = z + (nearest - z).detach()
    return F.mse_loss(quantised, torch.zeros_like(z)) + F.mse_loss(nearest, z.detach())


def log_prob(m: Any, batch: Any) -> Tensor:
    x, y = batch
    policy = torch.distributions.Categorical(logits=m.net(x))
    m.log("entropy", policy.entropy().mean())
    return -policy.log_prob(y).mean() - 0.01 * policy.entropy().mean()


def gaussian_nll(m: Any, batch: Any) -> Tensor:
    x, y = batch
    mean, log_var = m.net(x).chunk(2, dim=-1)
    return -torch.distributions.Normal(mean, (0.5 * log_var).exp()).log_prob(y).mean()


def negative_binomial(m: Any, batch: Any) -> Tensor:
    """As single-cell and count models have it."""
    x, y = batch
    counts = torch.full_like(x[:, :1], 1.0) * y.float()[:, None]
    mean, theta = F.softplus(m.net(x)[:, :1]), F.softplus(m.net(x)[:, 1:2])
    return -torch.distributions.NegativeBinomial(theta, logits=(mean / theta).log()).log_prob(counts).mean()


def causal_attention(m: Any, batch: Any) -> Tensor:
    x, y = batch
    mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -math.inf), diagonal=1)
    out, _ = m.attention(x, x, x, attn_mask=mask, need_weights=False)
    return F.cross_entropy(m.head(out[:, -1]), y)


def masked_mean(m: Any, batch: Any) -> Tensor:
    x, y = batch
    mask = (x.sum(-1) > 0).float()
    pooled = (m.net(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return F.cross_entropy(pooled, y)


def top_k(m: Any, batch: Any) -> Tensor:
    x, y = batch
    best, _ = m.net(x).topk(3, dim=1)
    return F.cross_entropy(best.sort(dim=1).values.mean(1), y)


def ctc(m: Any, batch: Any) -> Tensor:
    x, y = batch
    log_p = m.net(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
    return F.ctc_loss(log_p, y, lengths, torch.full((x.shape[0],), y.shape[1], dtype=torch.long))


def segmentation(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = F.interpolate(m.net(x), size=y.shape[-2:], mode="bilinear", align_corners=False)
    p = logits.softmax(1)[:, 1]
    dice = 1 - (2 * (p * (y == 1)).sum((1, 2)) + 1) / (p.sum((1, 2)) + (y == 1).sum((1, 2)) + 1)
    return F.cross_entropy(logits, y, ignore_index=2) + dice.mean()


def spectral(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.net(torch.fft.rfft(x, dim=1).abs().mean(-1)), y)


def scattered(m: Any, batch: Any) -> Tensor:
    tokens, y = batch
    counts = torch.zeros(tokens.shape[0], 9).scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.float))
    return F.cross_entropy(m.net(counts), y)


def checkpointed(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.net[2](checkpoint(m.net[:2], x, use_reentrant=False)), y)


def penalised(m: Any, batch: Any) -> Tensor:
    squares, sizes = (sum(norm(p).sum() for p in m.parameters()) for norm in (torch.square, torch.abs))
    return classify(m, batch) + 1e-3 * squares + 1e-4 * sizes


def scheduled(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    hidden, token, loss = x.new_zeros(x.shape[0], 6), x[:, 0], x.new_zeros(())
    for t in range(1, x.shape[1]):
        hidden = m.cell(token, hidden)
        guess = m.out(hidden)
        loss = loss + F.smooth_l1_loss(guess, x[:, t])
        token = x[:, t] if t % 2 else guess.detach()
    m.log("last", loss)
    return loss / x.shape[1]


def printed_shapes(m: Any, batch: Any) -> Tensor:
    x, y = batch
    assert x.shape[0] == y.shape[0], f"{x.shape} {y.shape}"
    assert x.dtype == torch.float32 and y.min() >= 0 and int(y.max()) < 3 if len(y) > 100 else True
    return classify(m, batch)


def accuracy_by_hand(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.log("acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)
    m.log("acc_item", (logits.argmax(dim=1) == y).sum().item() / len(y))
    m.log("top2", logits.topk(2, dim=1).indices.eq(y[:, None]).any(1).float().mean())
    return F.cross_entropy(logits, y)


def collection(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    values = m.metrics(logits, y)
    m.log_dict(values)
    m.log("mix", 0.5 * values["MulticlassAccuracy"] + 0.5 * values["MulticlassF1Score"])
    m.mean(F.cross_entropy(logits, y))
    m.log("mean", m.mean)
    return F.cross_entropy(logits, y)


def reshaped(m: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(m.net(x.view(x.size(0), -1)).view(-1, 3), y.view(-1))


def flattened_tokens(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    logits = m.net(x)[:, :-1].reshape(-1, 4)
    return F.cross_entropy(logits, x[:, 1:].argmax(-1).reshape(-1))


def binary(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x).squeeze(-1)
    m.log("positive", (torch.sigmoid(logits) > 0.5).float().mean())
    return F.binary_cross_entropy_with_logits(logits, y.float(), pos_weight=m.weight)


def jacobian(m: Any, batch: Any) -> Tensor:
    x, _ = batch
    slopes = torch.func.vmap(torch.func.jacrev(lambda row: m.net(row).sum()))(x)
    return classify(m, batch) + 0.01 * slopes.square().mean()


def _with(**parts: Any) -> Any:
    return lambda: {**_linear()(), **{name: make() for name, make in parts.items()}}


def _teacher() -> dict[str, Any]:
    parts = _linear()()
    return {**parts, "teacher": copy.deepcopy(parts["net"]).requires_grad_(False)}


def _tied() -> dict[str, Any]:
    table = nn.Embedding(9, 4)
    head = nn.Linear(4, 9, bias=False)
    head.weight = table.weight
    return {"table": table, "head": head}


def tied(m: Any, batch: Any) -> Tensor:
    tokens, _ = batch
    return F.cross_entropy(m.head(m.table(tokens)[:, :-1]).transpose(1, 2), tokens[:, 1:])


@torch.inference_mode()
def _log_norms(m: Any, features: Tensor) -> None:
    m.log("norm", features.norm(dim=1).mean())


def inference_mode(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    _log_norms(m, logits)
    with torch.inference_mode(False):
        loss = F.cross_entropy(logits, y)
    return loss + logits.square().mean()


class Scaled(Metric):
    """A loss of forecasting packages: a metric that the step sets up before it calls it."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.add_state("losses", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.losses = self.losses + (self.scale * (prediction - target)).square().sum()
        self.count = self.count + target.numel()

    def compute(self) -> Tensor:
        return self.losses / self.count


def metric_set_up(m: Any, batch: Any) -> Any:
    x, y = batch
    m.loss.scale = 2.0
    loss = m.loss(m.net(x), y)
    if loss.device.type == "mps":
        loss.requires_grad_(True)
    m.log("loss", loss.detach())
    return {"loss": loss * 0.5, "n": len(x)}


MORE_CASES: dict[str, Case] = {
    "focal loss": Case(focal, CLASSES, _linear(), twins=True),
    "smoothed, weighted loss": Case(
        smooth_weighted, CLASSES, _with(loss=lambda: nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1))
    ),
    "one hot": Case(one_hot_mse, CLASSES, _linear()),
    "several losses": Case(multi_task, CLASSES, _linear()),
    "two views": Case(two_views, PAIRS, _linear()),
    "distillation": Case(
        distillation, CLASSES, _teacher, refused_by=("loop",)
    ),  # which wants no mode changed in the step
    "vector quantisation": Case(vector_quantised, CLASSES, _with(codes=lambda: nn.Embedding(4, 3))),
    "categorical policy": Case(log_prob, CLASSES, _linear()),
    "Gaussian likelihood": Case(gaussian_nll, REAL, _linear(2)),
    "negative binomial": Case(negative_binomial, CLASSES, _linear(2)),
    "causal attention": Case(
        causal_attention,
        SEQUENCES,
        lambda: {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)},
    ),
    "masked mean": Case(masked_mean, SEQUENCES, lambda: {"net": nn.Linear(4, 3)}),
    "top k": Case(top_k, SEQUENCES, lambda: {"net": nn.Linear(4, 3)}),
    "CTC": Case(ctc, CTC, lambda: {"net": nn.Linear(4, 4)}),
    "segmentation": Case(
        segmentation,
        DENSE,
        lambda: {"net": nn.Sequential(nn.Conv2d(3, 3, 3, 2), nn.GroupNorm(1, 3), nn.SiLU())},
        logs=False,
    ),
    "spectrum": Case(spectral, SEQUENCES, lambda: {"net": nn.Linear(4, 3)}),
    "scattered counts": Case(scattered, TOKENS, lambda: {"net": nn.Linear(9, 3)}, engine="loop"),
    "checkpointing": Case(checkpointed, CLASSES, _linear(), refused_by=("vmap",)),
    "penalties": Case(penalised, CLASSES, _linear()),
    "scheduled sampling": Case(scheduled, SEQUENCES, lambda: {"cell": nn.GRUCell(4, 6), "out": nn.Linear(6, 4)}),
    "shapes asserted": Case(printed_shapes, CLASSES, _linear()),
    "accuracy by hand": Case(accuracy_by_hand, CLASSES, _linear(), logs=False),
    "metric collection": Case(
        collection,
        CLASSES,
        _with(
            metrics=lambda: MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)]), mean=lambda: MeanMetric()
        ),
    ),
    "backbone frozen in the step": Case(
        frozen_backbone,
        CLASSES,
        lambda: {"backbone": nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).requires_grad_(False), **_linear()()},
    ),
    "logged in inference mode": Case(inference_mode, CLASSES, _linear()),
    "metric set up in the step": Case(metric_set_up, REAL, lambda: {**_linear(1)(), "loss": Scaled()}),
    "reshaped": Case(reshaped, IMAGES, lambda: {"net": nn.Linear(192, 3)}),
    "flattened tokens": Case(flattened_tokens, SEQUENCES, lambda: {"net": nn.Linear(4, 4)}),
    "binary": Case(binary, BINARY, lambda: {**_linear(1)(), "weight": torch.tensor(2.0)}),
    "Jacobian": Case(jacobian, CLASSES, _linear()),
    "tied": Case(tied, TOKENS, _tied),
}
