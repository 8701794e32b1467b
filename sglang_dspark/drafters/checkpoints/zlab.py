"""z-lab's DFlash drafts, and SpecForge's DFlash and DSpark, which share its config.json.

target_layer_ids are outputs of layers, 0-based. The three differ in what a block is:

    DFLASH   block_size counts the anchor's row, which proposes nothing: one token fewer
    DSPARK   the anchor's row proposes the first token: as many tokens
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.drafters.checkpoints.deepspec import heads
from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint
from sglang_dspark.drafters.checkpoints.fields import Fields, layers

DFLASH, DSPARK = "DFlashDraftModel", "DSparkDraftModel"
ARCHITECTURES = (DFLASH, DSPARK)

# Fields of variants that we do not compute: DFlash2's convolution and selector, Domino's GRU, and
# what single targets need. Each with the values that leave a plain draft.
_PLAIN: dict[str, tuple[object, ...]] = {
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
    "gru_hidden_dim": (0,),
    "pure_draft_prefix_len": (0,),
    "shift_label": (False,),
    "output_multiplier": (1,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "use_gemma_norm": (False,),
    "swa_window_size": (0,),
    "causal": (False,),
    "is_causal": (False,),
}


def read(config: Fields, architecture: str) -> DraftCheckpoint:
    nested = config.section("dflash_config", {})
    for name, plain in _PLAIN.items():
        for place in (nested, config):
            place.must_be(name, plain, "only plain DFlash and DSpark drafts are served")
    kind = "dspark" if architecture == DSPARK else "dflash"
    for place in (nested, config):
        place.must_be("projector_type", (kind,), f"{architecture} is served with {kind!r} only")
    # The nested value wins, as in SGLang's reader.
    merged = Fields({**config.values, **nested.values}, config.file)
    block_size = merged.count("block_size", minimum=1 if kind == "dspark" else 2)
    softcap = nested.values.get("final_logit_softcapping")
    return DraftCheckpoint(
        path=str(config.file.parent),
        layout="SpecForge" if kind == "dspark" else "z-lab",
        architecture=architecture,
        style="qwen3",
        mask_token_id=merged.count("mask_token_id", minimum=0),
        target_layer_ids=_layer_ids(merged),
        num_target_layers=merged.optional_count("num_target_layers"),
        logit_softcap=nested.number("final_logit_softcapping") if softcap else None,
        **(_dspark(merged, block_size) if kind == "dspark" else _dflash(merged, block_size)),
        **layers(config),
    )


def _dflash(merged: Fields, block_size: int) -> dict[str, Any]:
    merged.must_be("sample_from_anchor", (False,), "in DFlash only mask rows predict")
    return {"algorithm": "DFLASH", "block_size": block_size - 1, "sample_from_anchor": False}


def _dspark(merged: Fields, block_size: int) -> dict[str, Any]:
    merged.must_be("sample_from_anchor", (True,), "SpecForge's DSpark predicts from the anchor on")
    rank = merged.count("markov_rank", minimum=0)
    # SpecForge's own defaults of fields that are not stated.
    alpha = merged.values.get("confidence_head_alpha")
    stated = {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    settings = Fields({**stated, **merged.values}, merged.file)
    return {
        "algorithm": "DSPARK" if rank else "DFLASH",
        "block_size": block_size,
        **heads(settings, rank, confidence=bool(alpha)),
    }


def _layer_ids(merged: Fields) -> tuple[int, ...]:
    if merged.given("target_layer_ids"):
        return merged.ids("target_layer_ids")
    return default_layer_ids(merged.count("num_target_layers"), merged.count("num_hidden_layers"))


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """One layer of the target a draft layer, evenly from the second to the third last."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))
