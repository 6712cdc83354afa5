"""What one example's own loss is, given its share of the batch loss.

For a mean over B examples the own loss is B times the share. Cross entropy averages over *positions*, leaving out
``ignore_index`` and weighting by class, so an example with more labelled tokens has a larger share, and the share
depends on how many labels the others have. The loss node holds the targets, and with them the total W and each
example's W_b: its own mean is W / W_b times its share, free of the others again. Where an example has several rows
(views), its share and its W_b are sums over them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_lap2.gradients.ghost.graph import Walk
from lightning_lap2.gradients.ghost.rules import examples_first
from lightning_lap2.gradients.ghost.sources import Node

_MEAN = 1
_EXACT = 2**24
"""Counts up to here are exact in fp32, the type that the loss node may keep its total in."""


def own_per_share(root: Node, walk: Walk, views: int) -> tuple[float, Tensor | float]:
    """``(whole, factor)``: an example's share of ``whole`` times the batch loss, times ``factor``, is its own loss.

    The backward starts from ``whole`` and not from 1, so that what flows back to an example does not depend on how
    many others there are: in bf16 the rounding of 1/B does, and with it every example's gradient.

    For a loss that is a mean over examples ``whole`` is B, the number of examples, each of ``views`` rows, and the
    factor 1. Where the loss itself is a mean cross entropy they are W, and 1 / W_b: ``[B]`` in fp64, 0 for an example
    without labels.
    """
    rows = walk.dims.rows
    examples = rows // views
    if root.name() not in ("NllLossBackward0", "NllLoss2DBackward0") or root._saved_reduction != _MEAN:
        return examples, 1.0
    target = root._saved_target
    lead = tuple(target.shape)
    if root.name() == "NllLossBackward0" and lead != (rows,):
        scores = root.next_functions[0][0]  # [R, classes], R rows flattened from more dimensions
        lead = walk.unflat.get(scores, (*lead, 0))[:-1]
        if math.prod(lead) != target.numel():
            return examples, 1.0
    if rows not in lead:
        return examples, 1.0
    batch = walk.dims.find(("loss", len(lead)), [i for i, n in enumerate(lead) if n == rows], lambda: "The loss")
    if root._saved_weight is None and target.numel() < _EXACT and root._saved_total_weight.item() == target.numel():
        return examples, 1.0  # every position counts: the loss is the mean over examples
    # the node stores the index as an unsigned number: -100 is 2^64 - 100
    ignored = (root._saved_ignore_index + 2**63) % 2**64 - 2**63
    counted = target != ignored
    weight = counted.double()
    if root._saved_weight is not None:
        weight *= root._saved_weight.double()[target.where(counted, 0)]
    own = examples_first(weight.view(lead), batch, 0).sum(dim=1).view(examples, views).sum(dim=1)
    return float(own.sum()), torch.where(own > 0, 1.0 / own, 0.0)
