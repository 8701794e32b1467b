"""Drafts of vLLM's `speculators`: EAGLE3, P-EAGLE, DFlash and DSpark.

config.json holds the draft's layers in transformer_layer_config, and whom it is for in
speculators_config. Layer ids are vLLM's, which captures what goes into a layer: id k is the output
of layer k - 1 (0 would be the embedding, the number of layers the last layer's output). d2t holds
target id - draft id. lm_head is a copy of the target's rows that older releases trained on, so the
one in the files is used.

Every kind of draft has embed_tokens, which is the target's unless it was trained too, as it is in
P-EAGLE: the mask token has no other embedding that means anything.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.drafters.checkpoints.deepspec import heads
from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint
from sglang_dspark.drafters.checkpoints.fields import Fields, layers
from sglang_dspark.drafters.checkpoints.weights import weight_shapes

LAYOUT = "speculators"
KINDS = ("eagle3", "peagle", "dflash", "dspark")


def recognises(raw: dict[str, Any]) -> bool:
    return "speculators_model_type" in raw or "speculators_config" in raw


def read(config: Fields) -> DraftCheckpoint:
    about = config.section("speculators_config")
    place, name = (config, "speculators_model_type")
    if not config.given(name):
        place, name = (about, "algorithm")
    kind = place.one_of(name, KINDS)
    config.must_be("quantization_config", (), "quantized drafts are not served")
    inner = config.section("transformer_layer_config")
    common = layers(_one_rope(inner))
    names = {weight.removeprefix("model.") for weight in weight_shapes(config.file.parent)}
    draft_vocab = config.count("draft_vocab_size")
    chain = kind in ("eagle3", "peagle")
    settings = _chain(config, inner, about, kind) if chain else _block(config, about, kind)
    trained = config.flag("embed_requires_grad", kind == "peagle") and chain
    architectures = config.get("architectures", list, [kind])
    return DraftCheckpoint(
        path=str(config.file.parent),
        layout=LAYOUT,
        architecture=str(architectures[0]),
        target_hidden_size=config.optional_count("target_hidden_size"),
        draft_vocab_size=draft_vocab,
        own_head="lm_head.weight" in names or draft_vocab < common["vocab_size"],
        own_embedding=trained,
        **settings,
        **common,
    )


def _one_rope(inner: Fields) -> Fields:
    """Of one set of RoPE parameters a kind of layer, speculators takes the sliding layers'."""
    parameters = inner.section("rope_parameters", {})
    if not parameters.given("sliding_attention"):
        return inner
    sliding = parameters.section("sliding_attention").values
    return Fields({**inner.values, "rope_parameters": sliding}, inner.file, inner.prefix)


def _chain(config: Fields, inner: Fields, about: Fields, kind: str) -> dict[str, Any]:
    whole, each = config.flag("norm_before_fc"), config.flag("fc_norm")
    if whole and each:
        raise config.refuse("fc_norm", True, "must be false where norm_before_fc is true")
    if kind == "eagle3" and not config.given("norm_before_residual"):
        # vLLM and speculators read its absence in opposite ways.
        raise config.missing("norm_before_residual")
    settings: dict[str, Any] = {
        "algorithm": "EAGLE3",
        "style": inner.one_of("model_type", ("llama", "qwen3"), "qwen3"),
        "block_size": _proposed(about),
        "target_layer_ids": _layer_ids(config, "eagle_aux_hidden_state_layer_ids"),
        "feature_norm": "whole" if whole else "each" if each else "none",
        "norm_before_residual": config.flag("norm_before_residual"),
    }
    if kind == "eagle3":
        return {**settings, "norm_output": config.flag("norm_output")}
    # Nothing is fed back where the whole block is one forward.
    mask = config.count("mask_token_id", minimum=0)
    return {**settings, "parallel": True, "mask_token_id": mask}


def _block(config: Fields, about: Fields, kind: str) -> dict[str, Any]:
    rows = config.count("block_size")
    from_anchor = _from_anchor(config, about, rows)
    rank = config.count("markov_rank", minimum=0) if kind == "dspark" else 0
    if not from_anchor and rows < 2:
        raise config.refuse("block_size", rows, "must be at least 2, the anchor's row counts")
    if not config.given("aux_hidden_state_layer_ids"):
        raise config.missing("aux_hidden_state_layer_ids")
    return {
        "algorithm": "DSPARK" if rank else "DFLASH",
        "style": "qwen3",
        "block_size": rows if from_anchor else rows - 1,
        "sample_from_anchor": from_anchor,
        "mask_token_id": config.count("mask_token_id", minimum=0),
        "target_layer_ids": _layer_ids(config, "aux_hidden_state_layer_ids"),
        **(heads(config, rank, confidence=True) if kind == "dspark" else {}),
    }


def _from_anchor(config: Fields, about: Fields, rows: int) -> bool:
    """Whether the anchor's row proposes. The first releases with DSpark had no field for it, and
    another default than now; what they always stated is how many tokens a block of rows gives."""
    if config.given("sample_from_anchor"):
        return config.flag("sample_from_anchor")
    tokens = _proposed(about)
    if tokens not in (rows - 1, rows):
        raise config.refuse(
            "block_size",
            rows,
            f"sample_from_anchor is missing and speculative_tokens is {tokens}: must be "
            f"{rows} if the anchor's row proposes, {rows - 1} if not",
        )
    return tokens == rows


def _proposed(about: Fields) -> int:
    """speculative_tokens of the proposal method that is the default one."""
    methods = about.get("proposal_methods", list)
    default = about.get("default_proposal_method", str, "greedy")
    for method in methods:
        if isinstance(method, dict) and method.get("proposal_type", "greedy") == default:
            return Fields(method, about.file, f"{about.prefix}proposal_methods.").count(
                "speculative_tokens"
            )
    raise about.refuse("proposal_methods", methods, f"must hold the default one, {default!r}")


def _layer_ids(config: Fields, name: str) -> tuple[int, ...]:
    """As outputs of layers; empty for EAGLE3's usual three, which are speculators' default too."""
    if not config.given(name):
        return ()
    return tuple(i - 1 for i in config.ids(name))
