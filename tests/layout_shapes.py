"""What the micro checkpoints of `layouts` share: shapes of modules, and writing the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def layer(config: Config, prefix: str, width: int, qk_norm: bool) -> Shapes:
    h, m, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: Shapes = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (m, h),
        "mlp.up_proj.weight": (m, h),
        "mlp.down_proj.weight": (h, m),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def block_shapes(config: Config, qk_norm: bool) -> Shapes:
    """A block draft's decoder layers, and what makes context of the target's features."""
    h = config["hidden_size"]
    ids = config.get("target_layer_ids") or [0] * config["num_hidden_layers"]
    shapes: Shapes = {
        "fc.weight": (h, h * len(ids)),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= layer(config, f"layers.{i}.", h, qk_norm)
    return shapes


def chain_shapes(
    config: Config, first: str, features: int, qk_norm: bool, target_hidden: int | None = None
) -> Shapes:
    """fc, the norms and the first layer of an EAGLE3 draft."""
    h = config["hidden_size"]
    return {
        "fc.weight": (h, features * (target_hidden or h)),
        "norm.weight": (h,),
        **layer(config, first, 2 * h, qk_norm),
        first + "hidden_norm.weight": (h,),
    }


def copies(config: Config) -> Shapes:
    """DeepSpec's frozen copies of the target's."""
    shape = (config["vocab_size"], config["hidden_size"])
    return {"embed_tokens.weight": shape, "lm_head.weight": shape}


def heads(config: Config, draft_vocab: int | None = None) -> Shapes:
    """The sequential and the confidence head. draft_vocab: tokens that are proposed, if not all."""
    h, r, shapes = config["hidden_size"], config["markov_rank"], Shapes()
    if r:
        shapes["markov_head.markov_w1.weight"] = (config["vocab_size"], r)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab or config["vocab_size"], r)
        if config["markov_head_type"] == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, h + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        if config["markov_head_type"] == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if config["enable_confidence_head"]:
        features = h + (r if config.get("confidence_head_with_markov") else 0)
        shapes["confidence_head.proj.weight"] = (1, features)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def changed(base: Config, changes: Config) -> Config:
    config = dict(base)
    for name, value in changes.items():
        is_merged = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = changed(config[name], value) if is_merged else value
    return {name: value for name, value in config.items() if value is not None}


def write(folder: Path, config: Config, shapes: Shapes, pickled: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = random_weights(shapes)
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def random_weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Small and normal; norms are one; d2t and t2d, if asked for, are of random tokens."""
    generator = torch.Generator().manual_seed(len(shapes))
    weights = {}
    for name, shape in shapes.items():
        is_one = "norm" in name or name.endswith("layer_scalar")
        random = torch.randn(shape, generator=generator)
        weights[name] = torch.ones(shape) if is_one else 0.02 * random
    for prefix in ("", "model."):
        if prefix + "d2t" in shapes:
            (count,), (vocab,) = shapes[prefix + "d2t"], shapes[prefix + "t2d"]
            ids = torch.randperm(vocab, generator=generator)[:count].sort().values
            weights[prefix + "d2t"] = ids - torch.arange(count)
            weights[prefix + "t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def edit(folder: Path, **changes: Any) -> Path:
    """Change config.json, as `changes` of the writers do, and leave the weights."""
    file = folder / "config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), changes)))
    return folder
