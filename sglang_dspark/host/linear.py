"""Linear layers with weights packed for oneDNN.

`F.linear` on the CPU goes to MKL, which packs the weights anew in every call with more than
one row: 8 rows cost nearly twice as much as 1. With weights packed once, up to 8 rows cost
about what one row costs, which is what speculative verification lives from. And for two or more
rows oneDNN computes a row the same way whatever the other rows are, so that a token's logits do
not depend on the batch that it is in.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

logger = logging.getLogger(__name__)

ROWS_HINT = 8  # number of rows that oneDNN chooses the packed format for
MIN_ROWS = 4  # fewer are padded: 1 row has kernels of its own, and 4 are not slower
# The original weights stay in memory (embeddings and drafts read them), so packing is
# skipped where the second copy would take more than this part of the free memory.
MEMORY_FRACTION = 0.25

UPDATES_REFUSED = (
    "Online weight updates are not supported on the host platform: its linear layers hold "
    "packed copies of the weights. Restart the server with the new weights."
)


class PackedWeight:
    """One weight matrix [out, in], packed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.address = weight.data_ptr()
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self.few = torch.zeros(MIN_ROWS, weight.shape[1], dtype=weight.dtype)

    def serves(self, weight: torch.Tensor, x: torch.Tensor) -> bool:
        """False if the layer has been given another weight since, or x is not for this."""
        return weight.data_ptr() == self.address and x.dtype == self.dtype and x.numel() > 0

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if count < MIN_ROWS:
            self.few[:count] = rows
            rows = self.few
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, bias, "none", [], ""
        )
        return out[:count].view(*x.shape[:-1], out.shape[-1])


class PackedLinearMethod(UnquantizedLinearMethod):
    """SGLang's linear method on packed weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = PackedWeight(weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.weight.serves(layer.weight, x):
            return self.weight.apply(x, bias)
        out: torch.Tensor = super().apply(layer, x, bias)
        return out


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The same for a language model head, which may be the embedding too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = PackedWeight(weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.weight.serves(layer.weight, x):
            return self.weight.apply(x, bias)
        out: torch.Tensor = super().apply(layer, x, bias)
        return out


def pack_model(model: torch.nn.Module, free_bytes: int) -> None:
    """Packs the unquantised linear layers and heads of a loaded model in place."""
    layers = _packable(model)
    size = sum(layer.weight.nbytes for layer, _ in layers)
    if not layers:
        return
    if size > MEMORY_FRACTION * free_bytes:
        logger.info(
            "host platform: weights stay unpacked, %.1f GB more would not fit well into %.1f GB",
            size / 2**30,
            free_bytes / 2**30,
        )
        return
    for layer, method in layers:
        layer.quant_method = method(layer.weight)
    # SGLang refuses weight updates for a model that says why it cannot take them.
    setattr(model, "_derived_weight_cache_error", UPDATES_REFUSED)  # noqa: B010 (not a tensor)
    logger.info("host platform: packed %d layers, %.2f GB", len(layers), size / 2**30)


def _packable(model: torch.nn.Module) -> list[tuple[Any, type]]:
    """Layers to pack, each with the method that serves it packed."""
    found: dict[Any, type] = {}
    for module in model.modules():
        candidates: tuple[tuple[Any, type, type], ...] = (
            (module, UnquantizedLinearMethod, PackedLinearMethod),
            (getattr(module, "lm_head", None), UnquantizedEmbeddingMethod, PackedHeadMethod),
        )
        for layer, base, packed in candidates:
            if type(getattr(layer, "quant_method", None)) is base and _supported(layer.weight):
                found[layer] = packed
    return list(found.items())


def _supported(weight: torch.Tensor) -> bool:
    if weight.dim() != 2 or weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
