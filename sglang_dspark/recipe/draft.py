"""The DSPARK draft as a plain torch module; parameter names are those of the exported file.

Source: the DSpark paper (arXiv 2607.05147) and the layout that DeepSpec publishes and SGLang's
`Qwen3DSparkModel` loads. The embedding and the lm_head are the target's: they are passed in, never
stored.

    c      = hidden_norm(fc([h_1; ...; h_F]))         one vector per context position
    x_0    = embed([anchor, mask, ..., mask])         at positions L .. L+γ-1
    layer  : q from the block; k, v from c (context, as it is) and from the block (after
             input_layernorm); every row sees all of both; then SwiGLU
    h_k    = norm(x_last)                             row k predicts the token at L+1+k
    logits = lm_head(h_k) + W2 · W1[x_{k-1}]          x_{-1} is the anchor
    c_k    = sigmoid(w · [h_k ; W1[x_{k-1}]] + b)     P(token k accepted | all before accepted)

Shapes: S sequences, T context tokens, N block rows (anchors × γ), H hidden size, F features,
D head size, V vocabulary, r Markov rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.recipe.target import FastLlama, rope_table, rotate


@dataclass(frozen=True)
class DraftConfig:
    """The draft's shape. The defaults fit SmolLM2-135M; `for_target` fills the rest in.

    num_hidden_layers: draft layers. block_size: γ, tokens proposed per round. target_layer_ids:
    0-based target layers whose outputs are the context features. mask_token_id: the embedding of
    rows 1..γ-1. markov_rank: r; 0 is a DFLASH draft, whose rows do not know each other's tokens.
    confidence: whether there is a confidence head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_hidden_layers: int = 2
    block_size: int = 7
    markov_rank: int = 32
    confidence: bool = True

    def __post_init__(self) -> None:
        last = self.num_target_layers - 2
        if not self.target_layer_ids or not all(0 <= i <= last for i in self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids is {list(self.target_layer_ids)}; needs at least one id, each "
                f"in 0..{last} (the last layer's output, {last + 1}, cannot be captured)"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; must be in 0..{self.vocab_size - 1}"
            )
        for name, least in (("num_hidden_layers", 1), ("block_size", 1), ("markov_rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least {least}")

    @classmethod
    def for_target(
        cls, target: FastLlama, target_layer_ids: tuple[int, ...], mask_token_id: int, **rest: Any
    ) -> Self:
        """The target's own widths, so that its layers can initialise the draft's."""
        config = target.config
        return cls(
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_attention_heads=int(config.num_attention_heads),
            num_key_value_heads=int(config.num_key_value_heads),
            head_dim=int(config.head_dim),
            num_target_layers=int(config.num_hidden_layers),
            rms_norm_eps=float(config.rms_norm_eps),
            rope_theta=float(config.rope_parameters["rope_theta"]),
            max_position_embeddings=int(config.max_position_embeddings),
            target_layer_ids=target_layer_ids,
            mask_token_id=mask_token_id,
            **rest,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `DraftConfig.from_dict` reads it back, and ignores other keys."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["target_layer_ids"] = tuple(known["target_layer_ids"])
        return cls(**known)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 whatever autocast says. x [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        normed: Tensor = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return normed * self.weight


class Attention(nn.Module):
    """Qwen3 attention whose keys and values are the context's followed by the block's own."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # [S, N, H], normed block rows
        context: Tensor,  # [S, T, H]
        rope: tuple[Tensor, Tensor],  # cos, sin [S, 1, T + N, D]
        mask: Tensor | None,  # bool [S, 1, N, T + N]; None: every row sees everything
    ) -> Tensor:
        source = torch.cat([context, x], dim=1)
        length = context.shape[1]
        q = self.q_norm(self._split(self.q_proj(x)))
        k = self.k_norm(self._split(self.k_proj(source)))
        v = self._split(self.v_proj(source))
        cos, sin = rope
        q = rotate(q, cos[:, :, length:], sin[:, :, length:])
        k = rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, enable_gqa=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:
        """[S, tokens, heads * D] -> [S, heads, tokens, D]"""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """The sequential bias W2 · W1[x]: what follows token x, whatever the context."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def bias(self, previous: Tensor, columns: Tensor | None = None) -> Tensor:
        """previous int64 [...] -> logit bias [..., V], or of the vocabulary ids `columns` only."""
        weight = self.markov_w2.weight if columns is None else self.markov_w2.weight[columns]
        latent: Tensor = self.markov_w1(previous)
        return F.linear(latent, weight)


class ConfidenceHead(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, previous_latent: Tensor | None) -> Tensor:
        """hidden [..., H], W1[x_{k-1}] [..., r] if there is a Markov head -> logit [...]"""
        if previous_latent is not None:
            hidden = torch.cat([hidden, previous_latent.to(hidden.dtype)], dim=-1)
        logit: Tensor = self.proj(hidden).squeeze(-1)
        return logit


class DraftModel(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def latent(self, previous: Tensor) -> Tensor | None:
        """W1[previous], int64 [...] -> [..., r]; None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w1(previous)

    def project_context(self, features: Tensor) -> Tensor:
        """features [..., F * H] of the target -> context vectors c [..., H]"""
        context: Tensor = self.hidden_norm(self.fc(features))
        return context

    def forward(
        self,
        embeds: Tensor,  # [S, N, H], embeddings of the block rows
        positions: Tensor,  # int64 [S, N], of the block rows
        context: Tensor,  # [S, T, H], from project_context; slot t is position t
        mask: Tensor | None = None,  # bool [S, N, T + N]
    ) -> Tensor:
        """The rows' hidden states h after the final norm, [S, N, H]."""
        slots = torch.arange(context.shape[1], device=positions.device)
        slots = slots.expand(len(positions), -1)
        config = self.config
        cos, sin = rope_table(
            torch.cat([slots, positions], dim=1).flatten(), config.head_dim, config.rope_theta
        )
        shape = (len(positions), 1, -1, config.head_dim)
        rope = (cos.view(shape), sin.view(shape))
        x = embeds
        for layer in self.layers:
            x = layer(x, context, rope, None if mask is None else mask[:, None])
        hidden: Tensor = self.norm(x)
        return hidden

    def block_ids(self, anchors: Tensor) -> Tensor:
        """anchors int64 [...] -> [..., γ]: the anchor, then mask tokens."""
        masks = anchors.new_full((*anchors.shape, self.config.block_size - 1), self.mask_id)
        return torch.cat([anchors[..., None], masks], dim=-1)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.layers]

    @property
    def mask_id(self) -> int:
        return self.config.mask_token_id
