"""Micro Gemma 4 checkpoints, made at test time: a target and drafts for it, with random weights.

The target is like google/gemma-4-12B-it in everything but size: a `gemma4_unified` whose sliding
layers outnumber the full ones. The heads of the full ones are twice as wide, share one KV head, use
their keys as values and rotate a quarter of each head. Embeddings are scaled and tied, logits are
capped; there are no per-layer inputs and no experts.

The drafts are in DeepSpec's layouts. With `order`, target and drafts have learnt the alphabet: what
follows a token is mostly the next one, unless the random rest of the target says otherwise. A wrong
feature still changes what is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)

VOCAB = 64
HIDDEN = 64
MLP = 96
# transformers masks the padding token where it stands in a prompt; for the drafts it is the mask.
PAD = MASK = VOCAB - 1
LAYER_TYPES = ("sliding", "sliding", "full", "sliding", "sliding", "full")
WINDOW = 8  # tokens that a sliding layer sees, the row's own included
FEATURES = (1, 2, 4)  # a sliding, a full and the last layer that is captured
GAMMA = 5
RANK = 8
HEADS, HEAD_DIM = 4, 32
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def write_target(folder: Path, seed: int = 0, *, order: bool = False) -> Path:
    """The folder of a target, text only. Its greedy output depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    target = Gemma4UnifiedForConditionalGeneration(_target_config())
    text = target.model.language_model
    with torch.no_grad():
        for name, weight in (*text.named_parameters(), *text.named_buffers()):
            if name.endswith("layer_scalar"):
                weight.uniform_(0.8, 1.0, generator=generator)
            elif weight.dim() > 1 and "rotary" not in name:
                # Small embeddings, so that the context outweighs the token that is tied to them.
                scale = 0.1 if "embed_tokens" in name else 0.2
                weight.normal_(0.0, scale, generator=generator)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
        text.norm.weight.mul_(5.0)
        if order:
            text.embed_tokens.weight.copy_(torch.eye(VOCAB))
            weights = dict(text.named_parameters())
            _learn_order(weights, len(LAYER_TYPES) - 1, noise=0.55)
    target.save_pretrained(folder)
    return folder


def write_draft(
    folder: Path,
    kind: str,
    seed: int = 1,
    *,
    order: bool = False,
    k_eq_v: bool = True,
    head: str = "vanilla",
    **changes: Any,
) -> Path:
    """The folder of a draft. kind: "dspark", "dflash" or "eagle3"; changes: to config.json."""
    chain = kind == "eagle3"
    config = _draft_config(1 if chain else 2) | {"attention_k_eq_v": k_eq_v}
    if chain:
        config |= {"architectures": ["Gemma4Eagle3Model"], "ttt_length": GAMMA}
        config |= {"draft_num_hidden_layers": 1, "step_loss_decay": 0.8}
    else:
        config |= {"architectures": ["Gemma4DSparkModel"], "block_size": GAMMA}
        config |= {"mask_token_id": MASK, "num_anchors": 4, "enable_confidence_head": False}
        config |= {"markov_rank": 0}
    if kind == "dspark":
        config |= {"markov_rank": RANK, "markov_head_type": head}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    config |= changes
    weights = _draft_weights(config, chain, torch.Generator().manual_seed(seed))
    if order and chain:
        _learn_order_of_pairs(weights)
    elif order:
        _learn_order(weights, 0, noise=1.0)
    if order and kind == "dspark":
        waves = range(1, 32, 8)
        weights["markov_head.markov_w1.weight"] = 2.0 * _code(waves)
        weights["markov_head.markov_w2.weight"] = _code(waves).roll(1, dims=0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return folder


def _learn_order(weights: dict[str, torch.Tensor], layer: int, noise: float) -> None:
    """Make the MLP of a layer answer with the token after the one that it reads.

    Tokens are unit vectors. noise: how much all other sublayers add to each dimension, in units of
    what the norms before them leave; a token is 8 of these, and the answer 16.
    """
    for name, weight in weights.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weight.mul_(noise)
    mlp = f"layers.{layer}.mlp."
    for name in ("gate_proj", "up_proj", "down_proj"):
        weights[f"{mlp}{name}.weight"].zero_()
    for name in ("gate_proj", "up_proj"):
        weights[f"{mlp}{name}.weight"][:VOCAB] = torch.eye(VOCAB)
    weights[f"{mlp}down_proj.weight"][:, :VOCAB] = torch.eye(VOCAB).roll(1, dims=0)
    weights[f"layers.{layer}.pre_feedforward_layernorm.weight"].fill_(1.0)
    weights[f"layers.{layer}.post_feedforward_layernorm.weight"].fill_(2.0)


def _learn_order_of_pairs(weights: dict[str, torch.Tensor]) -> None:
    """The same for EAGLE3, whose token reaches the output through attention alone.

    A head has half of VOCAB dimensions, so that tokens are coded as waves. Queries look for the
    code of their own token, and values are the keys.
    """
    code = _code(range(1, 32, 2))
    attention = "layers.0.self_attn."
    for name in ("q_proj", "k_proj"):
        weight = weights[f"{attention}{name}.weight"].zero_()
        weight[:, :HIDDEN] = code.T.repeat(len(weight) // HEAD_DIM, 1)
    for name in ("q_norm", "k_norm"):
        weights[f"{attention}{name}.weight"].fill_(1.0)
    weights[attention + "o_proj.weight"].copy_(code.roll(1, dims=0).repeat(1, HEADS))
    weights["layers.0.post_attention_layernorm.weight"].fill_(2.0)
    weights["layers.0.post_feedforward_layernorm.weight"].mul_(0.2)
    weights["layers.0.layer_scalar"].fill_(0.3)  # forgets the tokens before
    weights["fc.weight"].mul_(0.5)  # the features decide now and then


def _code(waves: range) -> torch.Tensor:
    """[VOCAB, 2 per wave]: each token's point on circles that it goes around with the alphabet.

    The product of two codes is greatest for equal tokens.
    """
    angle = torch.arange(VOCAB)[:, None] * torch.tensor([*waves]) * (2 * torch.pi / VOCAB)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def _target_config() -> Gemma4UnifiedConfig:
    text = Gemma4UnifiedTextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM // 2,
        global_head_dim=HEAD_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=[f"{kind}_attention" for kind in LAYER_TYPES],
        sliding_window=WINDOW,
        rope_parameters=ROPE,
        max_position_embeddings=4096,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0,  # SGLang takes 256 where it is not stated
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
        dtype="float32",
    )
    # Ids of image, video and audio tokens lie outside of the vocabulary, and none is suppressed.
    return Gemma4UnifiedConfig(
        text_config=text,
        eoi_token_id=None,
        eoa_token_index=None,
        dtype="float32",
        language_model_only=True,  # read by SGLang, which then asks for no image processor
    )


def _draft_config(layers: int) -> dict[str, Any]:
    """What DeepSpec's two config.py keep of the target's text config, and what they add to both."""
    return {
        "model_type": "gemma4_unified_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM // 2,
        "global_head_dim": HEAD_DIM,
        "num_global_key_value_heads": 1,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": WINDOW,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
        "num_target_layers": len(LAYER_TYPES),
        "target_layer_ids": list(FEATURES),
        "dtype": "float32",
    }


def _draft_weights(
    config: dict[str, Any], chain: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    h, q = config["hidden_size"], HEADS * HEAD_DIM
    kv = HEAD_DIM * (1 if config["attention_k_eq_v"] else config["num_key_value_heads"])
    width = 2 * h if chain else h
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, h * len(config["target_layer_ids"])),
        "norm.weight": (h,),
        # Frozen copies of the target's, which no reader may need: here they are of another model.
        "embed_tokens.weight": (VOCAB, h),
        "lm_head.weight": (VOCAB, h),
    }
    if not chain:
        shapes["hidden_norm.weight"] = (h,)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (q, width),
            layer + "self_attn.k_proj.weight": (kv, width),
            layer + "self_attn.o_proj.weight": (h, q),
            layer + "self_attn.q_norm.weight": (HEAD_DIM,),
            layer + "self_attn.k_norm.weight": (HEAD_DIM,),
            layer + "mlp.gate_proj.weight": (MLP, h),
            layer + "mlp.up_proj.weight": (MLP, h),
            layer + "mlp.down_proj.weight": (h, MLP),
            layer + "input_layernorm.weight": (h,),
            layer + "post_attention_layernorm.weight": (h,),
            layer + "pre_feedforward_layernorm.weight": (h,),
            layer + "post_feedforward_layernorm.weight": (h,),
            layer + "layer_scalar": (1,),
        }
        if not config["attention_k_eq_v"]:
            shapes[layer + "self_attn.v_proj.weight"] = (kv, width)
        if chain:
            shapes[layer + "hidden_norm.weight"] = (h,)
    rank = config.get("markov_rank", 0)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (VOCAB, rank)
        shapes["markov_head.markov_w2.weight"] = (VOCAB, rank)
    if config.get("enable_confidence_head"):
        shapes["confidence_head.proj.weight"] = (1, h + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of a scale that leaves no weight without a visible effect."""
    if "norm" in name or name.endswith("layer_scalar"):
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * 0.3
