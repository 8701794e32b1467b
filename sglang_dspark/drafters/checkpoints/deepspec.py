"""DeepSpec's drafts: Qwen3 and Gemma 4, each as DSpark and as EAGLE3.

Their modules are named as ours. Every one predicts from the anchor's row on: block_size, or
ttt_length of EAGLE3, is the number of draft tokens. target_layer_ids are outputs of layers,
0-based. embed_tokens and lm_head in the files are frozen copies of the target's and not loaded.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.drafters.checkpoints.description import MARKOV_HEADS, DraftCheckpoint
from sglang_dspark.drafters.checkpoints.fields import Fields, layers

LAYOUT = "DeepSpec"
BLOCK = ("Qwen3DSparkModel", "Gemma4DSparkModel")
CHAIN = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")
ARCHITECTURES = (*BLOCK, *CHAIN)


def read(config: Fields, architecture: str) -> DraftCheckpoint:
    # Some exports nest the DSpark fields; the nested value wins, as in SGLang's reader.
    for name in ("dflash_config", "dspark_config"):
        nested = config.section(name, {})
        config = Fields({**config.values, **nested.values}, config.file)
    read_one = _block if architecture in BLOCK else _chain
    return DraftCheckpoint(
        path=str(config.file.parent),
        layout=LAYOUT,
        architecture=architecture,
        target_layer_ids=config.ids("target_layer_ids"),
        num_target_layers=config.count("num_target_layers"),
        **(_gemma4(config) if architecture.startswith("Gemma4") else _qwen3(config)),
        **read_one(config),
    )


def _block(config: Fields) -> dict[str, Any]:
    config.must_be("sample_from_anchor", (True,), "DeepSpec's drafts predict from the anchor on")
    rank = config.count("markov_rank", minimum=0)
    return {
        "algorithm": "DSPARK" if rank else "DFLASH",
        "block_size": config.count("block_size"),
        "mask_token_id": config.count("mask_token_id", minimum=0),
        **heads(config, rank, confidence=False),
    }


def heads(config: Fields, rank: int, confidence: bool) -> dict[str, Any]:
    """The sequential and the confidence head. confidence: whether there is one if not stated."""
    confidence = config.flag("enable_confidence_head", confidence)
    with_markov = confidence and config.flag("confidence_head_with_markov", True)
    if with_markov and not rank:
        raise config.refuse(
            "confidence_head_with_markov", True, "must be false where markov_rank is 0"
        )
    return {
        "markov_rank": rank,
        "markov_head_type": config.one_of("markov_head_type", MARKOV_HEADS) if rank else "",
        "has_confidence_head": confidence,
        "confidence_with_markov": with_markov,
    }


def _chain(config: Fields) -> dict[str, Any]:
    # DeepSpec concatenates the embedding in front of every layer, not of the first only, and its
    # own evaluation refuses more than one.
    if config.count("num_hidden_layers") != 1:
        raise config.refuse(
            "num_hidden_layers", config.count("num_hidden_layers"), "DeepSpec's EAGLE3 has 1 layer"
        )
    return {"algorithm": "EAGLE3", "block_size": config.count("ttt_length")}


def _qwen3(config: Fields) -> dict[str, Any]:
    return {"style": "qwen3", **layers(config)}


def _gemma4(config: Fields) -> dict[str, Any]:
    for name, value, why in (
        ("enable_moe_block", False, "only dense layers are served"),
        ("hidden_size_per_layer_input", 0, "per-layer inputs are not served"),
        ("use_double_wide_mlp", False, "must be false"),
    ):
        config.must_be(name, (value,), why)
    k_eq_v = config.flag("attention_k_eq_v")
    # All draft layers are full attention, whose heads have their own size, and their own number
    # where keys are the values too.
    values = {
        **config.values,
        "head_dim": config.count("global_head_dim"),
        "hidden_act": None,
        "num_key_value_heads": config.count(
            "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
        ),
    }
    return {
        "style": "gemma4",
        **layers(Fields(values, config.file)),
        "hidden_act": config.one_of(
            "hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"
        ),
        "k_eq_v": k_eq_v,
        "logit_softcap": (
            config.number("final_logit_softcapping")
            if config.given("final_logit_softcapping")
            else None
        ),
        "embed_scale": config.count("hidden_size") ** 0.5,
    }
