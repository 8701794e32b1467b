"""Layers of our own draft models, over SGLang's parallel ones, in the style of the checkpoint.

The style (`DraftCheckpoint.style`) says which norms there are:

  qwen3, llama : x = x + attention(norm(x));  x = x + mlp(norm(x))
  gemma4       : x = x + norm(attention(norm(x)));  x = (x + norm(mlp(norm(x)))) * scalar

In attention, queries and keys are normed per head, except in llama. In gemma4, values are too, with
no weight; values may be the keys as they were before their norm; and scores are not scaled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import Gemma4RMSNorm, RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import can_dflash_slice_qkv_weight
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint

KeysValues = tuple[torch.Tensor, torch.Tensor]


class DraftLayer(nn.Module):
    """A decoder layer, except for what its attention reads. input_size: the width of that.

    causal: a row sees the rows before it; otherwise all rows of its block see each other.
    """

    def __init__(
        self,
        draft: DraftCheckpoint,
        layer_id: int,
        input_size: int,
        quant_config: Any = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        h, eps = draft.hidden_size, draft.rms_norm_eps
        self.input_layernorm = RMSNorm(h, eps=eps)
        self.self_attn = DraftAttention(draft, layer_id, input_size, quant_config, causal)
        self.post_attention_layernorm = RMSNorm(h, eps=eps)
        self.mlp = DraftMLP(draft, quant_config)
        self.is_gemma = draft.style == "gemma4"
        if self.is_gemma:
            self.pre_feedforward_layernorm = RMSNorm(h, eps=eps)
            self.post_feedforward_layernorm = RMSNorm(h, eps=eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, H], from its residual and what its attention gave."""
        out: torch.Tensor
        if not self.is_gemma:
            x = residual + attended
            out = x + self.mlp(self.post_attention_layernorm(x))
            return out
        x = residual + self.post_attention_layernorm(attended)
        mlp = self.mlp(self.pre_feedforward_layernorm(x))
        out = (x + self.post_feedforward_layernorm(mlp)) * self.layer_scalar
        return out


class DraftAttention(nn.Module):
    """See `DraftLayer`."""

    def __init__(
        self,
        draft: DraftCheckpoint,
        layer_id: int,
        input_size: int,
        quant_config: Any = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        ranks = int(get_parallel().tp_size)
        self.head_dim = draft.head_dim
        self.num_heads = draft.num_heads // ranks
        self.num_kv_heads = max(1, draft.num_kv_heads // ranks)
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            input_size,
            self.head_dim,
            draft.num_heads,
            draft.num_kv_heads,
            bias=draft.attention_bias,
            quant_config=quant_config,
        )
        self.o_proj = RowParallelLinear(
            draft.num_heads * self.head_dim,
            draft.hidden_size,
            bias=draft.attention_bias,
            quant_config=quant_config,
        )
        self.has_qk_norm = draft.style != "llama"
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=draft.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=draft.rms_norm_eps)
        self.is_gemma = draft.style == "gemma4"
        if self.is_gemma:
            self.v_norm = Gemma4RMSNorm(self.head_dim, eps=draft.rms_norm_eps, with_scale=False)
        self.rotary_emb = _rope(draft)
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            1.0 if self.is_gemma else self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
            quant_config=quant_config,
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """x [N, input size] -> [N, H]"""
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.has_qk_norm:
            q = self._per_head(self.q_norm, q)
        k, v = self._norm_kv(k, v)
        q, k = self.rotary_emb(positions, q.contiguous(), k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))[0]
        return out

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> KeysValues:
        """x [N, input size] -> k, v [N, KV heads, head size], as the KV pool holds them."""
        k, v = self._norm_kv(*self._project_kv(x))
        # Some RoPE kernels want queries too, of as many heads as the keys have or more.
        _, k = self.rotary_emb(positions, torch.empty_like(k), k)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return k.view(shape), v.view(shape)

    def _project_kv(self, x: torch.Tensor) -> KeysValues:
        """k, v [N, KV heads * head size], without the queries where the weight can be cut."""
        sizes = [self.kv_size, self.kv_size]
        sliceable, _ = can_dflash_slice_qkv_weight(self.qkv_proj)
        if not sliceable:
            qkv, _ = self.qkv_proj(x)
            _, k, v = qkv.split([self.q_size, *sizes], dim=-1)
            return k, v
        bias = self.qkv_proj.bias
        kv = F.linear(
            x, self.qkv_proj.weight[self.q_size :], None if bias is None else bias[self.q_size :]
        )
        k, v = kv.split(sizes, dim=-1)
        return k, v

    def _norm_kv(self, k: torch.Tensor, v: torch.Tensor) -> KeysValues:
        if self.has_qk_norm:
            k = self._per_head(self.k_norm, k)
        if self.is_gemma:
            v = self._per_head(self.v_norm, v)
        return k.contiguous(), v.contiguous()

    def _per_head(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm(x.reshape(-1, self.head_dim))
        return normed.view(x.shape)


def _rope(draft: DraftCheckpoint) -> nn.Module:
    """SGLang makes one for equal arguments, and a Gemma 4 target's table takes half a GB: so the
    arguments are those that the target's own layers give."""
    scaling = draft.rope_scaling
    partial = 1.0
    if scaling is not None and scaling["rope_type"] == "proportional":
        partial = scaling.get("partial_rotary_factor", 1.0)
        scaling = {"rope_type": "proportional"}
    rope: nn.Module = get_rope(
        draft.head_dim,
        rotary_dim=draft.head_dim,
        max_position=draft.max_position_embeddings,
        base=draft.rope_theta,
        rope_scaling=scaling,
        partial_rotary_factor=partial,
    )
    return rope


class DraftMLP(nn.Module):
    """Gated, with the checkpoint's activation."""

    def __init__(self, draft: DraftCheckpoint, quant_config: Any = None) -> None:
        super().__init__()
        h, m = draft.hidden_size, draft.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            h, [m, m], bias=False, quant_config=quant_config
        )
        self.down_proj = RowParallelLinear(m, h, bias=False, quant_config=quant_config)
        tanh = draft.hidden_act == "gelu_pytorch_tanh"
        self.act = GeluAndMul(approximate="tanh") if tanh else SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out: torch.Tensor = self.down_proj(self.act(gate_up))[0]
        return out


class TiedHead:
    """A target's embedding that is its LM head too, as SGLang's draft code expects a head.

    Gemma's is a plain `nn.Embedding`, whole on every rank.
    """

    quant_method = None

    def __init__(self, embedding: nn.Embedding) -> None:
        self.embedding = embedding
        self.org_vocab_size = embedding.num_embeddings
        parallel = get_parallel()
        # A part each where the vocabulary divides; gathered, the parts are the whole. So are
        # whole heads, once cut to the vocabulary.
        rows, rest = divmod(self.org_vocab_size, int(parallel.tp_size))
        first = int(parallel.tp_rank) * rows
        self._part = slice(None) if rest else slice(first, first + rows)

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.embedding.weight[self._part]
        return weight


def as_head(module: nn.Module) -> Any:
    """The target's LM head, with what SGLang's draft code reads of one."""
    return TiedHead(module) if isinstance(module, nn.Embedding) else module
