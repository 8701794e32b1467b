"""Attention and MLP of our own draft models, over SGLang's parallel layers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint


class DraftAttention(nn.Module):
    """In the style of the checkpoint; see `DraftCheckpoint.style`. input_size: width of its input.

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
        gemma = draft.style == "gemma4"
        self.v_norm_eps = draft.rms_norm_eps if gemma else None
        self.rotary_emb = get_rope(
            self.head_dim,
            rotary_dim=self.head_dim,
            max_position=draft.max_position_embeddings,
            base=draft.rope_theta,
            rope_scaling=draft.rope_scaling,
        )
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            1.0 if gemma else self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
            quant_config=quant_config,
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        q, k, v = self._project(x)
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))[0]
        return out

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, input size] -> k, v [N, KV heads, head size], as the KV pool holds them."""
        q, k, v = self._project(x)
        _, k = self.rotary_emb(positions, q, k)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return k.view(shape), v.view(shape)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.has_qk_norm:
            q = self._per_head(self.q_norm, q)
            k = self._per_head(self.k_norm, k)
        if self.v_norm_eps is not None:
            heads = v.reshape(-1, self.head_dim).float()
            scale = torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + self.v_norm_eps)
            v = (heads * scale).to(v.dtype).view(v.shape)
        return q.contiguous(), k.contiguous(), v.contiguous()

    def _per_head(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm(x.reshape(-1, self.head_dim))
        return normed.view(x.shape)


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
