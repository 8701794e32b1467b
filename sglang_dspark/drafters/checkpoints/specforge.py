"""EAGLE3 drafts as SafeAILab and SpecForge publish them, and SpecForge's P-EAGLE.

The one layer is `midlayer` in the files; SGLang reads `layers.*` too, and more of them. lm_head is
the draft's own, over draft_vocab_size tokens; d2t holds target id - draft id.
eagle_aux_hidden_state_layer_ids are outputs of layers, 0-based; without them the layers are those
of the EAGLE3 paper's code, see `for_target`.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.drafters.checkpoints.description import DEFAULT_FEATURES, DraftCheckpoint
from sglang_dspark.drafters.checkpoints.fields import Fields, layers
from sglang_dspark.drafters.checkpoints.weights import weight_shapes

LAYOUT = "SpecForge"
PARALLEL = "PEagleDraftModel"
# SafeAILab left its drafts the architecture of the model that they were cut from.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", PARALLEL)
# Tokens of a block where config.json names none: the longest chain of SGLang's presets.
DEFAULT_BLOCK = 5

_RENAMES = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)


def read(config: Fields, architecture: str) -> DraftCheckpoint:
    if architecture == "LlamaForCausalLM" and "draft_vocab_size" not in config.values:
        raise config.refuse(
            "architectures", [architecture], "without draft_vocab_size this is no EAGLE3 draft"
        )
    eagle = config.section("eagle_config", {})
    names = {name.removeprefix("model.") for name in weight_shapes(config.file.parent)}
    common = layers(_as_served(config, names))
    # draft_vocab_size without a head of its own would be an error of the weights, told there.
    draft_vocab = config.count("draft_vocab_size", common["vocab_size"])
    hidden_size, target_size = common["hidden_size"], config.optional_count("target_hidden_size")
    return DraftCheckpoint(
        path=str(config.file.parent),
        layout=LAYOUT,
        architecture=architecture,
        algorithm="EAGLE3",
        style="llama",
        block_size=_block_size(config),
        target_layer_ids=_layer_ids(config, eagle),
        num_target_layers=config.optional_count("num_target_layers"),
        target_hidden_size=target_size,
        draft_vocab_size=draft_vocab,
        own_head="lm_head.weight" in names or draft_vocab < common["vocab_size"],
        own_embedding=target_size not in (None, hidden_size),
        feature_norm=_feature_norm(config, eagle),
        fc_bias=config.flag("bias"),
        norm_before_residual=config.flag("norm_before_residual"),
        norm_output=config.flag("norm_output"),
        renames=_renames(names, common["num_layers"]),
        **(_parallel(config) if architecture == PARALLEL else {}),
        **common,
    )


def _as_served(config: Fields, names: set[str]) -> Fields:
    """What these trainers copied from the target's config.json, put right."""
    values = dict(config.values)
    if values.get("model_type") == "llama4_text":
        values["intermediate_size"] = config.count("intermediate_size_mlp")
    if any(name.startswith("midlayer.") for name in names):
        values["num_hidden_layers"] = 1
    values["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in names)
    return Fields(values, config.file)


def _block_size(config: Fields) -> int:
    for name in ("ttt_length", "num_depths"):
        if config.given(name):
            return config.count(name)
    return DEFAULT_BLOCK


def _layer_ids(config: Fields, eagle: Fields) -> tuple[int, ...]:
    eagle.must_be("use_aux_hidden_state", (True,), "only drafts of several layers are served")
    name = "eagle_aux_hidden_state_layer_ids"
    stated = next((place for place in (eagle, config) if place.given(name)), None)
    ids = stated.ids(name) if stated else ()
    count = config.count("num_aux_hidden_states", len(ids) or DEFAULT_FEATURES)
    if count != (len(ids) or DEFAULT_FEATURES):
        raise config.refuse(
            "num_aux_hidden_states", count, f"{name} has {len(ids) or DEFAULT_FEATURES} layers"
        )
    return ids


def _feature_norm(config: Fields, eagle: Fields) -> Any:
    before = eagle if eagle.given("norm_before_fc") else config
    whole = before.flag("norm_before_fc")
    each = config.flag("fc_norm") or config.flag("use_aux_norm")
    if whole and each:
        raise config.refuse("fc_norm", True, "must be false where norm_before_fc is true")
    return "whole" if whole else "each" if each else "none"


def _renames(names: set[str], num_layers: int) -> tuple[tuple[str, str], ...]:
    renames = [(old, new) for old, new in _RENAMES if any(name.startswith(old) for name in names)]
    # SGLang calls the norm in front of a later layer hidden_norm, and keeps an input_layernorm
    # beside it that it never reads.
    for i in range(1, num_layers):
        layer = f"layers.{i}."
        if layer + "hidden_norm.weight" in names:
            renames.append((layer + "input_layernorm.", f"unused.{i}.input_layernorm."))
            renames.append((layer + "hidden_norm.", layer + "input_layernorm."))
    return tuple(renames)


def _parallel(config: Fields) -> dict[str, Any]:
    # SpecForge takes it from the run's settings and does not write it down.
    return {"parallel": True, "mask_token_id": config.count("mask_token_id", minimum=0)}
