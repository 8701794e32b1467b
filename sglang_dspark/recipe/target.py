"""The target model, written for throughput on few CPU cores.

transformers is the reference (the tests compare against it), but it spends most of a decode step
on small kernels and on copying the KV cache: 0.31 s a step for 64 rows of SmolLM2-135M on two
Zen 4 cores, where the matrix products need 0.07 s. Here q/k/v and gate/up are fused, the cache is
written in place, and the queries of one KV head attend together, so K and V are never repeated.

Only what the recipe's targets need: LlamaForCausalLM without biases and with plain RoPE.

Shapes: B rows, S new tokens a row, T cached tokens a row, H hidden size, D head size,
K KV heads, G query heads per KV head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, in the target's dtype."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(K * G + 2 * K) * D, H]
    output: Tensor  # [H, K * G * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 * I, H]
    down: Tensor  # [H, I]


@dataclass
class KVCache:
    """Keys and values of every layer, written in place; the first `length` slots are filled."""

    keys: Tensor  # [layers, B, K, T_max, D]
    values: Tensor  # [layers, B, K, T_max, D]
    length: int = 0


class FastLlama:
    """A Llama decoder that returns hidden states, with or without a KV cache. Inference only."""

    def __init__(self, model: Any) -> None:
        """model: a transformers LlamaForCausalLM; its weights are shared or copied, not changed."""
        config = model.config
        biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
        rope = config.rope_parameters
        if config.model_type != "llama" or biases or rope.get("rope_type") != "default":
            raise ValueError(
                f"target model_type={config.model_type!r}, rope_type={rope.get('rope_type')!r}, "
                f"{len(biases)} biases; the recipe knows 'llama' with 'default' RoPE and no bias"
            )
        self.config = config
        self.eps = float(config.rms_norm_eps)
        self.kv_heads = int(config.num_key_value_heads)
        self.group = int(config.num_attention_heads) // self.kv_heads
        self.head_dim = int(config.head_dim)
        self.embed: Tensor = model.model.embed_tokens.weight.detach()  # [V, H]
        self.head: Tensor = model.lm_head.weight.detach()  # [V, H]
        self.final_norm: Tensor = model.model.norm.weight.detach()  # [H]
        self.layers = [_fuse(layer) for layer in model.model.layers]
        positions = torch.arange(int(config.max_position_embeddings), device=self.embed.device)
        self.rope = rope_table(positions, self.head_dim, float(rope["rope_theta"]))

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: str = "cpu") -> FastLlama:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(model)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def new_cache(self, rows: int, max_length: int) -> KVCache:
        shape = (len(self.layers), rows, self.kv_heads, max_length, self.head_dim)
        # Zeros, not empty: a masked slot still takes part in the product, where NaN would stay.
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return KVCache(zeros, torch.zeros_like(zeros))

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,  # int64 [B, S]
        positions: Tensor,  # int64 [B, S]
        mask: Tensor,  # bool [B, S, T]: may query s of the row read slot t
        cache: KVCache,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Append S tokens to `cache`. Returns the normed hidden states [B, S, H] and, for every
        layer id of `capture` (0-based), the output of that layer [B, S, H]."""
        rows, steps = ids.shape
        start, end = cache.length, cache.length + steps
        cos, sin = (table[positions].unsqueeze(1).to(self.dtype) for table in self.rope)
        # Queries of one KV head become G * S query rows of one attention call.
        bias = mask[:, None, None].expand(rows, 1, self.group, steps, end)
        bias = bias.reshape(rows, 1, self.group * steps, end)
        x, captured = F.embedding(ids, self.embed), []
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[-1:], layer.input_norm, self.eps)
            heads = F.linear(h, layer.qkv).view(rows, steps, -1, self.head_dim).transpose(1, 2)
            kv = self.kv_heads
            q, k, v = heads.split([kv * self.group, kv, kv], dim=1)
            cache.keys[index, :, :, start:end] = rotate(k, cos, sin)
            cache.values[index, :, :, start:end] = v
            q = rotate(q, cos, sin).reshape(rows, kv, self.group * steps, self.head_dim)
            out = F.scaled_dot_product_attention(
                q, cache.keys[index, :, :, :end], cache.values[index, :, :, :end], attn_mask=bias
            )
            out = out.view(rows, kv * self.group, steps, self.head_dim).transpose(1, 2)
            x = x + F.linear(out.reshape(rows, steps, -1), layer.output)
            h = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
            if index in capture:
                captured.append(x)
        cache.length = end
        return F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps), captured

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] after the final norm -> logits [..., V] in the target's dtype."""
        return F.linear(hidden, self.head)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim], of RoPE in the "rotate halves" layout."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] * theta ** (-exponents / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE. x [..., S, D]; cos and sin broadcast against it."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def left_padded_mask(pads: Tensor, steps: int, end: int) -> Tensor:
    """Causal mask of rows padded on the left.

    pads int64 [B]: padding slots of each row. Returns bool [B, steps, end] for the last `steps`
    of `end` slots. A padding query reads its own slot, so that no softmax row is empty.
    """
    slots = torch.arange(end, device=pads.device)
    queries = slots[end - steps :]
    causal = slots[None, None, :] <= queries[None, :, None]
    real = slots[None, None, :] >= pads[:, None, None]
    own = slots[None, None, :] == queries[None, :, None]
    return (causal & real) | own


def _fuse(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat(qkv).detach(),
        output=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
        down=mlp.down_proj.weight.detach(),
    )
