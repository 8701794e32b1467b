"""Micro draft checkpoints in every published layout, with random weights and at most 400 kB.

    write_<layout>(folder, **changes) -> folder

changes: fields of config.json; None takes a field out, a dict is merged into the one that is there.
The weights follow the changed config, under the names and in the shapes of the layout's own code.
What the layouts' readers make of them is for tests to say, so nothing here uses the readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layout_shapes import (
    Config,
    Shapes,
    block_shapes,
    chain_shapes,
    changed,
    copies,
    heads,
    layer,
    write,
)

VOCAB, DRAFT_VOCAB = 96, 40
TARGET_LAYERS = 8
TARGET_HIDDEN = 64
BLOCK = 7
RANK = 8

# Of DeepSpec's Qwen3 targets; like theirs, one has heads that are wider than the hidden size.
SIZES: dict[str, Config] = {
    "small": {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1},
    "medium": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2},
    "large": {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 3},
}


def layer_config(**changes: Any) -> Config:
    """What all layouts name as transformers does."""
    layers = changes.get("num_hidden_layers", 2)
    return {
        "vocab_size": VOCAB,
        "hidden_size": TARGET_HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }


# --- DeepSpec ------------------------------------------------------------------------------------


def write_qwen3_dspark(folder: Path, size: str = "medium", **changes: Any) -> Path:
    base = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **layer_config(**SIZES[size]),
        **_deepspec_block(),
    }
    config = changed(base, changes)
    shapes = block_shapes(config, qk_norm=True) | copies(config) | heads(config)
    return write(folder, config, shapes)


def write_qwen3_dflash(folder: Path, size: str = "medium", **changes: Any) -> Path:
    return write_qwen3_dspark(folder, size, **{**_NO_HEADS, **changes})


def write_gemma4_dspark(folder: Path, **changes: Any) -> Path:
    base = {"architectures": ["Gemma4DSparkModel"], **_gemma4(2), **_deepspec_block()}
    config = changed(base, changes)
    shapes = block_shapes(_global_heads(config), qk_norm=True)
    shapes |= _gemma4_shapes(config) | copies(config) | heads(config)
    return write(folder, config, _without_values(config, shapes))


def write_gemma4_dflash(folder: Path, **changes: Any) -> Path:
    return write_gemma4_dspark(folder, **{**_NO_HEADS, **changes})


def write_qwen3_eagle3(folder: Path, size: str = "medium", **changes: Any) -> Path:
    base = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        **layer_config(**{**SIZES[size], "num_hidden_layers": 1}),
        **_DEEPSPEC_CHAIN,
    }
    config = changed(base, changes)
    shapes = chain_shapes(config, "layers.0.", 5, qk_norm=True) | copies(config)
    return write(folder, config, shapes)


def write_gemma4_eagle3(folder: Path, **changes: Any) -> Path:
    base = {"architectures": ["Gemma4Eagle3Model"], **_gemma4(1), **_DEEPSPEC_CHAIN}
    config = changed(base, changes)
    shapes = chain_shapes(_global_heads(config), "layers.0.", 5, qk_norm=True)
    shapes |= _gemma4_shapes(config) | copies(config)
    return write(folder, config, _without_values(config, shapes))


_NO_HEADS: Config = {
    "markov_rank": 0,
    "markov_head_type": None,
    "enable_confidence_head": False,
    "confidence_head_with_markov": None,
}
_DEEPSPEC_CHAIN: Config = {
    "num_target_layers": TARGET_LAYERS,
    "target_layer_ids": [0, 2, 3, 5, 6],
    "ttt_length": BLOCK,
    "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1,
    "target_model_name_or_path": "some/target",
}


def _deepspec_block() -> Config:
    return {
        "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": [0, 3, 6],
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "num_anchors": 16,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _gemma4(layers: int) -> Config:
    """A text config of Gemma 4, whose fields of sliding layers mean nothing to a draft."""
    return {
        **layer_config(num_hidden_layers=layers, head_dim=8, hidden_act=None, rope_theta=None),
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "sliding_window": 64,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    }


def _global_heads(config: Config) -> Config:
    k_eq_v = config["attention_k_eq_v"]
    name = "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
    own = {"head_dim": config["global_head_dim"], "num_key_value_heads": config[name]}
    return {**config, **own}


def _gemma4_shapes(config: Config) -> Shapes:
    h, shapes = config["hidden_size"], Shapes()
    for i in range(config["num_hidden_layers"]):
        shapes[f"layers.{i}.pre_feedforward_layernorm.weight"] = (h,)
        shapes[f"layers.{i}.post_feedforward_layernorm.weight"] = (h,)
        shapes[f"layers.{i}.layer_scalar"] = (1,)
    return shapes


def _without_values(config: Config, shapes: Shapes) -> Shapes:
    if not config["attention_k_eq_v"]:
        return shapes
    return {name: shape for name, shape in shapes.items() if ".v_proj." not in name}


# --- SafeAILab and SpecForge ---------------------------------------------------------------------


def write_specforge_eagle3(folder: Path, **changes: Any) -> Path:
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_config(num_hidden_layers=1, layer_types=None),
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
            "use_aux_hidden_state": True,
        },
    }
    config = changed(base, changes)
    return write(folder, config, _llama_eagle3_shapes(config, "midlayer."))


def write_safeailab_eagle3(folder: Path, **changes: Any) -> Path:
    """PyTorch's file format, the target's architecture, and its number of layers."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_config(num_hidden_layers=40, layer_types=None, head_dim=None),
        "draft_vocab_size": DRAFT_VOCAB,
    }
    config = changed(base, changes)
    shapes = _llama_eagle3_shapes({**config, "head_dim": 16}, "midlayer.")
    return write(folder, config, shapes, pickled=True)


def write_sglang_eagle3(folder: Path, **changes: Any) -> Path:
    """As SGLang names them: `layers.*`, of which the later ones start with hidden_norm."""
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_config(num_hidden_layers=2, layer_types=None),
        "draft_vocab_size": DRAFT_VOCAB,
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
    }
    config = changed(base, changes)
    shapes = _llama_eagle3_shapes(config, "layers.0.")
    for i in range(1, config["num_hidden_layers"]):
        shapes |= layer(config, f"layers.{i}.", config["hidden_size"], qk_norm=False)
        shapes[f"layers.{i}.hidden_norm.weight"] = (config["hidden_size"],)
    return write(folder, config, {f"model.{name}": shape for name, shape in shapes.items()})


def write_specforge_peagle(folder: Path, **changes: Any) -> Path:
    base = {
        "architectures": ["PEagleDraftModel"],
        "model_type": "llama",
        **layer_config(layer_types=None),
        "draft_vocab_size": DRAFT_VOCAB,
        "num_depths": BLOCK,
        "mask_token_id": VOCAB - 1,
        "norm_before_residual": True,
    }
    config = changed(base, changes)
    shapes = _llama_eagle3_shapes(config, "layers.0.")
    for i in range(1, config["num_hidden_layers"]):
        shapes |= layer(config, f"layers.{i}.", config["hidden_size"], qk_norm=False)
    shapes["mask_hidden"] = (1, 1, 3 * config["hidden_size"])
    return write(folder, config, shapes)


def write_specforge_dspark(folder: Path, **changes: Any) -> Path:
    base = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "model_type": "qwen3",
        **layer_config(),
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "dflash_config": {
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "mask_token_id": VOCAB - 1,
            "target_layer_ids": [0, 3, 6],
            "markov_rank": RANK,
            "markov_head_type": "gated",
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": False,
        },
    }
    config = changed(base, changes)
    nested = {"enable_confidence_head": True, **config, **config["dflash_config"]}
    return write(folder, config, block_shapes(nested, qk_norm=True) | heads(nested))


def _llama_eagle3_shapes(config: Config, first: str) -> Shapes:
    h = config["hidden_size"]
    target = config.get("target_hidden_size") or h
    shapes = chain_shapes(config, first, 3, qk_norm=False, target_hidden=target)
    draft_vocab = config.get("draft_vocab_size")
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, h)
        shapes["d2t"], shapes["t2d"] = (draft_vocab,), (config["vocab_size"],)
    if target != h:
        shapes["embed_tokens.weight"] = (config["vocab_size"], h)
    eagle = config.get("eagle_config") or {}
    if config.get("norm_before_fc") or eagle.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(3)}
    if config.get("bias"):
        shapes["fc.bias"] = (h,)
    return shapes


# --- z-lab ---------------------------------------------------------------------------------------


def write_zlab_dflash(folder: Path, **changes: Any) -> Path:
    base = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        **layer_config(),
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK + 1,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 3, 6]},
    }
    config = changed(base, changes)
    return write(folder, config, block_shapes({**config, **config["dflash_config"]}, True))


# --- speculators ---------------------------------------------------------------------------------


def write_speculators_eagle3(folder: Path, **changes: Any) -> Path:
    base = {
        **_speculators("eagle3", "Eagle3DraftModel", BLOCK),
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
    }
    config = changed(base, changes)
    return write(folder, config, _speculators_chain(config))


def write_speculators_peagle(folder: Path, **changes: Any) -> Path:
    base = {
        **_speculators("peagle", "PEagleDraftModel", BLOCK),
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "mask_token_id": VOCAB - 1,
        "norm_before_residual": False,
        "embed_requires_grad": True,
    }
    config = changed(base, changes)
    shapes = _speculators_chain(config)
    shapes["mask_hidden"] = (1, 1, 3 * config["transformer_layer_config"]["hidden_size"])
    return write(folder, config, shapes)


def write_speculators_dflash(folder: Path, **changes: Any) -> Path:
    base = {
        **_speculators("dflash", "DFlashDraftModel", BLOCK),
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "block_size": BLOCK + 1,
        "mask_token_id": VOCAB - 1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }
    config = changed(base, changes)
    return write(folder, config, _speculators_block(config))


def write_speculators_dspark(folder: Path, **changes: Any) -> Path:
    base = {
        **_speculators("dspark", "DSparkDraftModel", BLOCK),
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "sample_from_anchor": True,
        "markov_rank": RANK,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = changed(base, changes)
    of_heads = heads({**config["transformer_layer_config"], **config}, config["draft_vocab_size"])
    return write(folder, config, _speculators_block(config) | of_heads)


def _speculators(kind: str, architecture: str, tokens: int) -> Config:
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "float32",
        "transformer_layer_config": {
            "model_type": "qwen3",
            **layer_config(rope_theta=None),
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }


def _speculators_vocabulary(config: Config) -> Shapes:
    inner, draft_vocab = config["transformer_layer_config"], config["draft_vocab_size"]
    h, vocab = inner["hidden_size"], inner["vocab_size"]
    shapes: Shapes = {"embed_tokens.weight": (vocab, h), "lm_head.weight": (draft_vocab, h)}
    if draft_vocab != vocab:
        shapes |= {"d2t": (draft_vocab,), "t2d": (vocab,)}
    return shapes


def _speculators_chain(config: Config) -> Shapes:
    inner = config["transformer_layer_config"]
    h, qk_norm = inner["hidden_size"], inner["model_type"] == "qwen3"
    shapes = _speculators_vocabulary(config)
    shapes |= chain_shapes(inner, "layers.0.", 3, qk_norm)
    for i in range(1, inner["num_hidden_layers"]):
        shapes |= layer(inner, f"layers.{i}.", h, qk_norm)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * h,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(3)}
    return shapes


def _speculators_block(config: Config) -> Shapes:
    inner = config["transformer_layer_config"]
    ids = config["aux_hidden_state_layer_ids"]
    block = block_shapes({**inner, "target_layer_ids": ids}, qk_norm=True)
    return block | _speculators_vocabulary(config)
