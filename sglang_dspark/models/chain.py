"""EAGLE3's draft: decoder layers that read a token's embedding beside a hidden state.

EAGLE-3 (arXiv 2503.01840). Slot t pairs g_t, the target's features of position t behind `fc`, with
the token after it, x_{t+1}; drafting goes on with the draft's own output y_t in place of g_{t+1}:

  layer 0  : q, k, v from [input_layernorm(embed(x_{t+1})) ; hidden_norm(g_t)]
  logits   = LM head(norm(y_t)) over the draft vocabulary, for the token x_{t+2}

With one layer, the keys and values of a slot depend on nothing but its own pair: a committed slot
needs no attention, only two projections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.models.layers import DraftLayer, as_head
from sglang_dspark.models.loading import load_weights


class ChainLayer(DraftLayer):
    """The first reads embedding and hidden state; any other, the hidden state alone."""

    def __init__(self, draft: DraftCheckpoint, layer_id: int, quant_config: Any) -> None:
        h, first = draft.hidden_size, layer_id == 0
        super().__init__(draft, layer_id, 2 * h if first else h, quant_config)
        self.first = first
        self.norm_before_residual = draft.norm_before_residual
        if first:
            self.hidden_norm = RMSNorm(h, eps=draft.rms_norm_eps)

    def pair(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's input and the residual."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), residual

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        x, residual = self.pair(embeds, hidden)
        return self.finish(residual, self.self_attn(x, positions, batch))


class SparkChainDraft(nn.Module):
    """hidden_in: [rows, H], the hidden states beside the tokens of the next forward. Its place is
    fixed, so that a captured graph reads what was written there last."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    graph_width = 1  # rows a request of a captured forward

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.draft = draft = DraftCheckpoint.from_dict(config.sglang_dspark)
        h, eps = draft.hidden_size, draft.rms_norm_eps
        width = (draft.target_hidden_size or h) * len(draft.target_layer_ids)
        self.fc = nn.Linear(width, h, bias=draft.fc_bias)
        if draft.feature_norm == "whole":
            self.input_norm = RMSNorm(width, eps=eps)
        if draft.feature_norm == "each":
            size = draft.target_hidden_size or h
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps=eps) for _ in draft.target_layer_ids)
        self.layers = nn.ModuleList(
            ChainLayer(draft, i, quant_config) for i in range(draft.num_layers)
        )
        self.norm = RMSNorm(h, eps=eps)
        if draft.parallel:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width), requires_grad=False)
        self.lm_head: Any = None
        if draft.own_head:
            self.lm_head = ParallelLMHead(draft.draft_vocab_size, h, quant_config=quant_config)
        size = draft.draft_vocab_size
        self.register_buffer("draft_ids", torch.arange(size) if draft.maps_vocabulary else None)
        self.embed_tokens: Any = None
        if draft.own_embedding:
            self.embed_tokens = VocabParallelEmbedding(draft.vocab_size, h)
        self.hidden_in: torch.Tensor | None = None
        # Read by SGLang's runner of the draft, to size its KV pool.
        self.num_stages = draft.num_layers

    def attach_shared_modules(self, *, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """The target's, which are used in place of what the draft does not have."""
        if self.embed_tokens is None:
            self.embed_tokens = embed_tokens
        if self.lm_head is None:
            self.lm_head = as_head(lm_head)

    def allocate(self, rows: int) -> None:
        weight = self.fc.weight
        self.hidden_in = torch.zeros(
            rows, self.draft.hidden_size, dtype=weight.dtype, device=weight.device
        )

    @contextmanager
    def reading(self, hidden: torch.Tensor) -> Iterator[None]:
        """For a forward of any size without a graph: [N, H] in place of the fixed rows."""
        fixed, self.hidden_in = self.hidden_in, hidden
        try:
            yield
        finally:
            self.hidden_in = fixed

    def mask_state(self) -> torch.Tensor:
        """[H], what stands for g in the masked rows of a parallel draft."""
        return self.project(self.mask_hidden.view(1, -1))[0]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.embed_tokens(tokens)
        return embeds

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """features [N, F * H] of the target -> g [N, H]"""
        if self.draft.feature_norm == "whole":
            features = self.input_norm(features.contiguous())
        if self.draft.feature_norm == "each":
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [
                norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts, strict=True)
            ]
            features = torch.cat(normed, dim=-1)
        g: torch.Tensor = self.fc(features)
        return g

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> LogitsProcessorOutput:
        """hidden_states: y [N, H], as they are fed back (before the norm, if not norm_output)."""
        assert self.hidden_in is not None
        hidden = self.hidden_in[: len(input_ids)]
        embeds = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(embeds, hidden, positions, forward_batch)
        if self.draft.norm_output:
            hidden = self.norm(hidden)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def to_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """y -> what the LM head reads."""
        normed: torch.Tensor = hidden if self.draft.norm_output else self.norm(hidden)
        return normed

    def context_kv(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Keys and values of slots; only with one layer. tokens, positions [N]; hidden g [N, H].

        Returns SGLang's attention layer, k and v [N, KV heads, head size].
        """
        layer = cast(ChainLayer, self.layers[0])
        attn = layer.self_attn
        x, _ = layer.pair(self.embed(tokens), hidden)
        k, v = attn.keys_values(x, positions)
        return attn.attn, k, v

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(self, self.draft, weights)


EntryClass = [SparkChainDraft]
