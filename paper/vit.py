"""A vision transformer of DINOv2's shape, with pretrained weights from a folder or out of an ONNX file.

``transformers`` loads a folder with ``config.json`` and weights. An ONNX export of the same encoder holds the same
numbers, but its linear layers have lost their names: they are found by the bias that is added to their product.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def load_vit(path: str | Path, pixels: int, *, heads: int = 6) -> nn.Module:
    """The encoder, frozen and in eval mode, with positions for square images of ``pixels``.

    Args:
        path: a folder for ``transformers.AutoModel``, or an ``.onnx`` file of a transformers ``Dinov2Model``.
        pixels: a multiple of the patch size.
        heads: of the attention; an ONNX file does not name them (ViT-S: 6).

    Raises:
        ValueError: the file is no such export.
        ModuleNotFoundError: ``onnx`` or ``transformers`` is not installed.
    """
    from transformers import AutoModel, Dinov2Config, Dinov2Model

    if Path(path).is_dir():
        return AutoModel.from_pretrained(path, local_files_only=True).eval().requires_grad_(False)
    weights = onnx_weights(path)
    positions, patch = (
        weights["embeddings.position_embeddings"],
        weights["embeddings.patch_embeddings.projection.weight"],
    )
    width, size = patch.shape[0], patch.shape[-1]
    if pixels % size:
        raise ValueError(f"pixels={pixels} is not a multiple of the patch size {size}")
    config = Dinov2Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer.")),
        mlp_ratio=weights["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
        patch_size=size,
        image_size=math.isqrt(positions.shape[1] - 1) * size,
    )
    # from_pretrained knows the names of published checkpoints, which are those of the export, in every version
    model, loaded = Dinov2Model.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    missing = set(loaded["missing_keys"]) - {"embeddings.mask_token"}  # used in pretraining alone
    if missing or loaded["unexpected_keys"] or loaded["mismatched_keys"]:
        raise ValueError(f"{path} is no Dinov2Model: {loaded}")
    return model.eval().requires_grad_(False)


def onnx_weights(path: str | Path, prefix: str = "backbone.") -> dict[str, Tensor]:
    """State of the ``Dinov2Model`` in an ONNX file, under the names transformers gives it."""
    try:
        import onnx
        from onnx import numpy_helper
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "reading weights from an ONNX file needs the package onnx: pip install onnx"
        ) from missing

    graph = onnx.load(str(path)).graph
    arrays = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    named = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
    named.update(_linear_weights(graph, arrays, prefix))
    positions = sorted((v for k, v in arrays.items() if _is_position(k, v, named)), key=lambda value: value.shape[1])
    if len(positions) != 2:
        raise ValueError(
            f"{path} holds {len(positions)} position tables, expected one for the class token and one for patches"
        )
    named["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    return {name: torch.from_numpy(value.copy()) for name, value in named.items()}


def _linear_weights(graph: Any, arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """``x @ W + b``: the product's W is stored as ``[in, out]`` under a number, b under the layer's name."""
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    found = {}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        bias = next((name for name in node.input if name.startswith(prefix) and name.endswith(".bias")), None)
        weight = next((products[name] for name in node.input if name in products), None)
        if bias and weight in arrays:
            found[bias.removeprefix(prefix).removesuffix("bias") + "weight"] = arrays[weight].T
    return found


def _is_position(name: str, value: np.ndarray, named: dict[str, np.ndarray]) -> bool:
    """An unnamed ``[1, positions, width]``: the export splits the table into class token and patches."""
    width = named["embeddings.cls_token"].shape[-1]
    return name.startswith("onnx::") and value.ndim == 3 and value.shape[0] == 1 and value.shape[2] == width
