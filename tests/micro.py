"""Micro checkpoints, made at test time: a target and a DSPARK draft of a few hundred kB.

`write_random` makes random pairs. `write_oracle` makes pairs whose behaviour is known exactly:

- The target repeats itself with a shift: the token after position t is pi(x[t - d]), where d is the
  copy distance and pi(x) = x + 1 (mod vocabulary). Its last layer attends to distance d only.
- The draft does the same from the captured features of layer 0: block row k (at position L + k)
  looks back d positions. For k < d this is committed context, for k = d the anchor, behind it only
  mask tokens: so exactly min(d + 1, gamma) drafts are right, whatever the text. A draft that looks
  back d - 1 instead is wrong in every position.

A loader that mixes up layers, positions, anchor or head changes these numbers at once.

How a layer looks back exactly d: queries and keys are constant vectors (from a constant hidden
dimension), and the query is pre-rotated by d positions, so that after RoPE the score at relative
distance D is sum_i cos((D - d) theta_i), which peaks at D = d.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

GAMMA = 7
VOCAB = 48
HIDDEN = 64
MASK = VOCAB - 1
ROPE_THETA = 100.0
CONSTANT = VOCAB  # the hidden dimension that is the same for every token
TARGET_LAYERS = 4
SHARPNESS = 400.0  # gap between the wanted distance and its neighbours, in attention logits
# Sixteen requests: prompt and output lengths around pages of 16 and chunks of 32 and 64 tokens.
LENGTHS = [
    *[(1, 40), (2, 1), (5, 2), (17, 3), (40, 7), (64, 8), (65, 9), (100, 15)],
    *[(333, 33), (600, 20), (16, 64), (31, 65), (8, 50), (3, 120), (100, 40), (100, 20)],
]


def write_oracle(
    folder: Path,
    *,
    distance: int = GAMMA,
    draft_distance: int | None = None,
    head: str = "vanilla",
    head_noise: float = 0.0,
    target_noise: float = 0.0,
    seed: int = 0,
    feature_layers: tuple[int, ...] = (0,),
    **config_changes: Any,
) -> tuple[Path, Path]:
    """Target and draft folders of an oracle pair.

    head_noise > 0 makes the draft err at random. target_noise > 0 gives the target's middle layers
    random weights of that scale: its tokens then depend on the whole context and leave the oracle
    now and then, so that accept lengths vary and any damage to the KV cache shows.
    """
    target = _oracle_target(distance, target_noise, seed)
    target_path = folder / "target"
    target.save_pretrained(target_path)

    generator = torch.Generator().manual_seed(seed)
    weights = _draft_weights(generator, head, len(feature_layers), scale=0.0)
    look_back = distance if draft_distance is None else draft_distance
    attention = _look_back(look_back)
    # Further features disturb a little, so that their order and layers matter.
    weights["fc.weight"].normal_(0.0, 0.03, generator=generator)
    weights["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    weights["layers.0.self_attn.q_proj.weight"].copy_(attention["q_proj"])
    weights["layers.0.self_attn.k_proj.weight"].copy_(attention["k_proj"])
    # Qwen3 normalises queries and keys per head; the norm's weight restores the sharpness.
    for norm in ("q_norm", "k_norm"):
        weights[f"layers.0.self_attn.{norm}.weight"].fill_(_amplitude())
    weights["layers.0.self_attn.v_proj.weight"].copy_(attention["v_proj"])
    weights["layers.0.self_attn.o_proj.weight"].copy_(attention["o_proj"])
    if head_noise:
        for name, weight in weights.items():
            if name.startswith(("markov_head.", "confidence_head.")):
                weight.normal_(0.0, head_noise, generator=generator)
    draft_path = folder / "draft"
    _save_draft(draft_path, weights, head, feature_layers, config_changes)
    return target_path, draft_path


def write_random(
    folder: Path,
    *,
    head: str = "vanilla",
    vocab: int = VOCAB,
    seed: int = 0,
    head_scale: float = 1.0,
    feature_layers: tuple[int, ...] = (0, 2),
    **config_changes: Any,
) -> tuple[Path, Path]:
    """Target and draft folders of a pair with random weights.

    head_scale: standard deviation of the LM head, which both use; a small one makes both
    distributions flat, so that they overlap and sampled drafts are accepted now and then.
    """
    torch.manual_seed(seed)
    target = LlamaForCausalLM(_target_config(vocab))
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.dim() > 1:
                scale = head_scale if "lm_head" in name else 1.0 if "embed" in name else 0.2
                weight.normal_(0.0, scale)
    target_path = folder / "target"
    target.save_pretrained(target_path)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = _draft_weights(generator, head, len(feature_layers), scale=0.2, vocab=vocab)
    draft_path = folder / "draft"
    changes = {"vocab_size": vocab, "mask_token_id": vocab - 1, **config_changes}
    _save_draft(draft_path, weights, head, feature_layers, changes)
    return target_path, draft_path


def continuation(prompt: list[int], length: int, distance: int = GAMMA) -> list[int]:
    """What the oracle target generates: x[t + 1] = x[t - distance] + 1 (mod vocabulary)."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append((tokens[-1 - distance] + 1) % VOCAB)
    return tokens[len(prompt) :]


def requests() -> list[tuple[list[int], int]]:
    """Random prompts of LENGTHS, and how many tokens each is to get; the last two share a prefix.

    Tokens stay below the mask token, or a mask would be right by chance.
    """
    rng = random.Random(0)
    tokens = [[rng.randrange(MASK) for _ in range(n)] for n, _ in LENGTHS]
    tokens[-1][:90] = tokens[-2][:90]
    return [(prompt, length) for prompt, (_, length) in zip(tokens, LENGTHS, strict=True)]


def _target_config(vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN,
        max_position_embeddings=4096,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def _oracle_target(distance: int, noise: float, seed: int) -> LlamaForCausalLM:
    generator = torch.Generator().manual_seed(seed + 100)
    model = LlamaForCausalLM(_target_config(VOCAB))
    attention = _look_back(distance)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embedding = model.model.embed_tokens.weight
        embedding[:, :VOCAB] = torch.eye(VOCAB)
        embedding[:, CONSTANT] = 1.0
        # Row v reads dimension v - 1, so that the copied token x comes out as x + 1.
        model.lm_head.weight[:, :VOCAB] = torch.eye(VOCAB).roll(1, dims=0)
        for layer in model.model.layers[1:-1]:
            for weight in layer.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, noise, generator=generator)
        last = model.model.layers[-1].self_attn
        last.q_proj.weight.copy_(attention["q_proj"] * _amplitude())
        last.k_proj.weight.copy_(attention["k_proj"] * _amplitude())
        last.v_proj.weight.copy_(attention["v_proj"])
        last.o_proj.weight.copy_(attention["o_proj"])
    return model


def _amplitude() -> float:
    """Scale of queries and keys at which neighbours of the wanted distance lose by SHARPNESS."""
    theta = _frequencies()
    gap = float((1 - theta.cos()).sum()) * 2
    # After the layer norm the constant dimension is sqrt(HIDDEN / 2): its square is in the score.
    return (SHARPNESS * HIDDEN**0.5 / gap) ** 0.5


def _frequencies() -> torch.Tensor:
    return ROPE_THETA ** (-torch.arange(0, HIDDEN, 2) / HIDDEN)


def _look_back(distance: int) -> dict[str, torch.Tensor]:
    """Attention weights that copy the token `distance` positions back into the hidden state."""
    half = HIDDEN // 2
    angle = _frequencies() * -distance
    query, key = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    query[:half, CONSTANT] = angle.cos()
    query[half:, CONSTANT] = angle.sin()
    key[:half, CONSTANT] = 1.0
    token = torch.zeros(HIDDEN, HIDDEN)
    token[:VOCAB, :VOCAB] = torch.eye(VOCAB)
    return {"q_proj": query, "k_proj": key, "v_proj": token, "o_proj": 10.0 * token}


def _draft_weights(
    generator: torch.Generator, head: str, num_features: int, scale: float, vocab: int = VOCAB
) -> dict[str, torch.Tensor]:
    """All weights of a one-layer draft, normal with the given scale; norms are one."""
    h, r = HIDDEN, 8
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, h * num_features),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "layers.0.self_attn.q_proj.weight": (h, h),
        "layers.0.self_attn.k_proj.weight": (h, h),
        "layers.0.self_attn.v_proj.weight": (h, h),
        "layers.0.self_attn.o_proj.weight": (h, h),
        "layers.0.self_attn.q_norm.weight": (h,),
        "layers.0.self_attn.k_norm.weight": (h,),
        "layers.0.mlp.gate_proj.weight": (h, h),
        "layers.0.mlp.up_proj.weight": (h, h),
        "layers.0.mlp.down_proj.weight": (h, h),
        "layers.0.input_layernorm.weight": (h,),
        "layers.0.post_attention_layernorm.weight": (h,),
        "markov_head.markov_w1.weight": (vocab, r),
        "markov_head.markov_w2.weight": (vocab, r),
        "confidence_head.proj.weight": (1, h + r),
        "confidence_head.proj.bias": (1,),
    }
    if head == "gated":
        shapes["markov_head.gate_proj.weight"] = (r, h + r)
        shapes["markov_head.gate_proj.bias"] = (r,)
    if head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def _save_draft(
    path: Path,
    weights: dict[str, torch.Tensor],
    head: str,
    feature_layers: tuple[int, ...],
    changes: dict[str, Any],
) -> None:
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 4096,
        "layer_types": ["full_attention"],
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "block_size": GAMMA,
        "mask_token_id": MASK,
        "target_layer_ids": list(feature_layers),
        "num_target_layers": TARGET_LAYERS,
        "num_anchors": 1,
        "markov_rank": 8,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "torch_dtype": "float32",
    }
    config.update(changes)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: w.contiguous() for name, w in weights.items()}, path / "model.safetensors")
