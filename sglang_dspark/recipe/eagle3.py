"""The EAGLE3 draft as a plain torch module, and its training forward over its own steps.

Source: EAGLE-3 (arXiv 2503.01840). One decoder layer reads a token's embedding beside a hidden
state; slot t pairs the target's features of position t with the token after it:

    g_t    = fc([h_1; ...; h_F])_t                        from the target, for committed t
    layer  : q, k, v from [input_layernorm(embed(x_{t+1})) ; hidden_norm(g_t)]; the residual is g_t
    logits = lm_head(norm(y_t)) over the draft vocabulary, for the token x_{t+2}

Drafting goes on with the layer's own output in place of features: g_{t+1} = y_t. Training does the
same for `ttt_length` steps, with the true tokens ("training-time test", section 3.2 of the paper):
a chain of step j sees the context's slots and its own j slots before it, and nothing of the
features that drafting will not have.

Shapes: S sequences, T tokens, A anchors a sequence, H hidden size, F features, D head size, V
vocabulary, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.recipe.batches import Batch
from sglang_dspark.recipe.draft import MLP, DraftConfig, RMSNorm
from sglang_dspark.recipe.target import rope_table, rotate

# Step k of a chain counts STEP_DECAY^(k - 1) in the loss; DeepSpec's step_loss_decay.
STEP_DECAY = 0.8


@dataclass(frozen=True)
class Eagle3Config(DraftConfig):
    """The fields of `DraftConfig` (block_size: the steps of training, γ; markov_rank is 0), and

    draft_vocab_size: tokens that the draft can propose. qk_norm: DeepSpec's Qwen3Eagle3Model, with
    norms on queries and keys and the target's own lm_head, frozen; otherwise the Llama form of
    SpecForge, whose lm_head is trained.
    """

    num_hidden_layers: int = 1
    markov_rank: int = 0
    confidence: bool = False
    draft_vocab_size: int = 4096
    qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers != 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; EAGLE3 here has 1")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; must be in 1..{self.vocab_size}"
            )
        if self.qk_norm and self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; with qk_norm it must be "
                f"{self.vocab_size}, the target's"
            )


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [S, n, 2H], rope of their positions -> [S, heads, n, D]"""
        q = self._split(self.q_proj(x))
        return rotate(self.q_norm(q) if self.qk_norm else q.float(), *rope)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [S, n, 2H] -> two of [S, heads, n, D]; KV heads are repeated for their queries."""
        k, v = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        k = rotate(self.k_norm(k) if self.qk_norm else k.float(), *rope)
        copies = self.heads // self.kv_heads
        return k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def pair(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """embeds [..., H] of the next token, hidden [..., H] -> the attention's input [..., 2H]"""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [S, n, H], attended [S, heads, n, D] -> the layer's output [S, n, H]"""
        x = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Model(nn.Module):
    """d2t int64 [V_d]: the target's id of every draft id, ascending."""

    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(not config.qk_norm)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [S, n] -> cos and sin [S, 1, n, D]"""
        config = self.config
        cos, sin = rope_table(positions.flatten(), config.head_dim, config.rope_theta)
        shape = (len(positions), 1, -1, config.head_dim)
        return cos.view(shape), sin.view(shape)

    def column(self) -> Tensor:
        """int64 [V]; a target id's draft id, or V_d where the draft does not have it."""
        size = self.config.draft_vocab_size
        column = torch.full((self.config.vocab_size,), size, device=self.d2t.device)
        column[self.d2t] = torch.arange(size, device=self.d2t.device)
        return column

    def train_forward(self, batch: Batch, embed: Tensor) -> Tensor:
        """The hidden states behind the logits of every chain, [S, A, γ, H].

        Chain j of a sequence starts at anchor a_j: its first slot is a_j - 1, and row k predicts
        the token at a_j + 1 + k, exactly the rows of `Batch`.
        """
        config, layer = self.config, self.midlayer
        gamma, attention = config.block_size, layer.self_attn
        g = self.fc(batch.features.float())
        tokens = F.embedding(batch.ids, embed).float()
        slots = torch.arange(g.shape[1] - 1, device=g.device).expand(len(g), -1)
        inputs = layer.pair(tokens[:, 1:], g[:, :-1])  # slot t: x_{t+1} beside g_t
        keys, values = attention.key_value(inputs, self.rope(slots))

        first = batch.positions[:, ::gamma]  # [S, A], the anchors
        start = (first - 1).clamp(min=0)
        seen = slots[:, None] <= start[..., None]  # [S, A, T - 1]
        chain = F.embedding(batch.previous.unflatten(1, (-1, gamma)), embed).float()
        hidden = g.gather(1, start[..., None].expand(-1, -1, g.shape[-1]))
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for k in range(gamma):
            x = layer.pair(chain[:, :, k], hidden)
            rope = self.rope(start + k)
            query = attention.query(x, rope) * config.head_dim**-0.5
            scores = [(query @ keys.transpose(-1, -2)).masked_fill(~seen[:, None], float("-inf"))]
            if k > 0:  # slot a - 1 itself is in the context
                key, value = attention.key_value(x, rope)
                own_keys.append(key)
                own_values.append(value)
            scores += [(query * key).sum(dim=-1, keepdim=True) for key in own_keys]
            weights = torch.cat(scores, dim=-1).float().softmax(dim=-1)
            attended = weights[..., : keys.shape[2]].to(values.dtype) @ values
            for i, value in enumerate(own_values):
                attended = attended + weights[..., keys.shape[2] + i, None].to(value.dtype) * value
            hidden = layer.finish(hidden, attended)
            outputs.append(self.norm(hidden))
        return torch.stack(outputs, dim=2)


def eagle3_loss(
    logits: Tensor,  # [R, V_d]
    topk_ids: Tensor,  # int64 [R, k]
    topk_probs: Tensor,  # float32 [R, k]
    weights: Tensor,  # float32 [R]
    column: Tensor,  # int64 [V], Eagle3Model.column
) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distribution restricted to the draft vocabulary.

    Rows whose likely tokens all lie outside of it do not count. Returns the loss and, without
    gradient, 1 - ½‖p - q‖₁ of every row over the whole vocabulary, [R].
    """
    size = logits.shape[1]
    p = logits.new_zeros(len(logits), size + 1, dtype=torch.float32)
    p.scatter_add_(1, column[topk_ids], topk_probs)
    p = p[:, :size]
    inside = p.sum(dim=-1)
    log_q = logits.float().log_softmax(dim=-1)
    entropy = -(p * log_q).sum(dim=-1) / inside.clamp(min=1e-6)
    share = weights * (inside > 0.05)
    accept = torch.minimum(p, log_q.detach().exp()).sum(dim=-1)
    return (entropy * share).sum() / share.sum(), accept
