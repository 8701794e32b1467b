"""Reads a checkpoint's weights into one of our draft models, whatever its layout names them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint

# (ending of the checkpoint's name, ending of SGLang's fused parameter, which part of it)
_FUSED: tuple[tuple[str, str, str | int], ...] = (
    (".q_proj", ".qkv_proj", "q"),
    (".k_proj", ".qkv_proj", "k"),
    (".v_proj", ".qkv_proj", "v"),
    (".gate_proj", ".gate_up_proj", 0),
    (".up_proj", ".gate_up_proj", 1),
)


def load_weights(
    model: nn.Module, draft: DraftCheckpoint, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill the model's parameters, and `draft_ids` from d2t.

    weights: by the checkpoint's own names. What `draft.weights()` does not list (a copy of the
    target's embedding and the like) is skipped; the launcher has checked that all of it is there.
    """
    wanted = draft.weights()
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    parameters |= dict(model.named_buffers())
    for file_name, weight in weights:
        name = draft.rename(file_name.removeprefix("model."))
        if name == "d2t":
            offsets = torch.arange(len(weight)) if draft.d2t_offsets else 0
            parameters["draft_ids"].copy_(weight + offsets)
            continue
        if name not in wanted or name.startswith("confidence_head."):
            continue
        stem, _, kind = name.rpartition(".")
        copies: list[tuple[str, str | int | None]] = [(name, None)]
        for ending, fused, part in _FUSED:
            if stem.endswith(ending):
                copies = [(f"{stem.removesuffix(ending)}{fused}.{kind}", part)]
        if draft.k_eq_v and stem.endswith(".k_proj"):
            copies.append((copies[0][0], "v"))
        for target, of_fused in copies:
            parameter = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            arguments = (weight,) if of_fused is None else (weight, of_fused)
            loader(parameter, *arguments)
