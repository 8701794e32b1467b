"""Configs and weights of the made-up pair; `pair` says what they do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

HIGH, LOW = 0.9, 0.5
SCALE = 0.02  # of embeddings and of matrices, per element
FAINT = 1e-7
OFF_BY = 13  # how far behind a wrong token of the draft is
HEAD_SCALE = 0.1
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 target and its DSPARK draft in DeepSpec's layout. rank: of W1 and W2."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_layers: int
    target_layer_ids: tuple[int, ...]
    rank: int
    gamma: int
    dtype: str
    positions: int


# --- configs -------------------------------------------------------------------------------------


def _layers(shape: Shape, layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": shape.positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
    }


def target_config(shape: Shape) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **_layers(shape, shape.layers)}


def draft_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_layers(shape, shape.draft_layers),
        "num_target_layers": shape.layers,
        "target_layer_ids": list(shape.target_layer_ids),
        "block_size": shape.gamma,
        "mask_token_id": shape.vocab - 1,
        "num_anchors": 1,
        "markov_rank": shape.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


# --- weights -------------------------------------------------------------------------------------


def target_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """lm_head and embedding are views of one matrix, and every layer's weights are the first's."""
    rows = _unit_rows(shape.vocab + 1, shape.hidden, generator) * SCALE
    rows[-1] = rows[0]
    rows = rows.to(_dtype(shape)).cpu()
    layer = _layer_weights(shape, generator)
    ones = torch.ones(shape.hidden, dtype=_dtype(shape))
    return {
        "model.embed_tokens.weight": rows[1:],
        "lm_head.weight": rows[:-1],
        "model.norm.weight": ones,
        **{
            f"model.layers.{i}.{name}": weight
            for i in range(shape.layers)
            for name, weight in layer.items()
        },
    }


def draft_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    layer = _layer_weights(shape, generator)
    features = shape.hidden * len(shape.target_layer_ids)
    dtype = _dtype(shape)
    confidence = torch.zeros(1, shape.hidden + shape.rank, dtype=dtype)
    confidence[0, -1] = 1.0
    weights = {
        "fc.weight": _normal((shape.hidden, features), generator, dtype),
        "hidden_norm.weight": torch.ones(shape.hidden, dtype=dtype),
        "norm.weight": torch.full((shape.hidden,), 1e-3, dtype=dtype),
        **dict(zip(MARKOV, markov_weights(shape, generator), strict=True)),
        "confidence_head.proj.weight": confidence,
        "confidence_head.proj.bias": torch.zeros(1, dtype=dtype),
    }
    for i in range(shape.draft_layers):
        # Copies: safetensors does not know shared memory.
        weights |= {f"layers.{i}.{name}": weight.clone() for name, weight in layer.items()}
    return weights


def markov_weights(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 and W2 [V, rank]; the last column of W1 is the confidence's logit, that of W2 is 0."""
    device = generator.device
    keys = _unit_rows(shape.vocab, shape.rank - 1, generator)
    tokens = torch.arange(shape.vocab, device=device)
    chance = torch.where(tokens < shape.vocab // 2, HIGH, LOW)
    right = torch.rand(shape.vocab, generator=generator, device=device) < chance
    says = torch.where(right, tokens, (tokens + OFF_BY) % shape.vocab)
    logits = torch.special.logit(chance).unsqueeze(1)
    w1 = torch.cat([keys[says], logits], dim=1)
    w2 = torch.cat([HEAD_SCALE * keys.roll(1, dims=0), torch.zeros_like(logits)], dim=1)
    dtype = _dtype(shape)
    return w1.to(dtype).cpu(), w2.to(dtype).cpu()


def _layer_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    h, m, d, dtype = shape.hidden, shape.intermediate, shape.head_dim, _dtype(shape)
    q, kv = shape.heads * d, shape.kv_heads * d
    sizes = {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (m, h),
        "mlp.up_proj": (m, h),
        "mlp.down_proj": (h, m),
    }
    norms = {"input_layernorm": h, "post_attention_layernorm": h}
    norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
    weights = {f"{name}.weight": torch.ones(size, dtype=dtype) for name, size in norms.items()}
    for name, size in sizes.items():
        scale = FAINT if name.endswith(("o_proj", "down_proj")) else SCALE
        weights[f"{name}.weight"] = _normal(size, generator, dtype, scale)
    return weights


def _normal(
    size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, scale: float = SCALE
) -> torch.Tensor:
    drawn = torch.randn(size, generator=generator, device=generator.device)
    return (drawn * scale).to(dtype).cpu()


def _unit_rows(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, columns] float32: random directions, of which each has the norm of `columns` ones."""
    drawn = torch.randn(rows, columns, generator=generator, device=generator.device)
    return torch.nn.functional.normalize(drawn, dim=1).mul_(math.sqrt(columns))


def _dtype(shape: Shape) -> torch.dtype:
    found: torch.dtype = getattr(torch, shape.dtype)
    return found
